"""The context that a controller's program runs in, with the timers and references that it is given."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, Self, TypeVar, cast

from gcore_controller.collectives.base import Collectives
from gcore_controller.errors import ControllerError

T = TypeVar("T")
RolesT = TypeVar("RolesT")
OtherRolesT = TypeVar("OtherRolesT")
ResultT = TypeVar("ResultT")

Clock = Callable[[], float]
"""Returns seconds."""

Reported = Callable[[int, Any], Awaitable[None]]
"""Receives the rank and the value of a controller's report."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A period of one stage, in seconds of the timer's clock.

    Example:
        >>> spans = [Span(stage="gen", start_s=0.0, end_s=2.5), Span(stage="train", start_s=2.5, end_s=4.0)]
        >>> seconds_by_stage(spans)
        {'gen': 2.5, 'train': 1.5}
    """

    stage: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class DeviceWork:
    """The work of devices in a period.

    Example:
        >>> generation = DeviceWork(spans={"engine 0": [Span(stage="gen", start_s=0.0, end_s=2.0)]}, num_lent=1)
        >>> training = DeviceWork(spans={"engine 0": [Span(stage="gen", start_s=5.0, end_s=8.0)]})
        >>> work = DeviceWork.merge([generation, training])
        >>> seconds_by_stage(work.spans["engine 0"]), work.num_lent
        ({'gen': 5.0}, 1)
    """

    spans: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    """Where the time of each device went, by name."""
    generated: Counter[str] = field(default_factory=Counter[str])
    """Number of tokens, or images, that were generated in each stage."""
    num_lent: int = 0
    """Engines that changed their role within a step, or sampled on the devices of ranks."""

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """Join the work that several processes recorded, or that was done in several periods."""
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        generated: Counter[str] = Counter()
        num_lent = 0
        for part in parts:
            for name, device_spans in part.spans.items():
                spans[name] += device_spans
            generated += part.generated
            num_lent += part.num_lent
        return cls(spans=dict(spans), generated=generated, num_lent=num_lent)


class StageTimer:
    """Record the periods of stages; of several that run, the latest counts, so that no second counts twice.

    Example:
        >>> clock = iter([0.0, 1.0, 4.0, 6.0, 6.0]).__next__  # instead of the time
        >>> timer = StageTimer(clock)
        >>> with timer.stage("train"):
        ...     with timer.stage("data"):
        ...         pass
        >>> seconds_by_stage(timer.drain())
        {'train': 3.0, 'data': 3.0}
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self._entered: dict[object, str] = {}
        self.current: str | None = None
        """Name of the running stage."""
        self._since_s = 0.0
        self._spans: list[Span] = []

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Attribute the time inside the block to ``name``."""
        entry = object()
        self._entered[entry] = name
        self._switch()
        try:
            yield
        finally:
            del self._entered[entry]
            self._switch()

    def seconds(self, stage: str) -> float:
        """Return the seconds of a stage since the last `drain`."""
        self._cut()
        return sum(span.end_s - span.start_s for span in self._spans if span.stage == stage)

    def drain(self) -> list[Span]:
        """Return the spans since the last call, in order; a running stage is cut here and continues."""
        self._cut()
        spans = self._spans
        self._spans = []
        return spans

    def _switch(self) -> None:
        stage = next(reversed(self._entered.values()), None)
        if stage != self.current:
            self._cut()
            self.current = stage

    def _cut(self) -> None:
        now_s = self.clock()
        if self.current is not None and now_s > self._since_s:
            self._spans.append(Span(stage=self.current, start_s=self._since_s, end_s=now_s))
        self._since_s = now_s


class DeviceTimers:
    """Record the stages of the devices, engines and training ranks, that this process sends calls to.

    A device is in a stage while a call of that stage is unanswered; with several calls, in the stage of the latest.

    Args:
        shared: the device of each engine and rank that shares one, by name. The others have devices of their own, and
            of their names.

    Example:
        >>> async def program(ctx: Context) -> list[Span]:
        ...     timers = DeviceTimers(ctx.clock, wall_clock=ctx.clock)
        ...     with timers.stage("gen", "engine 0", "engine 1"):
        ...         await asyncio.sleep(3.0)
        ...     return timers.drain().spans["engine 1"]
        >>> run_simulated(program, roles=None)
        [[Span(stage='gen', start_s=0.0, end_s=3.0)]]
    """

    def __init__(
        self,
        clock: Clock = time.monotonic,
        *,
        wall_clock: Clock = time.time,
        shared: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.generated: Counter[str] = Counter()
        """Number of tokens, or images, generated in each stage since the last `drain`."""
        self.num_lent = 0
        """Engines that changed their role within a step, or sampled on the devices of ranks, since the last `drain`."""
        self._clock = clock
        self._wall_clock = wall_clock
        self._shared = shared
        self._timers: dict[str, StageTimer] = {}

    @contextmanager
    def stage(self, stage: str, *names: str) -> Generator[None]:
        """Attribute the time inside the block to ``stage`` on the devices of these engines and ranks."""
        with ExitStack() as stages:
            for name in {self._shared.get(name, name): None for name in names}:
                timer = self._timers.setdefault(name, StageTimer(self._clock))
                stages.enter_context(timer.stage(stage))
            yield

    def drain(self) -> DeviceWork:
        """Return the work since the last call, with spans in seconds of UTC; a running stage is cut and continues.

        Controllers of one process share the timers: the first to drain them gets everything.
        """
        now_s = self._clock()
        spans: dict[str, list[Span]] = {}
        for name, timer in self._timers.items():
            spans[name] = on_wall_clock(timer.drain(), now_s, self._wall_clock)
        work = DeviceWork(spans=spans, generated=self.generated, num_lent=self.num_lent)
        self.generated = Counter()
        self.num_lent = 0
        return work


def rank_name(rank: int) -> str:
    """Return the name of a training rank in the timeline."""
    return f"trainer {rank}"


def seconds_by_stage(spans: Iterable[Span]) -> dict[str, float]:
    """Return the total seconds of each stage."""
    totals: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        totals[span.stage] = totals[span.stage] + span.end_s - span.start_s
    return dict(totals)


def on_wall_clock(spans: Iterable[Span], now_s: float, wall_clock: Clock = time.time) -> list[Span]:
    """Return spans in seconds of UTC, to be compared between machines; their own clock shows ``now_s`` now."""
    shift_s = wall_clock() - now_s
    return [
        Span(stage=s.stage, start_s=s.start_s + shift_s, end_s=s.end_s + shift_s) for s in spans
    ]


@dataclass(frozen=True)
class Reference(Generic[T]):
    """A handle of a read-only value; where controllers and services share a process, it holds the value itself.

    On Ray it is small and can be pickled: the value is in an object store.

    Example:
        >>> async def program(ctx: Context) -> int:
        ...     images = ctx.put(np.zeros((4, 8, 8), np.float32))
        ...     received = await ctx.group.all_gather(images)  # small, also where images are not
        ...     return (await received[0].get()).nbytes
        >>> asyncio.run(run_inline(program, roles=None, world_size=2))
        [1024, 1024]
    """

    value: Any

    @property
    def nbytes(self) -> int:
        """Size of the value, as `nbytes_of` counts it."""
        return nbytes_of(self.value)

    async def get(self) -> T:
        """Return the value.

        Raises:
            ControllerError: the process that put the value, or its node, was lost.
        """
        return self.value


def nbytes_of(value: object) -> int:
    """Count the bytes of arrays, tensors and byte strings in a value, also in mappings, sequences and dataclasses."""
    if isinstance(value, bytes | bytearray):
        return len(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return sum(map(nbytes_of, value))
    return int(getattr(value, "nbytes", 0))


async def refuse_report(rank: int, value: Any) -> None:
    """Raise an error, because the runtime was given no ``reported``."""
    raise RuntimeError(
        f"controller {rank} reports {value!r:.100}; expected a runtime with `reported`"
    )


@dataclass(frozen=True, kw_only=True)
class Context(Generic[RolesT]):
    """One controller's place in the run: its rank, its collectives with the others, and its role services.

    Example:
        >>> async def program(ctx: Context[str]) -> str:
        ...     with ctx.timer.stage("gen"):
        ...         await ctx.group.barrier()
        ...     return f"controller {ctx.rank} of {ctx.world_size} uses the {ctx.roles}"
        >>> asyncio.run(run_inline(program, roles="engine", world_size=2))
        ['controller 0 of 2 uses the engine', 'controller 1 of 2 uses the engine']
    """

    group: Collectives
    roles: RolesT
    """Handles of the role services (policy engine, reward, trainer, ...), as the app declares them."""
    timer: StageTimer = field(default_factory=StageTimer)
    clock: Clock = time.monotonic
    """Seconds of the runtime's clock, real or simulated."""
    wall_clock: Clock = time.time
    """Seconds of the clock that spans are recorded by: UTC, or simulated."""
    put: Callable[[Any], Reference[Any]] = Reference
    """``ctx.put(value)``: return a reference, to be sent in collectives and to services instead of the value."""
    reported: Reported = refuse_report
    notices: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue[Any])
    """Small values from the process that started the run, on Ray; see `RayControllers.notify`."""

    async def report(self, value: Any) -> None:
        """Send a small value to the process that started the run, and wait until it has it."""
        await self.reported(self.rank, value)

    def with_roles(self, roles: OtherRolesT) -> "Context[OtherRolesT]":
        """Return the same context with other services."""
        return cast("Context[OtherRolesT]", replace(cast("Context[Any]", self), roles=roles))

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size


Program = Callable[[Context[RolesT]], Awaitable[ResultT]]
"""``async def program(ctx)``: the same function under every runtime, called once for each controller."""


async def run_until_done(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, Any]) -> T:
    """Return the result of some work, or raise what a watcher raises before that; then cancel the others.

    Watchers run until they are cancelled, or raise.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in (work, *watchers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_program(program: Program[RolesT, ResultT], context: Context[RolesT]) -> ResultT:
    """Run one controller's program, under any runtime.

    Raises:
        ControllerError: It called `sys.exit`, which would stop the event loop, or awaited something that it had
            cancelled, which would pass for the end of the run.
    """
    try:
        return await program(context)
    except (SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, SystemExit):
            what = f"called sys.exit({error.code!r})"
        elif task is not None and not task.cancelling():
            what = "was cancelled from within: it awaited a task or future that had been cancelled"
        else:
            raise
        raise ControllerError(
            f"the program of controller {context.rank} {what}; a program ends by returning or by raising an error"
        ) from error
