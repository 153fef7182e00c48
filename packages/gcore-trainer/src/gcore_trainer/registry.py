"""Algorithms by name: a folder of this package holds one file for each, and a user's own is ``PATH.py:function``."""

import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from gcore_trainer.errors import ConfigError


class Registry:
    """The algorithms of one kind."""

    def __init__(self, package: str, setting: str) -> None:
        self._package = package
        self._setting = setting

    @property
    def names(self) -> list[str]:
        """Names of the built-in algorithms; none of their files is imported."""
        spec = importlib.util.find_spec(self._package)
        assert spec is not None
        return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))

    def load(self, name: str) -> Any:
        """Import a built-in algorithm by its name, or a user's own by ``PATH.py:function``.

        Raises:
            ConfigError: there is no such algorithm, no such file, or the file does not import.
        """
        if name in self.names:
            return getattr(importlib.import_module(f"{self._package}.{name}"), name)
        file, _, function = name.rpartition(":")
        if not file.endswith(".py") or not function.isidentifier():
            raise ConfigError(
                f"{self._setting} is {name!r}; expected one of {', '.join(self.names)}, or PATH.py:function"
            )
        return _load_function(Path(file).resolve(), function, f"{self._setting} is {name!r}")

    def check(self, name: str) -> None:
        """Raise `ConfigError` if there is no such algorithm; a built-in one is not imported."""
        if name not in self.names:
            self.load(name)


@cache
def _load_function(path: Path, name: str, setting: str) -> Callable[..., Any]:
    if not path.is_file():
        raise ConfigError(f"{setting}; expected a file that exists, and {path} does not")
    module_name = f"gcore_trainer_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting}: {path} does not import ({type(error).__name__}: {error})") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{setting}; expected one of {', '.join(public) or 'none'}, which {path} defines")
    return function
