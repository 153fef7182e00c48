"""Every setting of every command with wrong values, and names that other libraries have for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import Cli
from hypothesis import given, settings, strategies as st

from gcore_diffusion.cli import parse_train as parse_diffusion
from gcore_diffusion.config import DiffusionConfig
from gcore_llm.cli import parse_train
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.finetune.command import parse_fine_tuning
from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from gcore_llm.simulate import parse_simulate
from gcore_runs import NonNegative, UserError
from gcore_runs.migration.keys import hint, other_names, read_keys
from gcore_runs.migration.removed import translate_removed
from gcore_runs.settings.checks import setting_types
from gcore_runs.settings.parsing import as_option, merge, parse
from gcore_runs.settings.sections import PlacementConfig
from gcore_runs.simulation.config import SimulateConfig

COMMANDS: dict[str, tuple[Callable[[list[str]], Any], type]] = {
    "train": (parse_train, TrainConfig),
    "sft": (partial(parse_fine_tuning, "sft"), SFTRunConfig),
    "dpo": (partial(parse_fine_tuning, "dpo"), DPORunConfig),
    "reward-model": (partial(parse_fine_tuning, "reward-model"), RewardModelRunConfig),
    "simulate": (parse_simulate, SimulateConfig),
    "diffusion": (parse_diffusion, DiffusionConfig),
}
TEXTS = (str, tuple[str, ...])
TABLES = ("task.params", "data.chat_template_kwargs", "reward_kwargs")
"""Settings of any names and values."""
ANY_SIGN = (
    "good_enough",
    "unparsable_score",
    "reward_model.weight",
    "right_from",
    "top_k",
)
"""Settings that may be below 0."""


def outcome(parse: Callable[[list[str]], Any], args: list[str]) -> str | None:
    """The error; None: the settings are accepted. Anything but a `UserError` is raised."""
    try:
        parse(args)
    except UserError as refused:
        error = str(refused)
    else:
        return None
    assert "\n" not in error
    return error


@pytest.mark.parametrize("command", COMMANDS)
def test_no_setting_takes_what_is_no_number(command: str) -> None:
    parse, kind = COMMANDS[command]
    for name, type_ in setting_types(kind).items():
        if type_ in TEXTS or name in TABLES:
            continue
        for value in ("", "x", "nan", "inf", "-inf", "1e400", "9" * 30):
            if (value == "9" * 30 and "float" in str(type_)) or value in get_args(type_):
                continue
            error = outcome(parse, [f"{as_option(name)}={value}"])
            assert error is not None, (name, value)
            assert value.startswith("9") or name.rpartition(".")[2] in error, (name, value, error)
        if name.endswith(ANY_SIGN):
            continue
        assert outcome(parse, [as_option(name), "-1"]) is not None, name


@pytest.mark.parametrize("command", COMMANDS)
def test_no_setting_of_a_file_takes_another_type(command: str) -> None:
    _, kind = COMMANDS[command]
    for name, type_ in setting_types(kind).items():
        wrong: list[Any] = (
            [math.nan, {"a": 1}, [[1]]] if type_ not in TEXTS else [{"a": 1}, [[1]], True, 3]
        )
        if type_ in (int, float):
            wrong.append(True)
        if name in TABLES:
            wrong = ["x", 3, [1]]
        for value in wrong:
            table: Any = value
            for section in reversed(name.split(".")):
                table = {section: table}
            with pytest.raises(UserError, match=r"^s\.toml: ") as error:
                merge(kind(), table, source="s.toml")
            assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(
    command=st.sampled_from(sorted(COMMANDS)),
    args=st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "--rollout.n",
                    "--",
                    "-",
                    "=",
                    "--=",
                    "--data",
                    "--config",
                    "--recipe",
                    "a=b",
                    "+a.b=c",
                    "4",
                ]
            ),
            st.text(max_size=8),
        ),
        max_size=4,
    ),
)
def test_any_arguments_are_read_or_refused(command: str, args: list[str]) -> None:
    if not {"-h", "--help"} & set(args):
        outcome(COMMANDS[command][0], args)


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        (
            "train",
            ["--rollout.min-p", "0.1"],
            "unknown option --rollout.min-p; there is no such setting: responses are",
        ),
        (
            "train",
            ["--rollout.min-p", "0.1"],
            "known here: --rollout.agent.*, --rollout.colocated, ",
        ),
        (
            "train",
            ["--vllm_gpu_memory_utilization", "0.3"],
            "did you mean --rollout.engine-options?",
        ),
        (
            "train",
            ["rollout.n=4"],
            "unexpected argument 'rollout.n=4'; did you mean --rollout.n 4?",
        ),
        ("train", ["+rollout.n=4"], "did you mean --rollout.n 4?"),
        ("train", ["actor_rollout_ref.rollout.n=4"], "did you mean --rollout.n 4?"),
        ("train", ["actor_rollout_ref.actor.optim.lr=1e-6"], "did you mean --actor.optim.lr 1e-6?"),
        (
            "train",
            ["--actor_rollout_ref.actor.kl_loss_coef", "0.1"],
            "did you mean --actor.loss.kl-loss-coef?",
        ),
        ("train", ["--actor-rollout-ref.model.path", "x"], "did you mean --model?"),
        ("train", ["--rolout.n", "4"], "did you mean --rollout.n?"),
        ("train", ["--num-generations", "4"], "did you mean --rollout.n?"),
        ("train", ["--num_generations=4"], "did you mean --rollout.n?"),
        ("train", ["--beta", "0.1"], "did you mean --actor.loss.kl-loss-coef?"),
        ("dpo", ["--beta", "0.1"], "did you mean --loss.beta?"),
        ("train", ["--per_device_train_batch_size", "4"], "did you mean --data.train-batch-size?"),
        ("train", ["--learning_rate", "1"], "did you mean --actor.optim.lr?"),
        ("sft", ["--learning_rate", "1"], "did you mean --optim.lr?"),
        ("diffusion", ["--learning_rate", "1"], "did you mean --actor.optim.lr?"),
        ("train", ["--max_completion_length", "1"], "did you mean --data.max-response-length?"),
        ("train", ["--max_steps", "1"], "did you mean --trainer.total-training-steps?"),
        ("sft", ["--num_train_epochs", "1"], "did you mean --trainer.total-epochs?"),
        ("train", ["--quux", "3"], "unknown option --quux; known here: --actor.*, --algorithm.*"),
        ("train", ["--rollout.n"], "--rollout.n has no value"),
        ("train", ["--rollout.n", "4", "5"], "unexpected argument '5'"),
        (
            "train",
            ["--task.params", "min_terms", "3"],
            "task.params is a table; expected --task.params.NAME VALUE, --task.params NAME=VALUE",
        ),
        ("train", ["--recipe", "x"], "recipe is 'x'; expected one of agent, embedded, own_data"),
    ],
)
def test_unknown_names(command: str, args: list[str], expected: str) -> None:
    error = outcome(COMMANDS[command][0], args)
    assert error is not None
    assert expected in error


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_generations": 4}, "s.toml: unknown field num_generations; did you mean rollout.n?"),
        (
            {"data": {"max_completion_length": 4}},
            "unknown field data.max_completion_length; did you mean data.max_res",
        ),
        (
            {"actor_rollout_ref": {"rollout": {"n": 4}}},
            "actor_rollout_ref.rollout.n; did you mean rollout.n?",
        ),
        ({"rollout": {"min_p": 0.1}}, "unknown field rollout.min_p; there is no such setting: "),
        ({"rollout": 4}, "s.toml: rollout is 4; expected a table"),
    ],
)
def test_unknown_fields_of_files(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        merge(TrainConfig(), values, source="s.toml")
    assert expected in str(error.value)


def test_every_other_name_leads_to_a_setting() -> None:
    """Each of a command's settings that the table names is one, and no name of ours is taken for another's."""
    known = {command: set(setting_types(kind)) for command, (_, kind) in COMMANDS.items()}
    everything = set[str]().union(*known.values())
    for name, key in other_names().items():
        # An entry of a table is none of the settings, but the table is.
        ours = {own if own in everything else own.rpartition(".")[0] for own in key.ours}
        assert ours <= everything, name
        commands = [command for command in COMMANDS if not ours or ours & known[command]]
        assert commands
        said = hint(f"section_of_theirs.{name}", known[commands[0]])
        assert ("did you mean" if key.ours else f"there is no such setting: {key.why}") in said, (
            name
        )
    assert {
        "actor_rollout_ref.actor.use_kl_loss",
        "use_kl_loss",
        "num_generations",
    } <= other_names().keys()
    assert {"path", "enable"}.isdisjoint(other_names()), "they end names of several settings"
    assert {*read_keys("trl"), *read_keys("verl")} <= other_names().keys()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--seed", "-1"], "seed is -1; expected 0 or more"),
        (["--seed", "9" * 30], "seed is " + "9" * 30 + "; expected at most 9223372036854775807"),
        (["--threads", "100000"], "threads is 100000; expected at most 4096"),
        (
            ["--trainer.prometheus", "h:70000"],
            "trainer.prometheus is 'h:70000'; expected HOST:PORT or PORT, from 1 to",
        ),
        (["--actor.lora-rank", "2", "--actor.target-modules", "x"], "x"),
        (["--device", ""], "device is ''"),
        (["--name", "a" * 300], "run folder runs/aaa"),
        (["--data.prompt-key", ""], "has no column ''"),
        (["--data.val-files", ""], "data.val_files holds an empty name"),
        (
            ["--critic.model", "nowhere", "--algorithm.adv-estimator", "gae"],
            "critic.model is 'nowhere'",
        ),
        (["--reward-model.kind", "classifier", "--reward-model.path", "nowhere"], "nowhere"),
        (
            ["--rollout.n", "1", "--algorithm.adv-estimator", "gae"],
            "rollout.n is 1; expected at least 2 with algo",
        ),
        (["--rollout.n", "0"], "rollout.n is 0; expected 1 or more"),
    ],
)
def test_values_found_later(cli: Cli, own_args: list[str], args: list[str], expected: str) -> None:
    assert expected in cli.refused(*own_args, *args)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "remax"])
def test_one_response_where_no_group_is_compared(
    cli: Cli, own_args: list[str], estimator: str
) -> None:
    options = [
        "--rollout.n",
        "1",
        "--algorithm.adv-estimator",
        estimator,
        "--algorithm.filter-groups",
        "False",
    ]
    assert "step 1: reward" in cli.ok(*own_args, *options, "--trainer.total-training-steps", "1")


@dataclass(frozen=True, kw_only=True)
class OwnRollout(RolloutConfig):
    top_k: NonNegative = 0
    """Most probable tokens to draw from; 0: all."""


@dataclass(frozen=True, kw_only=True)
class OwnConfig(TrainConfig):
    """Settings with one more."""

    rollout: OwnRollout = field(default_factory=OwnRollout)


def test_a_setting_is_one_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is an option, a key of TOML files, a line of the help, and refused by its own check."""
    recipes = {"embedded": OwnConfig, "own_data": OwnConfig}
    own = partial(parse, prog="own", recipes=recipes, description="Own.")
    file = tmp_path / "own.toml"
    file.write_text("rollout.top_k = 5\n")
    assert own([]).rollout.top_k == 0
    assert own(["--config", str(file)]).rollout.top_k == 5
    assert own(["--config", str(file), "--rollout.top-k", "7"]).rollout.top_k == 7
    assert outcome(own, ["--rollout.top-k", "-1"]) == "rollout.top_k is -1; expected 0 or more"
    assert "rollout.top_k is 'x'; expected" in str(outcome(own, ["--rollout.top-k", "x"]))
    assert "--rollout.top-k" in str(outcome(own, ["--rollout.topk", "1"]))
    with pytest.raises(SystemExit):
        own(["--help"])
    assert "Most probable tokens to draw from" in capsys.readouterr().out


@pytest.mark.parametrize("strategy", ["dynamic", "colocated", "auto"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"runtime": "inline"}, "'split' with runtime 'inline'; others need runtime 'ray'"),
        (
            {"runtime": "ray"},
            "'split' with no judge of the run's own in {section}; others divide devices",
        ),
    ],
)
def test_a_strategy_that_needs_roles_to_share_devices(
    options: dict[str, Any], expected: str, strategy: Any
) -> None:
    for kind, section in ((TrainConfig, "reward_model.judge"), (DiffusionConfig, "reward.judge")):
        with pytest.raises(UserError) as refused:
            kind(placement=PlacementConfig(strategy=strategy), **options)
        assert str(refused.value).startswith(f"placement.strategy is {strategy!r}; expected ")
        assert expected.format(section=section) in str(refused.value)


def test_settings_of_earlier_versions_have_their_present_names() -> None:
    earlier: dict[str, Any] = {
        "sim": {"devices": 512},
        "warmup": {"max_steps": 500},
        "algorithm": {"norm_adv_by_std_in_grpo": True, "gamma": 1.0, "lam": 0.95},
        "actor": {
            "loss": {"tau_pos": 1.0, "tau_neg": 1.05},
            "optim": {"lr": 1e-6, "eps": 1e-8, "max_nonfinite_steps": 10, "muon_momentum": 0.95},
        },
        "critic": {"optim": {"lr": 1e-5, "eps": 1e-6}, "loss": {"cliprange_value": 0.2}},
        "rollout": {
            "async_scheduling": True,
            "max_num_batched_tokens": 512,
            "speculative": {"num_speculative_tokens": 0},
            "engine_options": {},
        },
        "trainer": {"best_mode": "max", "prometheus_port": 9464},
    }
    assert translate_removed(earlier) == {
        "algorithm": {"options": {"lam": 0.95}},
        "actor": {"optim": {"lr": 1e-6, "eps": 1e-8}},
        "critic": {"optim": {"eps": 1e-6}, "cliprange_value": 0.2},
        "rollout": {"engine_options": {"async_scheduling": True, "max_num_batched_tokens": 512}},
    }
    with pytest.raises(
        UserError, match=r"trainer.best_mode is 'min'; expected 'max': trainer.best_metric has a -"
    ):
        translate_removed({"trainer": {"best_mode": "min"}})


def test_choices_that_several_settings_made_are_one() -> None:
    judge = {"low": 1.0, "high": 5.0, "server_python": "py", "pairwise": False}
    earlier: dict[str, Any] = {
        "reward_calls": {
            "in_threads": False,
            "in_process": True,
            "on_error": "raise",
            "max_failed_share": 0.5,
        },
        "reward_model": {
            "judge": {"low": 0.0, "high": 9.0, "server_python": "", "pairwise": True},
            "judges": {"style": judge},
        },
        "actor": {
            "enable_gradient_checkpointing": True,
            "checkpointed_layers": 0.5,
            "optim": {"total_training_steps": 0},
        },
        "rollout": {
            "gpu_memory_utilization": 0.5,
            "server_python": "",
            "weights_dir": "w",
            "engine_options": {},
        },
    }
    assert translate_removed(earlier) == {
        "reward_calls": {"run_in": "process", "max_failed_share": 0.0},
        "reward_model": {
            "judge": {"score_range": [0.0, 9.0], "method": "all_pairs"},
            "judges": {
                "style": {"score_range": [1.0, 5.0], "engine_options": {"server_python": "py"}}
            },
        },
        "actor": {"enable_gradient_checkpointing": 0.5},
        "rollout": {"engine_options": {"gpu_memory_utilization": 0.5, "weights_dir": "w"}},
    }
    images: dict[str, Any] = {
        "algorithm": {"name": "nft"},
        "actor": {
            "loss": {"loss_mode": "vanilla"},
            "nft": {"adv_clip_max": 5.0, "beta": 0.2, "num_timesteps": 4},
            "dpo": {"beta": 2000.0, "num_timesteps": 1},
        },
        "rollout": {"window_schedule": "random", "window_steps": 25},
    }
    assert translate_removed(images) == {
        "algorithm": {"name": "nft", "options": {"beta": 0.2}},
        "rollout": {"window_steps": 0},
    }
    images["rollout"]["window_schedule"] = "sliding"
    assert translate_removed(images)["rollout"] == {"window_steps": 25}
    with pytest.raises(
        UserError, match=r"actor.optim.total_training_steps is 12; expected 0: it follows from"
    ):
        translate_removed({"actor": {"optim": {"total_training_steps": 12}}})
