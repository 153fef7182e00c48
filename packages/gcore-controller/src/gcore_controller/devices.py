"""Timers of the devices, engines and training ranks, that a process sends calls to."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gcore_controller.stages import Span, on_wall_clock


def rank_name(rank: int) -> str:
    """Return the name of a training rank in the timeline."""
    return f"trainer {rank}"


class DeviceTimers:
    """Record the stages of the devices that this process sends calls to.

    A device is in a stage while a call of that stage is unanswered; with several calls, in the stage of the latest.

    Attributes:
        generated: Number of tokens, or images, generated in each stage since the last `drain`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.generated: Counter[str] = Counter()
        self._clock = clock
        self._devices: dict[str, _Device] = {}

    @contextmanager
    def stage(self, stage: str, *names: str) -> Generator[None]:
        """Attribute the time inside the block to ``stage`` on the devices of these names."""
        call = object()
        devices = [self._devices.setdefault(name, _Device()) for name in names]
        now_s = self._clock()
        for device in devices:
            device.calls[call] = stage
            device.switch(now_s)
        try:
            yield
        finally:
            now_s = self._clock()
            for device in devices:
                del device.calls[call]
                device.switch(now_s)

    def drain(self) -> dict[str, list[Span]]:
        """Return the spans since the last call, by device, in seconds of UTC; a running stage is cut and continues."""
        self.generated.clear()
        now_s = self._clock()
        return {name: on_wall_clock(device.drain(now_s), now_s) for name, device in self._devices.items()}


@dataclass(eq=False)
class _Device:
    calls: dict[object, str] = field(default_factory=dict[object, str])
    """Stages of the unanswered calls, in the order of their start."""
    _stage: str | None = None
    _since_s: float = 0.0
    _spans: list[Span] = field(default_factory=list[Span])

    def switch(self, now_s: float) -> None:
        """Switch to the stage of the latest call."""
        stage = next(reversed(self.calls.values()), None)
        if stage != self._stage:
            self._cut(now_s)
            self._stage = stage

    def drain(self, now_s: float) -> list[Span]:
        self._cut(now_s)
        spans, self._spans = self._spans, []
        return spans

    def _cut(self, now_s: float) -> None:
        if self._stage is not None and now_s > self._since_s:
            self._spans.append(Span(stage=self._stage, start_s=self._since_s, end_s=now_s))
        self._since_s = now_s


def generation_metrics(parts: Iterable[Counter[str]]) -> dict[str, float]:
    """Return what all processes generated together, by stage, from the `DeviceTimers.generated` of each."""
    return {f"perf/generated/{stage}": float(number) for stage, number in sum(parts, Counter[str]()).items()}


def merge_spans(parts: Iterable[Mapping[str, Sequence[Span]]]) -> dict[str, list[Span]]:
    """Join the spans that several processes, or several calls of `DeviceTimers.drain`, recorded of the same devices."""
    spans: dict[str, list[Span]] = {}
    for part in parts:
        for name, own in part.items():
            spans.setdefault(name, []).extend(own)
    return spans
