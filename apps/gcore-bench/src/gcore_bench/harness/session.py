"""One run of a bench: what it prints, its scratch folder, and the file with every figure."""

import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from rich.console import Console
from rich.table import Table

_LIBRARIES = ("gcore-bench", "torch", "transformers", "vllm", "ray", "trl", "verl", "diffusers", "orbax-checkpoint")


class Session:
    """Prints what a bench reports and, when it ends without an error, its notes; then writes the figures.

    Args:
        options: of the bench; a dataclass with ``json``.
        console: where tables and lines go.
        notes: printed at the end: what a reader must know to judge the figures.
        unit: what one table of figures is called in the file.
    """

    def __init__(self, options: Any, console: Console, *, notes: Iterable[str] = (), unit: str = "part") -> None:
        self._options = options
        self._console = console
        self._notes = notes
        self._unit = unit
        self._found: list[Mapping[str, Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if error is None:
                for note in self._notes:
                    self.say(note)
                write_figures(self._options.json, self._options, self._found, unit=self._unit)

    @cached_property
    def folder(self) -> Path:
        """A scratch folder that is removed at the end."""
        return Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gcore-bench-")))

    def say(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, markup=False, soft_wrap=True)

    def add(self, name: str, *, tables: Sequence[Table] = (), lines: Sequence[str] = (), **figures: Any) -> None:
        """Print the tables and lines of a part, and keep its figures (plain values and dataclasses) for the file."""
        for table in tables:
            self._console.print(table)
        for line in lines:
            self.say(line)
        self._found.append({self._unit: name, **{key: _jsonable(value) for key, value in figures.items()}})


def write_figures(
    path: Path | None, options: Any, parts: Sequence[Mapping[str, object]], *, unit: str = "part"
) -> None:
    """Write figures with the options and the machine that they were measured on; do nothing where ``path`` is None."""
    if path is not None:
        content = {"options": plain(options), "machine": machine_facts(), f"{unit}s": list(parts)}
        path.write_text(json.dumps(content, indent=1) + "\n")


def plain(options: Any) -> dict[str, Any]:
    """Return options as JSON has them; files and folders among them are left out."""
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(options).items()}
    return {name: value for name, value in values.items() if not isinstance(value, Path)}


def machine_facts() -> dict[str, Any]:
    """Return the machine's cores and memory, and the versions of the libraries that contenders use."""
    versions: dict[str, str] = {}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": versions,
    }


def _jsonable(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_jsonable(entry) for entry in value] if isinstance(value, list | tuple) else value
