"""The tables of docs/reference/algorithms.md: every loss and estimator, and how far it is from verl's or its formula.

``uv run python scripts/docs/algorithms_page.py`` writes them, and with ``--print`` prints the page; a test holds that
it is up to date.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from gcore_llm.config import TrainConfig
from gcore_llm.migration.comparison import computed_by_verl, differences
from gcore_llm.migration.fixed_batch import FixedBatch, computed_here
from gcore_trainer import get_advantage_estimator, get_policy_loss, options_type
from gcore_trainer.advantages.estimator import ESTIMATORS
from gcore_trainer.config import POLICY_LOSSES
from gcore_trainer.diffusion.config import DENOISING_LOSSES, FORWARD_LOSSES
from gcore_trainer.diffusion.objectives import forward_options, old_options
from gcore_trainer.losses import echo

PAGE = Path(__file__).parents[2] / "docs/reference/algorithms.md"
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "dro": {"dro_beta": 0.3},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1},
    "kl_cov": {"kl_cov_ratio": 0.2},
    "sapo": {"tau_neg": 1.5},
    "gae": {"gamma": 0.97, "lam": 0.9},
    "reinforce_plus_plus": {"gamma": 0.97},
    "gdpo": {"gdpo_rewards": {"right": 1.0, "short": 0.5}},
}
"""Options with which an algorithm is compared, where its defaults are not enough."""
FORMULAS: Mapping[str, tuple[str, float]] = {
    "echo": ("tests/gcore_trainer/test_echo.py::test_it_is_added_to_the_policy_loss", 1e-6),
    "m2po": ("tests/gcore_trainer/test_policy_losses.py::test_m2po", 1e-9),
    "maxrl": (
        "tests/gcore_trainer/test_advantages.py::test_maxrl_weighs_a_success_by_how_rare_it_is",
        1e-6,
    ),
    "gigpo": (
        "tests/gcore_trainer/test_advantages.py::test_gigpo_compares_turns_at_equal_states",
        1e-5,
    ),
    "grpo_process": (
        "tests/gcore_trainer/test_advantages.py::test_process_supervision_adds_up_the_steps_that_follow",
        1e-5,
    ),
    "flash_reinforce": (
        "tests/apps/gcore_llm/test_preparation.py::test_responses_are_compared_with_their_batch",
        1e-6,
    ),
    "rae": (
        "tests/apps/gcore_llm/test_preparation.py::test_roles_have_moving_baselines",
        1e-6,
    ),
    "optimal_token_baseline": (
        "tests/gcore_trainer/test_verl_oracle.py::test_optimal_token_baseline",
        1e-6,
    ),
    "distillation": (
        "tests/gcore_trainer/test_distillation.py::test_its_expected_gradient_is_that_of_the_divergence",
        1e-6,
    ),
}
"""The tests of those that verl does not have, and the difference that they allow."""
IMAGE_FORMULAS: Mapping[str, str] = {
    "flow_grpo": "clipped_step",
    "grpo_guard": "guard_takes_the_bias_and_the_scale_out_of_the_ratio",
    "flow_dppo": "flow_dppo",
    "opd": "opd",
    "nft": "nft",
    "awm": "awm",
    "dgpo": "dgpo",
    "crd": "crd",
    "dpo": "diffusion_dpo",
}
"""The tests of the losses of image models, all in one file, in float64."""
BOUNDS = (1e-6, 1e-5)
"""The differences of the page: a difference's last digits depend on the machine."""
_PART = re.compile(r"(<!-- algorithms:.*?-->\n).*?(<!-- end of algorithms -->)", re.DOTALL)


def measure(setting: str, name: str) -> float:
    """Return the largest difference of advantages, loss and gradient to verl's, relative to the largest entry."""
    config = TrainConfig()
    algorithm = replace(config.algorithm, old_log_probs="trainer")
    options = dict(OPTIONS.get(name, {}))
    loss = config.actor.loss
    if setting == "loss_mode":
        is_by_sequence = name in ("sapo", "geo_mean")
        loss_agg_mode = "seq-mean-token-mean" if is_by_sequence else "token-mean"
        loss = replace(loss, loss_mode=name, loss_agg_mode=loss_agg_mode)
        algorithm = replace(algorithm, options=options)
    else:
        algorithm = replace(algorithm, adv_estimator=name, options=options)
    config = replace(config, algorithm=algorithm, actor=replace(config.actor, loss=loss))
    batch = FixedBatch.of(config, seed=0)
    rows = differences(computed_here(config, batch), computed_by_verl(config, batch))
    return max(gap for *_, gap in rows)


def row(setting: str, name: str, module: ModuleType) -> str:
    """Return the row of a loss or an estimator, by its formula or by verl."""
    if name in FORMULAS:
        test, bound = FORMULAS[name]
        return formula_row(name, module, test, bound)
    gap = measure(setting, name)
    bound = next((bound for bound in BOUNDS if gap <= bound), gap)
    return cells(name, module, "verl 0.9.1", bound)


def formula_row(name: str, module: ModuleType, test: str, bound: float) -> str:
    """Return the row of what a test compares with its formula."""
    return cells(name, module, f"its formula, `{test}`", bound)


def cells(name: str, module: ModuleType, oracle: str, bound: float) -> str:
    """Return a row: name, sources, file, oracle and largest difference."""
    text = Path(str(module.__file__)).read_text()
    papers = [
        f"arXiv {number}" for number in dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{5})", text))
    ]
    file = "/".join(module.__name__.split(".")[1:]) + ".py"
    return f"| `{name}` | {', '.join(papers)} | `{file}` | {oracle} | {bound:.0e} |\n"


def option_rows(name: str, function: Callable[..., Any]) -> str:
    """Return a row for each option of a loss or an estimator."""
    rows: list[str] = []
    for option in fields(options_type(function)):
        bounds = getattr(option.type, "__metadata__", ())
        accepted = bounds[0].accepted if bounds else getattr(option.type, "__name__", "")
        accepted = {"bool": "true or false", "float": "a number"}.get(accepted, accepted)
        default = f"`{option.default}`" if option.default != "" else "none"
        rows.append(f"| `{name}` | `{option.name}` | {accepted} | {default} |\n")
    return "".join(rows)


def estimator_function(name: str) -> Callable[..., Any]:
    return get_advantage_estimator(name).function


def image_tables() -> str:
    """Return the tables of the losses of image models and of their options."""
    methods = "\n## Losses of image models\n\n| method | source | file | compared with | largest difference |\n"
    methods += "|---|---|---|---|---|\n"
    options = "\n| of | option | accepted | default |\n|---|---|---|---|\n"
    options += option_rows("all in losses/forward", forward_options)
    options += option_rows("awm, crd, nft", old_options)
    for registry in (DENOISING_LOSSES, FORWARD_LOSSES):
        for name in registry.names:
            function = registry.load(name)
            test = f"tests/gcore_trainer/test_diffusion_losses.py::test_{IMAGE_FORMULAS[name]}"
            methods += formula_row(name, import_module(function.__module__), test, 1e-6)
            options += option_rows(name, function)
    return methods + options


def tables() -> str:
    """Return the tables of losses, of estimators and of options."""
    methods = ""
    options = "| of | option | accepted | default |\n|---|---|---|---|\n"
    options += option_rows("echo", echo.echo)
    for title, setting, registry, get_function in (
        ("Losses", "loss_mode", POLICY_LOSSES, get_policy_loss),
        ("Advantages", "adv_estimator", ESTIMATORS, estimator_function),
    ):
        methods += (
            f"\n## {title}\n\n| method | source | file | compared with | largest difference |\n"
        )
        methods += "|---|---|---|---|---|\n"
        if setting == "loss_mode":
            methods += row(setting, "echo", echo)
        for name in registry.names:
            function = get_function(name)
            methods += row(setting, name, import_module(function.__module__))
            options += option_rows(name, function)
    return f"{methods}\n## Options\n\n{options}{image_tables()}\n"


def page() -> str:
    """Return the page with its tables."""
    text, count = _PART.subn(lambda part: f"{part[1]}{tables()}{part[2]}", PAGE.read_text())
    assert count == 1, f"{PAGE} has no place for the tables"
    return text


if __name__ == "__main__":
    if "--print" in sys.argv:
        print(page(), end="")
    else:
        PAGE.write_text(page())
