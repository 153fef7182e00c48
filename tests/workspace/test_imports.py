"""Who may import whom. Every rule looks at all source files by their syntax, nothing is imported."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from house import APPS, DISTRIBUTIONS, PACKAGES, Distribution, imports, parse, relative

APPS_MAY_IMPORT = {
    "gcore_runs": set[str](),
    "gcore_llm": {"gcore_runs"},
    "gcore_diffusion": {"gcore_runs"},
    "gcore_bench": {"gcore_diffusion", "gcore_llm", "gcore_runs"},
}
"""Apps on top of each app's own code; packages are open to all of them."""

ADAPTERS = {
    "accelerate": ["packages/gcore-ckpt/src/gcore_ckpt/integrations/accelerate.py"],
    "lightning": ["packages/gcore-ckpt/src/gcore_ckpt/integrations/lightning.py"],
    "vllm": [
        "packages/gcore-rollout/src/gcore_rollout/engines/vllm/",
        "apps/gcore-bench/src/gcore_bench/rollout.py",
        "apps/gcore-bench/src/gcore_bench/grpo.py",
    ],
    "reasoning_gym": ["packages/gcore-rollout/src/gcore_rollout/rewards/kinds/verifiers.py"],
    "math_verify": ["packages/gcore-rollout/src/gcore_rollout/rewards/kinds/verifiers.py"],
    "trl": [
        "apps/gcore-llm/src/gcore_llm/migration/comparison.py",
        "apps/gcore-bench/src/gcore_bench/grpo.py",
        "apps/gcore-bench/src/gcore_bench/trainer.py",
    ],
    "verl": [
        "apps/gcore-llm/src/gcore_llm/migration/comparison.py",
        "apps/gcore-bench/src/gcore_bench/trainer.py",
        "apps/gcore-bench/src/gcore_bench/controller.py",
    ],
    "sglang": [],
    "diffusers": [
        "packages/gcore-rollout/src/gcore_rollout/engines/diffusion/",
        "packages/gcore-trainer/src/gcore_trainer/diffusion/",
        "apps/gcore-diffusion/src/gcore_diffusion/demo/",
        "apps/gcore-diffusion/src/gcore_diffusion/planning/",
        "apps/gcore-diffusion/src/gcore_diffusion/trainer_worker.py",
    ],
    "peft": ["packages/gcore-trainer/src/gcore_trainer/lora.py"],
    "megatron": ["packages/gcore-trainer/src/gcore_trainer/megatron/"],
    "ray": [
        "packages/gcore-controller/src/gcore_controller/runtimes/ray/",
        "packages/gcore-rollout/src/gcore_rollout/engines/remote/ray_engine.py",
        "packages/gcore-rollout/src/gcore_rollout/weight_sync/weight_references.py",
        "apps/gcore-bench/src/gcore_bench/controller.py",
        "apps/gcore-runs/src/gcore_runs/doctor/cluster.py",
        "apps/gcore-runs/src/gcore_runs/node_logs.py",
        "apps/gcore-runs/src/gcore_runs/on_ray.py",
    ],
    "fsspec": ["packages/gcore-rollout/src/gcore_rollout/images/decoding.py"],
    "datasets": ["apps/gcore-runs/src/gcore_runs/data/hub.py", "apps/gcore-bench/src/gcore_bench/"],
    "prometheus_client": ["apps/gcore-runs/src/gcore_runs/trackers/prometheus.py"],
    "mlflow": ["apps/gcore-runs/src/gcore_runs/trackers/mlflow_runs.py"],
    "swanlab": ["apps/gcore-runs/src/gcore_runs/trackers/logged_runs.py"],
    "trackio": ["apps/gcore-runs/src/gcore_runs/trackers/logged_runs.py"],
    "wandb": ["apps/gcore-runs/src/gcore_runs/trackers/logged_runs.py"],
}
"""The one file or folder of a distribution that may import each library with a life of its own."""

APPS_MODULES = ["gcore_runs", "gcore_llm", "gcore_diffusion", "gcore_bench"]

ONLY_IN_APPS = ["pydantic", "tyro", "tomllib", "tomli_w", "argparse", "rich", *APPS_MODULES]

FOR_COMMANDS = ["argparse", "rich", "tomllib"]
"""Of these, what a package's `cli.py`, `cli_*.py` and `cli/` may import, and nothing else of it."""

READ_OWN_TABLES = [
    "packages/gcore-agents/src/gcore_agents/conformance/cases.py",
    "packages/gcore-placement/src/gcore_placement/simulation/scenarios.py",
]
"""Files that read TOML which is part of their package, and no configuration."""

DISTRIBUTED_AS = {
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
"""Top-level modules whose distribution has another name."""

USED_THROUGH_ANOTHER = {
    "tensorboard": "torch.utils.tensorboard",
    "reasoning-gym": "gcore_rollout.rewards",
    "math-verify": "gcore_rollout.rewards",
}
"""Dependencies that a distribution installs for a module which imports them on its behalf."""


def by_name(distribution: Distribution) -> str:
    return distribution.name


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_package_imports_no_other_of_ours(package: Distribution) -> None:
    wrong = [
        f"{relative(path)}:{i.line} imports {i.module}"
        for path in package.files()
        for i in imports(path)
        if i.top.startswith("gcore_") and i.top != package.module
    ]
    assert not wrong, "declare a Protocol, and let the app hand the object over"


@pytest.mark.parametrize("app", APPS, ids=by_name)
def test_an_app_imports_packages_and_the_apps_it_may(app: Distribution) -> None:
    allowed = {app.module} | {p.module for p in PACKAGES} | APPS_MAY_IMPORT[app.module]
    wrong = [
        f"{relative(path)}:{i.line} imports {i.module}"
        for path in app.files()
        for i in imports(path)
        if i.top.startswith("gcore_") and i.top not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("library", ADAPTERS)
def test_a_library_is_imported_only_where_it_is_adapted(library: str) -> None:
    wrong = [
        f"{relative(path)}:{i.line} imports {i.module}"
        for d in DISTRIBUTIONS
        for path in d.files()
        for i in imports(path)
        if i.top == library and not relative(path).startswith(tuple(ADAPTERS[library]))
    ]
    assert not wrong, (
        f"{library} is adapted in {ADAPTERS[library] or 'no file yet: add the new one to ADAPTERS'}"
    )


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_packages_take_dataclasses_and_parse_nothing(package: Distribution) -> None:
    wrong = [
        f"{relative(path)}:{i.line} imports {i.module}"
        for path in package.files()
        for i in imports(path)
        if i.top in ONLY_IN_APPS and not (i.top in FOR_COMMANDS and is_command(path))
    ]
    assert not wrong, "only apps parse and print, and a package's cli.py"


def is_command(path: Path) -> bool:
    """Whether the file is a part of a package's command line, or reads its own tables."""
    if relative(path) in READ_OWN_TABLES:
        return True
    return path.stem == "cli" or path.stem.startswith("cli_") or path.parent.name == "cli"


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_no_private_name_of_another_distribution_is_used(distribution: Distribution) -> None:
    assert not [use for path in distribution.files() for use in private_uses(path, distribution)]


def private_uses(path: Path, distribution: Distribution) -> Iterator[str]:
    for i in imports(path):
        parts = [*i.module.split("."), i.name]
        foreign = i.top.startswith("gcore_") and i.top != distribution.module
        if foreign and any(is_private(part) for part in parts):
            yield f"{relative(path)}:{i.line} imports {'.'.join(filter(None, parts))}"
    elsewhere = {name for d in DISTRIBUTIONS if d != distribution for name in private_names(d)}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Attribute) and node.attr in elsewhere - private_names(distribution):
            yield f"{relative(path)}:{node.lineno} reaches for .{node.attr}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_names(distribution: Distribution) -> set[str]:
    """Private functions, classes, variables and attributes that a distribution defines."""
    names: set[str] = set()
    for path in distribution.files():
        for node in ast.walk(parse(path)):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    names.add(name)
                case _:
                    pass
    return {name for name in names if is_private(name)}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_what_is_imported_is_declared_and_nothing_else(distribution: Distribution) -> None:
    project = distribution.project
    declared = {name_of(line) for line in project["dependencies"]}
    optional = {name_of(line) for lines in distribution.extras.values() for line in lines}
    tops = {i.top for path in distribution.files() for i in imports(path)}
    foreign = tops - set(sys.stdlib_module_names) - {distribution.module}
    imported = {DISTRIBUTED_AS.get(top, top.replace("_", "-")) for top in foreign}
    # The app's two vLLMs (CPU and CUDA) are dependency groups of the workspace, of which one can be installed.
    # verl and TRL are compared with where they are installed.
    needless = {"vllm", "verl", "trl"} if not distribution.is_package else set[str]()
    missing = imported - declared - optional - needless
    assert not missing, f"add to [project] dependencies of {distribution.name}: {sorted(missing)}"
    unused = declared - imported - USED_THROUGH_ANOTHER.keys()
    assert not unused, (
        f"take out of [project] dependencies of {distribution.name}: {sorted(unused)}"
    )


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0]


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_missing_extra_names_one_that_exists(package: Distribution) -> None:
    """`make_extra_error(module, extra)`, or gcore-ckpt's `MissingExtraError`, wherever it is raised."""
    for path in package.files():
        for node in ast.walk(parse(path)):
            match node:
                case ast.Call(
                    func=ast.Name(id="make_extra_error" | "MissingExtraError"),
                    args=[ast.Constant(), ast.Constant(value=extra)],
                ):
                    assert extra in package.extras, f"{relative(path)}:{node.lineno}"
                case _:
                    pass
