"""The events of a run, which controllers report to the process that records them.

All but `Announced` are calls of a `Recorder`, whose methods have the same names and arguments.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from gcore_controller.context import Span
from gcore_controller.rlhf.modality import EvaluationT

if TYPE_CHECKING:
    from gcore_controller.rlhf.modality import Recorder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluated:
    step: int
    evaluation: Any


@dataclass(frozen=True)
class Updating:
    """The models are between two steps from here on."""


@dataclass(frozen=True)
class Stepped:
    step: int
    metrics: dict[str, float]
    spans: list[list[Span]]
    devices: dict[str, list[Span]]


@dataclass(frozen=True)
class RewardsFailed:
    step: int
    failures: list[Any]


@dataclass(frozen=True)
class Reached:
    step: int
    controllers: list[dict[str, Any]]


@dataclass(frozen=True)
class Announced:
    """A line for the screen, such as what an engine died of."""

    line: str


Event = Evaluated | Updating | Stepped | RewardsFailed | Reached | Announced
SendEvent = Callable[[Event], Awaitable[None]]


async def record(recorder: "Recorder[Any]", event: Event) -> None:
    """Call a recorder with an event; announcements are not recorded."""
    match event:
        case Evaluated(step, evaluation):
            await recorder.evaluated(step, evaluation)
        case Updating():
            await recorder.updating()
        case Stepped(step, metrics, spans, devices):
            await recorder.stepped(step, metrics, spans, devices)
        case RewardsFailed(step, failures):
            await recorder.rewards_failed(step, failures)
        case Reached(step, controllers):
            await recorder.reached(step, controllers)
        case Announced():
            pass


class RemoteRecorder(Generic[EvaluationT]):
    """A `Recorder` that sends events to another process."""

    def __init__(self, send: SendEvent) -> None:
        self._send = send

    async def evaluated(self, step: int, evaluation: EvaluationT) -> None:
        await self._send(Evaluated(step, evaluation))

    async def updating(self) -> None:
        await self._send(Updating())

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        await self._send(Stepped(step, metrics, spans, devices))

    async def rewards_failed(self, step: int, failures: list[Any]) -> None:
        await self._send(RewardsFailed(step, failures))

    async def reached(self, step: int, controllers: list[dict[str, Any]]) -> None:
        await self._send(Reached(step, controllers))


class Announcer:
    """Puts lines on the screen of the run, from the process of a controller; a call does not wait for that."""

    def __init__(self, send: SendEvent) -> None:
        self._send = send
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self, line: str) -> None:
        _logger.warning("%s", line)
        task = asyncio.create_task(self._announce(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _announce(self, line: str) -> None:
        try:
            await self._send(Announced(line))
        except Exception as error:
            # The run has ended, or is about to; the line is in the log of this process.
            _logger.warning("not announced: %r", error)
