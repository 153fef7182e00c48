"""A worker of the bench of controllers in this process."""

from types import SimpleNamespace
from typing import Any

from gcore_bench.controller import BenchWorker


class Handle:
    """Stands for the handle of an actor."""

    def __init__(self, worker: BenchWorker) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._worker, name))
