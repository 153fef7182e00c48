"""When a run's devices, its engines and training ranks, work, and at what."""

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gcore_controller import Span
from gcore_runs.spans import on_wall_clock


def rank_name(rank: int) -> str:
    """What the row of a training rank is called."""
    return f"trainer {rank}"


class DeviceTimers:
    """Notes in which stages the devices are that this process has calls to.

    A device is in a stage while a call of that stage is unanswered; with several at a time, in that of the call which
    began last.

    Attributes:
        generated: Tokens, or images, of each stage since the last `drain`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.generated: Counter[str] = Counter()
        self._clock = clock
        self._devices: dict[str, _Device] = {}

    @contextmanager
    def stage(self, stage: str, *names: str) -> Generator[None]:
        """Have devices in a stage inside the block.

        Args:
            names: of the devices' rows.
        """
        call = object()
        devices = [self._devices.setdefault(name, _Device()) for name in names]
        now_s = self._clock()
        for device in devices:
            device.calls[call] = stage
            device.turn(now_s)
        try:
            yield
        finally:
            now_s = self._clock()
            for device in devices:
                del device.calls[call]
                device.turn(now_s)

    def drain(self) -> dict[str, list[Span]]:
        """The spans since the last call, by device, in seconds of UTC; a stage that still runs is cut and goes on."""
        self.generated.clear()
        now_s = self._clock()
        return {name: on_wall_clock(device.drain(now_s), now_s) for name, device in self._devices.items()}


@dataclass(eq=False)
class _Device:
    calls: dict[object, str] = field(default_factory=dict[object, str])
    """Stages of the unanswered calls, in the order in which they began."""
    _stage: str | None = None
    _since_s: float = 0.0
    _spans: list[Span] = field(default_factory=list[Span])

    def turn(self, now_s: float) -> None:
        """The calls have changed."""
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


def generation_metrics(parts: "Iterable[Counter[str]]") -> dict[str, float]:
    """What all processes together generated, by stage: `DeviceTimers.generated` of each."""
    return {f"perf/generated/{stage}": float(number) for stage, number in sum(parts, Counter[str]()).items()}


def merged(parts: Iterable[Mapping[str, Sequence[Span]]]) -> dict[str, list[Span]]:
    """What several processes, or several calls of `DeviceTimers.drain`, tell of the same devices."""
    spans: dict[str, list[Span]] = {}
    for part in parts:
        for name, own in part.items():
            spans.setdefault(name, []).extend(own)
    return spans
