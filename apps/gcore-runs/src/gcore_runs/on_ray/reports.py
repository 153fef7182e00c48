"""A controller's reports to the process of the run."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from gcore_controller import Span
from gcore_rollout.rewards import Failure

EvaluationT = TypeVar("EvaluationT")


@dataclass(frozen=True)
class Report:
    """A call of `Recorder`, made in the process of the run."""

    method: str
    arguments: tuple[Any, ...]


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
