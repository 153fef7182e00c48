"""Run one part in this process: ``python -m acceptance.trial MODULE:FUNCTION RESULT DEVICE SHAPES WORK``."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from acceptance.report import Figure


class Trial:
    """Settings of a part, and what writes its figures; each is in the file as soon as it is known.

    Args:
        result: file of lines for `Result.of_lines`.
        device: cpu or cuda.
        is_small: tiny shapes, which prove that the part runs and measure nothing.
        work: folder for models and checkpoints, which the parts share.
    """

    def __init__(self, result: Path, *, device: str, is_small: bool, work: Path) -> None:
        self._result = result
        self.device = device
        self.is_small = is_small
        self.work = work

    @property
    def is_judged(self) -> bool:
        """Whether figures are compared with aims, which are those of one GPU and full shapes."""
        return self.device.startswith("cuda") and not self.is_small

    def figure(
        self,
        name: str,
        value: float,
        unit: str = "",
        *,
        at_least: float | None = None,
        at_most: float | None = None,
    ) -> None:
        """Add a measured number."""
        figure = Figure(
            name=name,
            value=float(value),
            unit=unit,
            at_least=at_least,
            at_most=at_most,
            is_judged=self.is_judged,
        )
        self._add("figure", **asdict(figure))

    def count(self, name: str, value: float, unit: str = "", **aims: Any) -> None:
        """Add a number that does not depend on the device's speed; it is compared with its aim everywhere."""
        self._add("figure", **asdict(Figure(name=name, value=value, unit=unit, **aims)))

    def note(self, text: str) -> None:
        """Add a sentence."""
        self._add("note", text=text)

    def error(self, text: str) -> None:
        """Add an error; the part has then failed, and what it has measured is kept."""
        self._add("error", text=text)

    @contextmanager
    def attempt(self, what: str) -> Generator[None]:
        """Record an error inside the block instead of raising it, so that the part continues."""
        try:
            yield
        except Exception:
            self.error(f"{traceback.format_exc()}(in {what})")

    def measure_seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that a call takes, until the device has finished it."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()

    def _add(self, kind: str, **entry: object) -> None:
        line = json.dumps({"kind": kind, **entry})
        with self._result.open("a") as file:
            file.write(f"{line}\n")
        print(line, flush=True)


def run_part(function: str, result: str, device: str, shapes: str, work: str) -> None:
    """Run the part that the arguments of a command line name."""
    trial = Trial(Path(result), device=device, is_small=shapes == "small", work=Path(work))
    module, _, name = function.partition(":")
    getattr(import_module(f"acceptance.{module}"), name)(trial)


if __name__ == "__main__":
    run_part(*sys.argv[1:])
