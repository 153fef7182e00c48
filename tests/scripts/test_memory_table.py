"""The table of docs/on-one-gpu.md is what gcore-placement's memory law gives, and its settings exist."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from acceptance.memory_table import MODELS, shape_of, table

from gcore_llm.config import TrainArgs

PAGE = Path(__file__).parents[2] / "docs/on-one-gpu.md"


def test_settings_exist() -> None:
    text = PAGE.read_text().partition("## What to set")[2]
    names = re.findall(r"`((?:actor|rollout|data)\.[\w.]+)", text)
    options = re.findall(r"`--([a-z-]+)", text)
    assert len(names) > 6
    for name in [*names, *(option.replace("-", "_") for option in options)]:
        value: Any = TrainArgs()
        for part in name.split("."):
            assert part in {field.name for field in dataclasses.fields(value)}, name
            value = getattr(value, part)


def test_the_table_is_that_of_the_law() -> None:
    assert table() in PAGE.read_text(), f"python -m acceptance.memory_table prints it:\n{table()}"


def test_shapes_have_the_parameters_of_their_names() -> None:
    billions = {size: shape_of(size).num_parameters / 1e9 for size in MODELS}
    expected = {"0.5B": 0.494, "1.5B": 1.544, "3B": 3.086, "7B": 7.616, "14B": 14.77, "32B": 32.76}
    assert billions == pytest.approx(expected, rel=1e-3)
