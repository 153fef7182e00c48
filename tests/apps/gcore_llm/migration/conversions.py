"""Conversions of configs that tests write down."""

from pathlib import Path
from typing import Any

from gcore_llm.config import TrainConfig
from gcore_llm.migration.conversion import Conversion, Line
from gcore_llm.migration.inputs import read_config
from gcore_llm.migration.trl import convert_trl_config
from gcore_llm.migration.verl import convert_verl_config

HERE = Path(__file__).parent
N8 = "actor_rollout_ref.rollout.n=8"
"""Of verl's defaults, one response a prompt is refused."""


def from_verl(*overrides: str, config: str = "") -> Conversion:
    return convert_verl_config(read_config(config, overrides))


def from_trl(method: str, *overrides: str, config: str = "") -> Conversion:
    return convert_trl_config(read_config(config, overrides), method)


def train_config(conversion: Conversion) -> TrainConfig:
    found = conversion.result()
    assert isinstance(found, TrainConfig)
    return found


def verdicts(conversion: Conversion) -> dict[str, Line]:
    return {line.key: line for line in conversion.lines()}


def missing(conversion: Conversion, verdict: str = "missing") -> set[str]:
    return {line.key for line in conversion.lines() if line.verdict == verdict}


def settings(conversion: Conversion) -> dict[str, Any]:
    """The settings that a run would have, checked by the command itself."""
    conversion.result()
    return conversion.settings
