"""Stands in for SGLang's kernels, of which there is no build for CPU: every name can be imported, none be called."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "99.0.0"


class _Absent:
    """Any kernel, or anything that belongs to one."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"there is no {self.__name__} on CPU")

    def __getattr__(self, name: str) -> "_Absent":
        return _absent(self.__name__, name)


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> _Absent:
        return _absent(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module of every name below this package."""

    def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


def _absent(owner: str, name: str) -> _Absent:
    # Python itself asks modules and classes for such names, and means it if they are not there.
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"{owner}.{name}")


def __getattr__(name: str) -> _Absent:
    return _absent(__name__, name)


sys.meta_path.insert(0, _Finder())
