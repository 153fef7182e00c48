"""Functions from a user's file: ``PATH.py:function``."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gcore_rollout.errors import RewardError
from gcore_rollout.rewards.reward import RewardFunction


def load_reward(spec: str) -> RewardFunction:
    """`load_function` of a reward."""
    return load_function(spec, setting="reward")


def load_function(spec: str, *, setting: str) -> Callable[..., Any]:
    """Import the function that ``PATH.py:function`` names.

    Args:
        spec: path and name.
        setting: what errors call it.

    Raises:
        RewardError: bad form, missing file, a file that does not import, no such function.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise RewardError(f"{setting} is {spec!r}; expected PATH.py:function")
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"{setting} is {spec!r}: no such file {path}")
    module_name = f"gcore_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{setting} file {path} does not import: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise RewardError(f"{setting} is {spec!r}: {path} has no function {name!r}, it has {public}")
    return function
