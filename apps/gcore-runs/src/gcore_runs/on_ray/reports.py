"""A controller's reports to the process of the run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gcore_controller import Span
from gcore_rollout import Failure

EvaluationT = TypeVar("EvaluationT")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """A call of `Recorder`, made in the process of the run; or ``announced``, a line for the screen."""

    method: str
    arguments: tuple[Any, ...]


class Announcements:
    """Puts lines on the screen of the run, from a controller's process; a call does not wait for that."""

    def __init__(self, report: Callable[[Report], Awaitable[None]]) -> None:
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, line: str) -> None:
        _logger.warning("%s", line)
        task = asyncio.create_task(self._send(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, line: str) -> None:
        try:
            await self._report(Report("announced", (line,)))
        except Exception as error:
            # The run has ended, or is about to; the line is in this process's log.
            _logger.warning("not announced: %r", error)


class Reports(Generic[EvaluationT]):
    """A `Recorder` in another process than the run's."""

    def __init__(self, report: Callable[[Report], Awaitable[None]]) -> None:
        self._report = report

    async def evaluated(self, step: int, evaluation: EvaluationT) -> None:
        """See `Recorder`."""
        await self._report(Report("evaluated", (step, evaluation)))

    async def updating(self) -> None:
        """See `Recorder`."""
        await self._report(Report("updating", ()))

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """See `Recorder`."""
        await self._report(Report("stepped", (step, metrics, spans, devices)))

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """See `Recorder`."""
        await self._report(Report("rewards_failed", (step, failures)))

    async def reached(self, step: int, controllers: list[dict[str, Any]]) -> None:
        """See `Recorder`."""
        await self._report(Report("reached", (step, controllers)))
