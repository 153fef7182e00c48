"""The events of a run, which the first controller reports to the process that records them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gcore_controller.context import Span
from gcore_controller.rlhf.rounds import Round
from gcore_controller.trainer_group import State

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The policy was evaluated on held-out prompts after ``step``."""

    step: int
    evaluation: Any


@dataclass(frozen=True)
class Updating:
    """The models are between two steps from here to `Reached`."""


@dataclass(frozen=True)
class WaveSampled:
    """A wave was sampled, and the next one of its step starts once this is received; see `RLHFConfig.reports_waves`."""

    round: Round


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step was made."""

    step: int
    metrics: dict[str, float]
    spans: list[list[Span]]
    """Where the time of each controller went, by rank."""
    devices: dict[str, list[Span]]
    """Where the time of each device went, by name."""
    last: Round
    """The part of the step that was not reported as `WaveSampled`."""
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """A few of the step's samples; see `Modality.samples`."""


@dataclass(frozen=True, kw_only=True)
class RewardsFailed:
    """Rewards failed and were dropped."""

    step: int
    failures: list[Any]
    """Kind, message and count of those since the last such event."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """All controllers are at the end of ``step``, with these states: a checkpoint can be taken."""

    step: int
    controllers: list[State]
    is_last: bool


@dataclass(frozen=True)
class Announced:
    """A line for the screen, such as what an engine died of; it is not recorded."""

    line: str


Event = Evaluated | Updating | WaveSampled | Stepped | RewardsFailed | Reached | Announced
Recorder = Callable[[Event], Awaitable[None]]


class Announcer:
    """Puts lines on the screen of the run, from the process of a controller; a call does not wait for that."""

    def __init__(self, send: Recorder) -> None:
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
