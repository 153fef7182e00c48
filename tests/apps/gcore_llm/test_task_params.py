"""Every setting of every reasoning-gym task, from TOML and from the command line."""

import dataclasses
import datetime
import enum
import tomllib
from typing import Any

import pytest
import tomli_w

from gcore_llm.cli import parse_train
from gcore_llm.config import TrainConfig
from gcore_llm.data.tasks import make_dataset, make_settings
from gcore_llm.sections import TaskConfig
from gcore_rollout import import_reasoning_gym
from gcore_runs.errors import UserError
from gcore_runs.settings.parsing import merge, to_toml

DATASETS: dict[str, Any] = import_reasoning_gym().factory.DATASETS
NEEDS_PARAMS = {
    "composite": {"datasets": [{"name": "chain_sum", "weight": 1.0, "config": {"min_terms": 2}}]}
}
"""Tasks without problems of their own, and settings that give them some. No task needs files or a network."""


def as_toml(value: Any) -> Any:
    """A value of a task's settings as a user writes it."""
    if value is None:
        return "None"
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: as_toml(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_toml(entry) for key, entry in value.items()}
    return [as_toml(v) for v in value] if isinstance(value, list | tuple) else value


def on_the_command_line(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, str) and not v.startswith("-") for v in value)
    ):
        return value
    return [_inline(value)]


def _inline(value: Any) -> str:
    """TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{k}" = {_inline(v)}' for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()


def settings_of(task: TaskConfig) -> dict[str, Any]:
    return dataclasses.asdict(make_settings(task, size=2, seed=3))


def alike(settings: dict[str, Any]) -> Any:
    """Settings without the difference of lists and tuples, which some tasks declare as each other."""
    return as_toml(settings)


# Some tasks leave it to the garbage collector to close the files that they read.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_all_settings_of_all_tasks(name: str) -> None:
    """The defaults, written out, are the defaults; from TOML, from options and after a round through a run's folder."""
    given = NEEDS_PARAMS.get(name, {})
    default = make_dataset(TaskConfig(name=name, params=given), size=2, seed=3)
    written = {
        f.name: as_toml(getattr(default.config, f.name))
        for f in dataclasses.fields(default.config)
        if f.name not in ("size", "seed")
    }
    toml = {"task": {"name": name, "params": written}}
    from_toml = merge(TrainConfig(), tomllib.loads(tomli_w.dumps(toml)), source="s.toml")
    expected = alike(dataclasses.asdict(default.config))
    assert alike(settings_of(from_toml.task)) == expected
    resumed = merge(TrainConfig(), tomllib.loads(to_toml(from_toml)), source="config.toml")
    assert resumed == from_toml
    options = [
        part
        for key, v in written.items()
        for part in (f"--task.params.{key}", *on_the_command_line(v))
    ]
    from_options = parse_train(["--recipe", "own_data", "--task.name", name, *options])
    assert alike(settings_of(from_options.task)) == expected
    assert default[0]["question"]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "game_of_life",
            ["--task.params.filled-cells-weights", "0.3"],
            {"filled_cells_weights": 0.3},
        ),
        ("caesar_cipher", ["--task.params.delimiter", ","], {"delimiter": ","}),
        ("caesar_cipher", ["--task.params.delimiter", "7"], {"delimiter": "7"}),
        (
            "basic_arithmetic",
            ["--task.params.allow-parentheses", "False"],
            {"allow_parentheses": False},
        ),
        ("basic_arithmetic", ["--task.params.operators", "+", "*"], {"operators": ["+", "*"]}),
        ("basic_arithmetic", ["--task.params.operators", "+"], {"operators": ["+"]}),
        ("complex_arithmetic", ["--task.params.operations", "+", "-"], {"operations": ("+", "-")}),
        (
            "polynomial_multiplication",
            ["--task.params.variables", '["x", "y", "z"]'],
            {"variables": ("x", "y", "z")},
        ),
        (
            "rearc",
            ["--task.params.board-format-opts", "{row_delimiter = ';'}"],
            "board_format_opts.row_delimiter",
        ),
        (
            "rearc",
            ["--task.params.board-format-opts.row-delimiter", ";"],
            "board_format_opts.row_delimiter",
        ),
        ("figlet_font", ["--task.params.static-font", "None"], {"static_font": None}),
        (
            "time_intervals",
            ["--task.params.min-date", "2020-02-03"],
            {"min_date": datetime.date(2020, 2, 3)},
        ),
        (
            "time_intervals",
            ["--task.params.min-time", "01:02:00"],
            {"min_time": datetime.time(1, 2)},
        ),
        ("word_sorting", ["--task.params.transformation", "lowercase"], "transformation"),
    ],
)
def test_types(name: str, options: list[str], expected: Any) -> None:
    found = settings_of(parse_train(["--recipe", "own_data", "--task.name", name, *options]).task)
    if expected == "transformation":
        assert found["transformation"].value == "lowercase"
    elif isinstance(expected, str):
        assert found["board_format_opts"]["row_delimiter"] == ";"
    else:
        assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        (
            "chain_sums",
            {},
            "task.name is 'chain_sums'; expected a task of reasoning-gym, such as chain_sum",
        ),
        (
            "chain_sum",
            {"min_term": 2},
            "task.params.min_term is not a setting of 'chain_sum'; expected such as min_terms",
        ),
        (
            "chain_sum",
            {"min_terms": "two"},
            "task.params.min_terms is 'two'; expected a valid integer",
        ),
        ("chain_sum", {"min_terms": True}, "task.params.min_terms is True; expected int"),
        (
            "chain_sum",
            {"min_terms": 9, "max_terms": 2},
            "task.name is 'chain_sum' with task.params {'min_terms': 9",
        ),
        ("chain_sum", {"seed": 3}, "task.params.seed is 3: seed set it"),
        (
            "basic_arithmetic",
            {"format_style": "odd"},
            "task.params.format_style is 'odd'; expected 'simple' or 'natural'",
        ),
        (
            "composite",
            {"datasets": [{"name": "chain_sun", "weight": 1, "config": {}}]},
            "such as chain_sum",
        ),
        (
            "composite",
            {"datasets": [{"name": "chain_sum", "weight": 1, "config": {"max_term": 2}}]},
            "task.params.datasets[0].config.max_term is not a setting of 'chain_sum'",
        ),
    ],
)
def test_wrong_settings(name: str, params: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        make_dataset(TaskConfig(name=name, params=params), size=2, seed=0)
    assert expected in str(error.value)
