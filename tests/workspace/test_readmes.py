"""What READMEs, CONTRIBUTING.md and the pages of docs/ give a reader to run does run."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import Cli, Server
from forks import FORK
from house import DOCUMENTS, READMES, ROOT, fenced_blocks, names_of_tests, relative

READ_ON = (
    "README.md",
    "apps/gcore-llm/README.md",
    "docs/start.md",
    "docs/how-to/own-model.md",
    "docs/how-to/own-environment.md",
    "docs/how-to/train-an-agent.md",
    "docs/how-to/plan-a-run.md",
    "docs/how-to/several-processes.md",
    "docs/how-to/fine-tuning.md",
    "docs/how-to/adapters.md",
    "docs/how-to/distillation.md",
    "docs/how-to/simulate.md",
    "docs/how-to/watch-a-run.md",
    "docs/how-to/debug.md",
)
"""Documents that use the runs and files of those before them. Their commands run in one folder, each once."""
GROUPS = [
    [ROOT / name for name in READ_ON],
    *([d] for d in DOCUMENTS if relative(d) not in READ_ON),
]

HERE = "tests/workspace/test_readmes.py"
WHEELS, VERSIONS = "tests/workspace/test_wheels.py", "tests/workspace/test_versions.py"
CUDA, DEPLOY = "tests/workspace/test_cuda_environment.py", "tests/apps/test_deploy.py"
LLM, DIFFUSION, BENCH = (f"tests/apps/gcore_{app}" for app in ("llm", "diffusion", "bench"))

CHECKED_ELSEWHERE = {
    r"pip install uv": ".ci/run",
    r"uv sync": ".ci/run",
    r"(export UV_\w+=1 UV_NO_SYNC=1|uv sync --group dev --group cuda)": f"{CUDA}::test_uv_run_leaves_it_as_it_is",
    r"source <\(gcore-llm --print-completion bash\)": "tests/apps/gcore_runs/test_command_line.py::test_completion",
    r"(source|ulimit|export RAY_AUTH_MODE=token) ?.*": f"{DEPLOY}::test_the_slurm_script_runs_on_two_nodes",
    r"(docker|kubectl|sbatch) .*": f"{DEPLOY}::test_files_that_commands_of_the_page_name_exist",
    r"(ray start|\(umask 077; ray get-auth-token) .*": f"{DEPLOY}::test_commands_of_the_page_are_parsed",
    r"gcore-placement plan --model /shared/.*": f"{DEPLOY}::test_commands_of_the_page_are_parsed",
    r"gcore-llm (doctor --ray|train --config run.toml).*": f"{DEPLOY}::test_commands_of_the_page_are_parsed",
    r"(uv run )?gcore-llm doctor": "tests/apps/gcore_runs/test_doctor.py::test_the_command_checks_this_machine",
    r"gcore-llm train --model Qwen/Qwen2\.5-0\.5B-Instruct .*": (
        "tests/apps/gcore_runs/test_hub.py::test_the_command_of_the_page_runs"
    ),
    r"gcore-llm (from-verl|train --config) run_qwen2-7b.*": (
        f"{LLM}/migration/test_from_verl.py::test_a_script_of_their_examples_runs"
    ),
    r"gcore-llm (from-trl|train --config) grpo.*": (
        f"{LLM}/migration/test_from_trl.py::test_a_config_of_their_examples_runs"
    ),
    r"uv run ruff check": ".ci/run",
    r"uv run ruff format --check": ".ci/run",
    r"uv run basedpyright": ".ci/run",
    r"uv run pytest": ".ci/run",
    r"uv run pytest -m slow": ".ci/run",
    r"uv run python scripts/release/bounds\.py": f"{WHEELS}::test_packages_ask_for_compatible_ones",
    r"uv run python scripts/release/notes\.py": f"{VERSIONS}::test_the_command_prints_the_newest_entries",
    r"uv run python scripts/release/constraints\.py": (
        f"{VERSIONS}::test_constraints_are_the_tested_versions_of_all_that_the_apps_need"
    ),
    r"uv run mkdocs build --strict": "tests/workspace/test_site.py::test_every_page_is_there",
    r"uv run pytest tests/\w+": f"{HERE}::test_named_test_folders_exist",
    r"uv run pytest -m gpu tests/gpu": "tests/gpu/test_engine.py::test_engine_and_trainer_agree",
    r"scripts/gpu/accept --make-wheels .*": "tests/scripts/test_accept.py::test_wheels_are_what_the_image_lacks",
    r"scripts/gpu/accept .*--parts multi .*": "tests/scripts/test_accept.py::test_several_ranks_on_a_cpu",
    r"scripts/gpu/accept( --.*)?": "tests/scripts/test_accept.py::test_all_parts_run_on_a_cpu",
    r"\.ci/run": "tests/workspace/test_repository.py::test_the_ci_script_can_be_run",
    r"pip install '?gcore-\w+(\[[\w,-]+\])?'?": f"{WHEELS}::test_a_package_installs_alone_and_imports",
    r"WANDB_MODE=offline uv run gcore-llm train .* --trainer.trackers wandb .*": (
        f"{DIFFUSION}/test_screens.py::test_wandb_gets_metrics_and_images"
    ),
    r"uv run gcore-llm train --rollout\.agent\.run examples/tool_agent\.py:agent": (
        f"{LLM}/test_agents.py::test_the_example_learns"
    ),
    r"(uv run )?gcore-llm train --model PATH .*": f"{HERE}::test_shell_commands_run",
    r"(uv run )?gcore-llm train --runtime ray .*": f"{LLM}/test_on_ray.py::test_controllers_everywhere_train_alike",
    r"(uv run )?gcore-llm simulate --.*": f"{LLM}/test_simulate.py::test_command_prints_its_table",
    r"(uv run )?gcore-agents conformance.*": "tests/gcore_agents/test_conformance.py::test_the_command",
    r"uv run gcore-diffusion train --model PIPELINE .* --data.image-key image .*": (
        f"{DIFFUSION}/test_images_in_prompts.py::test_the_example_of_the_page"
    ),
    r"(uv run )?gcore-(diffusion|llm) train --recipe \w+ --dry-run( --dry-run-device H100)?": (
        "tests/apps/test_recipe_pages.py::test_the_page_shows_what_a_dry_run_prints"
    ),
    r"(uv run )?gcore-diffusion train --model PIPELINE .*": f"{DIFFUSION}/test_diffusion.py::test_every_algorithm_runs",
    r"(uv run )?gcore-diffusion train --runtime ray .*": (
        f"{DIFFUSION}/test_diffusion.py::test_a_cluster_trains_alike_despite_kills"
    ),
    r"uv run gcore-bench data": f"{BENCH}/test_bench_data.py::test_a_quick_run",
    r"(uv run )?gcore-bench diffusion( --.*)?": f"{BENCH}/test_bench_diffusion.py::test_bench_measures_steps",
    r"uv run python tests/ranks/pipeline_conformance\.py": (
        "tests/gcore_rollout/test_pipeline_families.py::test_the_command_prints_the_table"
    ),
    r"uv run python examples/\w+\.py": "tests/apps/test_examples.py::test_a_quick_example_runs",
    r"gcore-ckpt import-dcp .*": "tests/gcore_ckpt/test_cli.py::test_import_dcp",
    r"gcore-ckpt import-pt .*": "tests/gcore_ckpt/test_cli.py::test_import_pt",
    r"(uv run )?gcore-bench grpo( --.*)?": f"{BENCH}/test_bench.py::test_bench_measures_gcore_and_trl",
    r"(uv run )?gcore-bench algorithms( --.*)?": (
        f"{BENCH}/test_bench_algorithms.py::test_a_quick_run_is_not_made_again"
    ),
    r"(uv run )?gcore-bench ckpt( --.*)?": f"{BENCH}/test_bench_ckpt.py::test_bench_measures_saves_and_loads",
    r"(uv run )?gcore-bench trainer( --.*)?": f"{BENCH}/test_bench_trainer.py::test_bench_measures_the_trainer",
    r"(uv run )?gcore-bench rollout( --.*)?": f"{BENCH}/test_bench_rollout.py::test_bench_measures_rollouts",
    r"(uv run )?gcore-bench controller( --.*)?": f"{BENCH}/test_bench_controller.py::test_bench_measures_controllers",
    r"(uv run )?gcore-bench data( --.*)?": f"{BENCH}/test_bench_data.py::test_a_quick_run",
    r"(uv run )?gcore-bench agents( --.*)?": f"{BENCH}/test_bench_agents.py::test_a_quick_run",
    r"(uv run )?gcore-bench placement( --.*)?": f"{BENCH}/test_bench_placement.py::test_bench_measures_the_balancer",
}
"""Commands that are not run here, and what runs them: the CI script, which holds the very words, or a test."""

SHORTENED = {
    # Enough of a warm-up for some responses to be right: a run that learns nothing ends with exit code 3.
    "gcore-llm train": "--warmup.max-steps 50 --warmup.batch-size 64 --task.params.max-terms 2 --task.num-train 512 "
    "--task.num-val 16 --data.train-batch-size 4 --data.max-response-length 8 --rollout.n 8 "
    "--trainer.total-training-steps 1",
    "gcore-diffusion train": "--demo.num-steps 4 --demo.cache-dir cache --rollout.n 4 --data.train-batch-size 2 "
    "--trainer.total-training-steps 1",
    **{
        f"gcore-llm {command}": f"{options} --trainer.total-training-steps 2 --task.num-train 512 --task.num-val 16"
        for command, options in {
            "sft": "",
            "reward-model": "--warmup-steps 2",
            "dpo": "--warmup-steps 2",
        }.items()
    },
}
"""Commands that take minutes, and the options that make them short here, so that those after them find their run."""

FEWER_STEPS = {"30": "3", "32": "5"}
"""Steps of a run of a page, and of the command that continues it; and how many they make here."""

CHECKED_CLOSELY = {
    "gcore-llm train": f"{LLM}/test_train.py::test_embedded_run_folder",
    "gcore-llm sft": f"{LLM}/test_sft.py::test_demo",
    "gcore-llm reward-model": f"{LLM}/test_reward_model.py::test_demo",
    "gcore-llm dpo": f"{LLM}/test_dpo.py::test_demo",
    "gcore-diffusion train": f"{DIFFUSION}/test_diffusion.py::test_embedded_run_folder",
}
"""For each shortened command, the test that looks at what it leaves behind."""

RUN_HERE = (
    r"(uv run )?"
    r"(gcore-llm (train|sft|reward-model|dpo|sample|eval|report|trace|logs)|"
    r"gcore-diffusion (train|sample|report|trace|logs)|"
    r"gcore-ckpt|gcore-placement (plan|simulate|ledger)|torchrun|python|cat|head|ls|mkdir|rm -r run/|"
    r"tensorboard --help)\b.*"
)

ADVICE = (
    "is neither known nor run: if it takes seconds and needs nothing, let RUN_HERE match it; "
    "otherwise put it in CHECKED_ELSEWHERE with the CI step or the test that runs it"
)


SHELL_SYNTAX = re.compile(r"[|;&<>$`*?~\n]")
"""What only a shell understands, wherever it stands in a command."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of a shell block, here-documents and continued lines included."""

    text: str
    where: str


@dataclass(frozen=True, kw_only=True)
class Example:
    """One Python block."""

    code: str
    where: str


def examples() -> Iterator[Example]:
    for document in DOCUMENTS:
        for label, content, line in fenced_blocks(document.read_text()):
            if label == "python":
                yield Example(code=content, where=f"{relative(document)}:{line}")


def commands(document: Path) -> list[Command]:
    """Every command of a document's shell blocks, and of unlabelled blocks that begin like one."""
    found: list[Command] = []
    for label, content, first_line in fenced_blocks(document.read_text()):
        if label not in ("bash", "sh", "shell", "console") and not (
            not label and re.match(r"\s*(\$ |pip |uv |gcore-)", content)
        ):
            continue
        lines = content.splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line.removeprefix("$ ") if line.startswith("$ ") else "" for line in lines]
        found += [
            Command(text=text, where=f"{relative(document)}:{first_line + number}")
            for number, text in split_commands(lines)
        ]
    return found


def in_order(group: list[Path]) -> list[Command]:
    """Commands of documents that follow each other, those that come again left out."""
    first: dict[str, Command] = {}
    for command in (command for document in group for command in commands(document)):
        first.setdefault(command.text.removeprefix("uv run "), command)
    return list(first.values())


def split_commands(lines: list[str]) -> Iterator[tuple[int, str]]:
    """First line number and text of each command; comments are left out."""
    number = 0
    while number < len(lines):
        first, text = number, lines[number]
        number += 1
        while text.endswith("\\") and number < len(lines):
            text = text[:-1] + lines[number].lstrip()
            number += 1
        if here := re.search(r"<<\s*'?(\w+)'?", text):
            while number < len(lines):
                text += "\n" + lines[number]
                number += 1
                if lines[number - 1] == here[1]:
                    break
        else:
            text = re.sub(r"(^|\s+)#.*", "", text).strip()
        if text:
            yield first, text


def checked_elsewhere(command: Command) -> str | None:
    return next(
        (
            where
            for pattern, where in CHECKED_ELSEWHERE.items()
            if re.fullmatch(pattern, command.text)
        ),
        None,
    )


def is_run_here(command: Command) -> bool:
    known = re.fullmatch(RUN_HERE, command.text, flags=re.DOTALL) is not None
    return known and checked_elsewhere(command) is None


def first_path(group: list[Path]) -> str:
    return relative(group[0])


@pytest.mark.slow
@pytest.mark.parametrize("example", list(examples()), ids=lambda e: e.where)
@pytest.mark.usefixtures("server")
def test_python_examples_run(example: Example, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(example.code)
    folder = tmp_path / "empty"
    folder.mkdir()
    result = subprocess.run(
        [sys.executable, *FORK, "-W", "default", script],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_shell_commands_are_all_checked(document: Path) -> None:
    unknown = [
        f"{command.where}: {command.text!r} {ADVICE}"
        for command in commands(document)
        if checked_elsewhere(command) is None and not is_run_here(command)
    ]
    assert not unknown, "\n".join(unknown)


@pytest.fixture
def servers(server: Server, diffusion_server: Server) -> dict[str, Server]:
    """Both apps, imported once for the commands of all documents."""
    return {"gcore-llm": server, "gcore-diffusion": diffusion_server}


@pytest.fixture(scope="module")
def python_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What torchrun starts as its ranks' Python, with -u: a fork takes the place of each."""
    script = tmp_path_factory.mktemp("ranks") / "python"
    script.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} {" ".join(FORK)} "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", [g for g in GROUPS if any(map(is_run_here, in_order(g)))], ids=first_path
)
def test_shell_commands_run(
    group: list[Path], tmp_path: Path, servers: dict[str, Server], python_of_ranks: Path
) -> None:
    """All that are not checked elsewhere, in the documents' order and in one empty folder."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHON_EXEC": str(python_of_ranks),
    }
    for command in filter(is_run_here, in_order(group)):
        text = command.text.removeprefix("uv run ")
        text = f"{text} {SHORTENED.get(text, '')}".strip()
        for steps, fewer in FEWER_STEPS.items():
            text = re.sub(rf"(--trainer\.total-training-steps) {steps}\b", rf"\1 {fewer}", text)
        app = text.partition(" ")[0]
        if app in servers and not SHELL_SYNTAX.search(text):
            finished = Cli(servers[app], tmp_path)(*shlex.split(text)[1:])
            assert finished.code == 0, (command, finished)
            continue
        text = re.sub("^python ", f"python {' '.join(FORK)} ", text)
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert result.returncode == 0, (command, result)


@pytest.mark.parametrize("pattern", CHECKED_ELSEWHERE)
def test_what_is_checked_elsewhere_is_checked_there(pattern: str) -> None:
    file, _, test = CHECKED_ELSEWHERE[pattern].partition("::")
    if test:
        assert test in names_of_tests(ROOT / file)
    else:
        assert re.search(
            rf"(^|step |\|\| step ){pattern}( --durations=\d+)?$",
            (ROOT / file).read_text(),
            flags=re.MULTILINE,
        )


@pytest.mark.parametrize("steps", FEWER_STEPS)
def test_runs_with_fewer_steps_are_there(steps: str) -> None:
    """Their metrics are looked at in `tests/apps/gcore_llm/test_own_data.py`."""
    option = f"--trainer.total-training-steps {steps}"
    assert any(option in command.text for document in DOCUMENTS for command in commands(document))


@pytest.mark.parametrize("command", SHORTENED)
def test_what_is_shortened_is_checked_closely_elsewhere(command: str) -> None:
    file, _, test = CHECKED_CLOSELY[command].partition("::")
    assert test in names_of_tests(ROOT / file)


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_named_test_folders_exist(document: Path) -> None:
    for name in re.findall(r"pytest (tests/\w+)", document.read_text()):
        assert (ROOT / name).is_dir()


@pytest.mark.parametrize("document", READMES, ids=relative)
def test_a_readme_is_short(document: Path) -> None:
    """What is longer is a page of docs/."""
    assert len(document.read_text().splitlines()) <= 150


def test_commands_are_distinguished() -> None:
    lines = [
        "# first",
        "uv run a \\",
        "  --b 1  # why",
        "",
        "cat > f <<'EOF'",
        "x # kept",
        "EOF",
        "uv run c",
    ]
    assert list(split_commands(lines)) == [
        (1, "uv run a --b 1"),
        (4, "cat > f <<'EOF'\nx # kept\nEOF"),
        (7, "uv run c"),
    ]
