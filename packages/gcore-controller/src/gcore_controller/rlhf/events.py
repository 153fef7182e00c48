"""The events of a run, which the first controller reports to the process that records them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gcore_controller.context import DeviceWork, Span
from gcore_controller.trainer_group import State

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The policy was evaluated on held-out prompts after ``step``.

    Example:
        >>> async def record(event: Event) -> None:
        ...     match event:
        ...         case Evaluated():
        ...             print(f"step {event.step}: {event.evaluation['accuracy']:.0%}")
        >>> asyncio.run(record(Evaluated(step=20, evaluation={"accuracy": 0.5})))
        step 20: 50%
    """

    step: int
    evaluation: Any
    failures: list[Any] = field(default_factory=list[Any])
    """Kind, message and count of the rewards that failed in it."""


@dataclass(frozen=True)
class Updating:
    """The models are between two steps from here to `Stepped`.

    Example:
        >>> between_steps = False
        >>> async def record(event: Event) -> None:
        ...     global between_steps  # then the models must not be saved
        ...     between_steps = isinstance(event, Updating)
        >>> asyncio.run(record(Updating()))
        >>> between_steps
        True
    """


@dataclass(frozen=True, kw_only=True)
class Round:
    """A wave of sampling, or what is left of a step after the waves that were reported.

    As an event it is a wave, and the next one of its step starts once it is received; see `RLHFConfig.reports_waves`.

    Example:
        >>> spans = {"engine 0": [Span(stage="gen", start_s=0.0, end_s=4.0)]}
        >>> wave = Round(number=1, num_prompts=8, work=DeviceWork(spans=spans))
        >>> busy_s = seconds_by_stage(wave.work.spans["engine 0"])["gen"]
        >>> wave.num_prompts / busy_s  # prompts per second of the engine
        2.0
    """

    number: int
    """In its step, from 1."""
    num_prompts: int
    """Prompts that were sampled in it, over all controllers."""
    work: DeviceWork = field(default_factory=DeviceWork)


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """A step was made, and all controllers are at its end: a checkpoint can be taken.

    Example:
        >>> async def record(event: Event) -> None:
        ...     if isinstance(event, Stepped):
        ...         print(event.step, event.metrics["reward/mean"], seconds_by_stage(event.spans[0]))
        >>> times = {"spans": [[Span(stage="train", start_s=1.0, end_s=3.0)]], "devices": {}}
        >>> end = {"last": Round(number=1, num_prompts=8), "controllers": [{}], "is_last": False}
        >>> asyncio.run(record(Stepped(step=3, metrics={"reward/mean": 0.25}, **times, **end)))
        3 0.25 {'train': 2.0}
    """

    step: int
    metrics: dict[str, float]
    controllers: list[State]
    """The states of the controllers, by rank, which belong in a checkpoint."""
    is_last: bool
    """Whether the run ends with this step."""
    spans: list[list[Span]]
    """Where the time of each controller went, by rank."""
    devices: dict[str, list[Span]]
    """Where the time of each device went, by name."""
    last: Round
    """The part of the step that was not reported as a wave."""
    samples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """A few of the step's samples; see `Modality.samples`."""
    failures: list[Any] = field(default_factory=list[Any])
    """Kind, message and count of the rewards that failed in the step, whose groups were dropped."""


Event = Evaluated | Updating | Round | Stepped | str
"""A text is a line for the screen, such as what an engine died of; it is not recorded."""
Recorder = Callable[[Event], Awaitable[None]]


def make_announcer(send: Recorder) -> Callable[[str], None]:
    """Return a function that puts a line on the screen of the run, from the process of a controller.

    It does not wait until the line is sent.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def deliver(line: str) -> None:
        try:
            await send(line)
        except Exception as error:
            # The run has ended, or is about to; the line is in the log of this process.
            _logger.warning("not announced: %r", error)

    def announce(line: str) -> None:
        _logger.warning("%s", line)
        task = asyncio.create_task(deliver(line))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return announce
