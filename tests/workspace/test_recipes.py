"""Every shipped recipe builds, and survives being written down and read again."""

import tomllib

import pytest

from gcore_llm.cli import RECIPES
from gcore_llm.config import TrainConfig
from gcore_llm.finetune.command import FINE_TUNING_RECIPES
from gcore_runs.settings.parsing import merge, to_toml


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_round_trips_through_toml(name: str) -> None:
    config = RECIPES[name]()
    assert merge(TrainConfig(), tomllib.loads(to_toml(config)), source=name) == config


@pytest.mark.parametrize("command", FINE_TUNING_RECIPES)
def test_a_fine_tuning_recipe_round_trips_through_toml(command: str) -> None:
    for name, recipe in FINE_TUNING_RECIPES[command].items():
        config = recipe()
        assert merge(type(config)(), tomllib.loads(to_toml(config)), source=name) == config
        assert config.command == command
        assert recipe.__doc__


def test_a_recipe_is_named_after_its_function() -> None:
    assert {name: recipe.__name__ for name, recipe in RECIPES.items()} == {
        name: name for name in RECIPES
    }
    assert not [name for name, recipe in RECIPES.items() if not recipe.__doc__]
