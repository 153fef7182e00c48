"""The rounds of a step: each wave of sampling that another one follows, and the rest, with the work of all devices."""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from gcore_controller.context import Context, DeviceTimers, Span, merge_spans


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """The work of devices in a period."""

    spans: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    """Where the time of each device went, by name."""
    generated: Counter[str] = field(default_factory=Counter[str])
    """Number of tokens, or images, that were generated in each stage."""
    num_lent: int = 0
    """Engines that changed their role within the step."""

    @classmethod
    def drained(cls, devices: DeviceTimers) -> Self:
        """Return what the timers have recorded since they were drained last.

        Controllers of one process share the timers: the first to drain them has everything.
        """
        # Draining resets the counts.
        generated = Counter(devices.generated)
        num_lent = devices.num_lent
        return cls(spans=devices.drain(), generated=generated, num_lent=num_lent)

    @classmethod
    def merged(cls, parts: Iterable[Self]) -> Self:
        """Join the work that several processes recorded, or that was done in several periods."""
        parts = list(parts)
        return cls(
            spans=merge_spans(part.spans for part in parts),
            generated=sum((part.generated for part in parts), Counter[str]()),
            num_lent=sum(part.num_lent for part in parts),
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """A wave of sampling, or what is left of a step after the waves that were reported."""

    number: int
    """In its step, from 1."""
    num_prompts: int
    """Prompts that were sampled in it, over all controllers."""
    work: DeviceWork = field(default_factory=DeviceWork)


class StepRounds:
    """Cuts steps into rounds, on all controllers together.

    Args:
        report: called by the first controller with each wave that another one follows in its step, which starts on
            all controllers when this has returned; None: each step is one round.
    """

    def __init__(
        self, ctx: Context[Any], report: Callable[[Round], Awaitable[None]] | None
    ) -> None:
        self._ctx = ctx
        self._report = report
        self._reported: list[Round] = []
        self._num_prompts = 0

    async def next_wave(self, num_prompts: int) -> None:
        """Start a wave of this many prompts over all controllers, after reporting the previous wave of the step."""
        if self._report is not None and self._num_prompts:
            group = self._ctx.group
            parts = await group.all_gather(DeviceWork.drained(self._ctx.roles.devices))
            self._reported.append(self._round(DeviceWork.merged(parts)))
            self._num_prompts = 0
            if group.rank == 0:
                await self._report(self._reported[-1])
            await group.barrier()
        self._num_prompts += num_prompts

    def end_step(self) -> list[Round]:
        """Return the rounds of the step, without the work of devices in the last one, which is not drained yet."""
        rounds = [*self._reported, self._round(DeviceWork())]
        self._reported = []
        self._num_prompts = 0
        return rounds

    def _round(self, work: DeviceWork) -> Round:
        return Round(number=1 + len(self._reported), num_prompts=self._num_prompts, work=work)
