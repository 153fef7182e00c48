"""Settings that only some algorithms read: each is refused with the others, and with its own it has an effect."""

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from gcore_diffusion.cli import parse_train as parse_diffusion
from gcore_diffusion.config import RECIPES, DiffusionConfig
from gcore_llm.cli import parse_train
from gcore_llm.config import TrainConfig
from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from gcore_runs import ReadWith, UserError, merge, to_toml
from gcore_runs.settings.checks import conditional_settings, default_settings, setting_types
from gcore_trainer import (
    PolicyLossConfig,
    policy_loss,
)
from gcore_trainer.advantages.estimator import ESTIMATORS
from gcore_trainer.config import POLICY_LOSSES

CONFIGS: tuple[type, ...] = (
    TrainConfig,
    DiffusionConfig,
    SFTRunConfig,
    RewardModelRunConfig,
    DPORunConfig,
)
CHOICES: Mapping[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": tuple(name for name in ESTIMATORS.names if name != "gdpo"),
    "actor.loss.loss_mode": tuple(name for name in POLICY_LOSSES.names if name != "dro"),
}
"""Values of the settings that have names of functions, without those that need an option."""
TABLES: Mapping[str, dict[str, Any]] = {
    "critic.optim": {"eps": 0.5},
    "trainer.megatron": {"overlap_grad_reduce": True},
    "reward_model.judge.engine_options": {"kv_cache_bytes": 1},
}
"""Values of settings that are tables."""
REFUSED_ANYWAY = {
    "algorithm.rollout_correction.rollout_rs",
    "algorithm.rollout_correction.rollout_is_threshold_lower",
    "algorithm.rollout_correction.rollout_is_batch_normalize",
    "algorithm.rollout_correction.rollout_rs_threshold",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "reward_model.judge.engine",
    "reward_model.judge.tensor_parallel_size",
    "reward_model.judge.urls",
    "reward_model.judge.unparsable_score",
}
"""Settings that another setting of their own section must go with, which is checked first."""


def values_of(kind: type, name: str) -> list[Any]:
    """Some values of a setting, its default first."""
    default = default_settings(kind)[name]
    if name in CHOICES and kind is TrainConfig:
        return [default, *CHOICES[name]]
    hint = setting_types(kind)[name]
    options = [hint, *get_args(hint)]
    literals = [
        value for option in options if get_origin(option) is Literal for value in get_args(option)
    ]
    if isinstance(default, bool):
        return [default, not default]
    if literals:
        return [default, *literals, *[value for value in (True, False) if bool in options]]
    if isinstance(default, dict):
        return [default, TABLES[name]]
    if isinstance(default, tuple):
        return [default, ("x",), (1, 2), (0.5, 0.5)]
    if isinstance(default, str):
        return [default, "", "x"]
    return [default, 0, 1, 2, 0.5, 0.25, 3.0, "x"]


def refusal(kind: type, values: Mapping[str, Any]) -> str | None:
    try:
        merge(kind(), values)
    except UserError as error:
        return str(error)
    return None


def unread_choices(kind: type, entry: ReadWith) -> Iterator[dict[str, Any]]:
    """The values of other settings with which an entry's are not read."""
    names = list(entry.chosen_by)
    for values in product(*(values_of(kind, name) for name in names)):
        chosen = dict(zip(names, values, strict=True))
        try:
            is_read = entry.is_read(chosen)
        except TypeError:
            continue
        if chosen.get("reward_model.kind", "none") != "none":
            chosen["reward_model.path"] = "x"
        if not is_read:
            yield chosen


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_setting_is_refused_where_nothing_reads_it(kind: type) -> None:
    """Each setting with each algorithm that does not read it: the error names the field, its value and the readers."""
    entries = conditional_settings(kind)
    assert entries
    defaults = default_settings(kind)
    for name, entry in entries:
        others = [value for value in values_of(kind, name) if value != defaults[name]]
        assert list(unread_choices(kind, entry))
        for chosen in unread_choices(kind, entry):
            errors = [refusal(kind, {**chosen, name: value}) for value in others]
            assert all(errors), (name, chosen, errors)
            named = [error for error in errors if error and "it is read with" in error]
            if not named:
                assert name in REFUSED_ANYWAY, (name, chosen, errors)
                continue
            # The other setting may itself be one that is not read.
            at_fault = next(own for own in (name, *chosen) if named[0].startswith(f"{own} is "))
            readers = [other.readers for own, other in entries if own == at_fault]
            assert any(f"it is read with {words}" in named[0] for words in readers)


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_entry_is_of_settings_that_there_are(kind: type) -> None:
    names = default_settings(kind)
    entries: tuple[ReadWith, ...] = kind.read_with
    for entry in entries:
        assert set(entry.chosen_by) <= set(names)
        for setting in entry.settings:
            assert any(f"{name}.".startswith(f"{setting}.") for name in names), setting


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            [
                "--algorithm.name",
                "nft",
                "--rollout.kernel",
                "ode",
                "--actor.loss.kl-loss-coef",
                "0.1",
            ],
            "actor.loss.kl_loss_coef is 0.1; expected 0.0 with algorithm.name 'nft': it is read with algorithm.name "
            "flow_grpo, ddpo, grpo_guard, flow_dppo",
        ),
        (
            ["--rollout.window-size", "0", "--rollout.window-range", "0", "3"],
            "rollout.window_range is (0, 3); expected (0, 0) with rollout.window_size 0: it is read with "
            "rollout.window_size above 0",
        ),
    ],
)
def test_the_error_of_an_option(args: list[str], expected: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_diffusion(args)
    assert str(refused.value) == expected


def test_a_recipe_gives_way_and_a_file_does_not(tmp_path: Path) -> None:
    """The embedded recipe has a window and a KL term, which DiffusionNFT does not read."""
    nft = ["--algorithm.name", "nft", "--rollout.kernel", "ode"]
    config = parse_diffusion(nft)
    assert (config.rollout.window_size, config.actor.loss.kl_loss_coef) == (0, 0.0)
    assert RECIPES["embedded"]().rollout.window_size == 2
    file = tmp_path / "own.toml"
    file.write_text("[rollout]\nwindow_size = 2\n")
    with pytest.raises(
        UserError, match=r"^rollout.window_size is 2; expected 0 with algorithm.name 'nft'"
    ):
        parse_diffusion(["--config", str(file), *nft])
    # It is as good as not set; and what only an option makes readable is read.
    file.write_text(
        "[rollout]\nwindow_size = 0\n[actor.loss]\nclip_ratio = 1e-4\n[algorithm]\nreward_gradient_steps = 2\n"
    )
    gradient = ["--algorithm.name", "reward_gradient", "--rollout.kernel", "ode"]
    config = parse_diffusion(["--config", str(file), *gradient])
    assert config.algorithm.reward_gradient_steps == 2


def test_the_file_of_a_run_is_its_settings(tmp_path: Path) -> None:
    config = parse_train(["--algorithm.adv-estimator", "gae", "--critic.warmup-steps", "3"])
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    assert parse_train(["--config", str(file)]) == config


class Recorded:
    """Settings that note which of them are read."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self.settings, name)


def names_read_with(setting: str, value: str, section: str) -> set[str]:
    """The settings of a section that are read with a value of another one, by the table."""
    found: set[str] = set()
    for name, entry in conditional_settings(TrainConfig):
        if (
            name.startswith(f"{section}.")
            and setting in entry.chosen_by
            and entry.is_read({setting: value})
        ):
            found.add(name.removeprefix(f"{section}."))
    return found


@pytest.mark.parametrize("name", POLICY_LOSSES.names)
def test_a_policy_loss_reads_what_the_table_says(name: str) -> None:
    config: Any = Recorded(PolicyLossConfig(loss_mode=name))
    tokens = torch.full((2,), -1.0)
    mask = torch.ones(2, dtype=torch.bool)
    policy_loss(config, tokens, tokens, tokens, mask=mask, lengths=[2])
    assert config.names - {"loss_mode"} == names_read_with(
        "actor.loss.loss_mode", name, "actor.loss"
    )


def test_muon_is_no_choice_for_images() -> None:
    """It would need to know which matrices of a denoiser are those of hidden layers."""
    with pytest.raises(
        UserError, match=r"actor\.optim\.name is 'muon'; expected 'adamw' or 'adamw_8bit'"
    ):
        parse_diffusion(["--actor.optim.name", "muon"])
    assert parse_train(["--actor.optim.name", "muon"]).actor.optim.name == "muon"
