"""The `inline` runtime: controllers are tasks of one event loop, and share services and a trainer group."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

from gcore_controller.collectives.base import (
    CallLog,
    CollectiveCall,
    Collectives,
    Whereabouts,
    copy_error,
    describe,
    mismatch,
    take_tickets,
)
from gcore_controller.context import (
    Context,
    DeviceTimers,
    Program,
    Reported,
    ResultT,
    RolesT,
    StageTimer,
    rank_name,
    refuse_report,
    run_program,
    run_until_done,
)
from gcore_controller.errors import ControllerError
from gcore_controller.rlhf.events import Recorder
from gcore_controller.runtimes.backend import Recovery
from gcore_controller.trainer_client import (
    DeviceTurns,
    PolicyEngine,
    TrainerClient,
    check_weights,
    digests_of,
)
from gcore_controller.trainer_group import (
    BatchT,
    Message,
    SharedTrainerGroup,
    TrainerGroup,
    TrainerWorker,
    Weights,
)

T = TypeVar("T")
JobT = TypeVar("JobT")
ConfigT = TypeVar("ConfigT")
OwnRolesT = TypeVar("OwnRolesT")


@dataclass
class _Round:
    """One collective in flight: the values that have arrived, and the ranks that wait for the result."""

    first_rank: int
    call: CollectiveCall
    values: list[Any]
    waiting: "dict[int, asyncio.Future[Any]]" = field(
        default_factory=dict[int, "asyncio.Future[Any]"]
    )


class InlineGroup:
    """The state that ``world_size`` controllers of one event loop share."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; expected at least 1")
        self.world_size = world_size
        self.tickets = [Counter[str]() for _ in range(world_size)]
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._returned: dict[int, dict[str, int]] = {}
        self.logs = [CallLog(rank, self._returned) for rank in range(world_size)]
        self.timers: Sequence[StageTimer] = ()
        """The timers of the controllers, once they run."""

    def describe_whereabouts(self) -> str:
        """Describe where each controller is now."""
        whereabouts: dict[int, Whereabouts | None] = {}
        for rank, log in enumerate(self.logs):
            whereabouts[rank] = log.whereabouts(self.timers[rank].current)
        return describe(whereabouts)

    async def meet(
        self, rank: int, call: CollectiveCall, value: Any, combine: Callable[[list[Any]], T]
    ) -> T:
        """Contribute ``value``, and return what ``combine`` makes of all values, by rank.

        It is called once, by the last rank to arrive: among thousands of controllers, one sum for each would take long.
        """
        key = (call.channel, call.sequence)
        current = self._rounds.get(key)
        if current is None:
            current = self._rounds[key] = _Round(rank, call, [None] * self.world_size)
        if current.call.op != call.op:
            raise mismatch({current.first_rank: current.call, rank: call})
        current.values[rank] = value
        if len(current.waiting) + 1 < self.world_size:
            current.waiting[rank] = asyncio.get_running_loop().create_future()
            return await current.waiting[rank]
        del self._rounds[key]
        result = combine(current.values)
        for future in current.waiting.values():
            if not future.done():
                future.set_result(result)
        return result

    def fail(self, channel: str, error: ControllerError) -> None:
        """Make the calls of all ranks on a channel raise an error, those in flight and later ones."""
        for log in self.logs:
            log.fail(channel, error)
        for key in list(self._rounds):
            if key[0] == channel:
                for future in self._rounds.pop(key).waiting.values():
                    _raise_in(future, copy_error(error))

    def record_return(self, rank: int) -> None:
        """Record that a rank's program has returned; calls that would wait for it raise `CollectiveError`."""
        self._returned[rank] = self.logs[rank].num_calls
        self.logs[rank].close()
        for key, current in list(self._rounds.items()):
            if rank in current.waiting:
                continue
            del self._rounds[key]
            for waiting_rank, future in current.waiting.items():
                error = self.logs[waiting_rank].missing(current.call)
                if error is not None:
                    self.logs[waiting_rank].fail(current.call.channel, error)
                    _raise_in(future, error)


def _raise_in(future: "asyncio.Future[Any]", error: Exception) -> None:
    """Make a waiting call raise an error, unless it has been cancelled meanwhile."""
    if not future.done():
        future.set_exception(error)
        future.exception()


class InlineCollectives(Collectives):
    """One controller's view of an `InlineGroup`, by default alone; objects pass by reference.

    Example:
        >>> group = InlineCollectives()  # one controller, such as in a test
        >>> async def main() -> list[str]:
        ...     tickets = await group.take_tickets(2, counter="prompts")
        ...     return await group.channel("sampling").all_gather(f"prompts {tickets[0]} and {tickets[1]}")
        >>> asyncio.run(main())
        ['prompts 0 and 1']
    """

    def __init__(self, group: InlineGroup | None = None, rank: int = 0) -> None:
        group = group or InlineGroup(1)
        super().__init__(rank, group.world_size, group.logs[rank])
        self._group = group

    async def _gather(
        self,
        call: CollectiveCall,
        value: Any,
        combine: Callable[[list[Any]], T],
        *,
        dst: int | None = None,
    ) -> T:
        del dst
        return await self._group.meet(self.rank, call, value, combine)

    async def _exchange(self, call: CollectiveCall, parts: Sequence[T]) -> list[T]:
        sent: list[Sequence[T]] = await self._group.meet(self.rank, call, parts, list)
        return [of_rank[self.rank] for of_rank in sent]

    async def _take_tickets(self, count: int, counter: str, at: int, limit: int | None) -> range:
        return take_tickets(self._group.tickets[at], count, counter, limit)

    def _fail_everywhere(self, channel: str, error: ControllerError) -> None:
        self._group.fail(channel, error)


async def run_inline(
    program: Program[RolesT, ResultT],
    *,
    roles: RolesT,
    world_size: int = 1,
    timeout_s: float | None = None,
    reported: Reported = refuse_report,
    group: InlineGroup | None = None,
) -> list[ResultT]:
    """Run ``program`` on ``world_size`` controllers that share ``roles``; return each one's result, by rank.

    Args:
        timeout_s: how long the whole run may take; None: as long as it takes.
        reported: called with the rank and the value of every `Context.report`.
        group: the state that the controllers share, to be looked at while they run; None: a new one.

    Raises:
        CollectiveError: controllers made different calls, or one returned while others wait for it.
        ControllerError: the run took longer; it says where each controller was, and for whom collectives waited.
        ControllerError: a program called `sys.exit` or cancelled itself.
        Exception: the first controller's error; the other controllers are cancelled.
    """
    controllers = group or InlineGroup(world_size)
    clock = asyncio.get_running_loop().time
    controllers.timers = [StageTimer(clock) for _ in range(world_size)]

    async def run_one(rank: int) -> ResultT:
        context = Context(
            group=InlineCollectives(controllers, rank),
            roles=roles,
            timer=controllers.timers[rank],
            clock=clock,
            reported=reported,
        )
        result = await run_program(program, context)
        controllers.record_return(rank)
        return result

    async def watch_deadline(seconds: float) -> None:
        await asyncio.sleep(seconds)
        raise ControllerError(
            f"the run is not done after {seconds} s: {controllers.describe_whereabouts()}"
        )

    watchers: list[Coroutine[Any, Any, Any]] = []
    if timeout_s is not None:
        watchers.append(watch_deadline(timeout_s))
    # Cancelled, it raises that, whatever the controllers raise as they end.
    return await run_until_done(_run_all(run_one, world_size), *watchers)


async def _run_all(
    run_one: Callable[[int], Coroutine[Any, Any, ResultT]], world_size: int
) -> list[ResultT]:
    """Return the results of all controllers, or raise the error of the first that fails, with its rank."""
    running: list[asyncio.Task[ResultT]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for rank in range(world_size):
                task = tasks.create_task(run_one(rank), name=f"controller-{rank}")
                running.append(task)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        for rank, task in enumerate(running):
            if (
                len(running) > 1
                and task.done()
                and not task.cancelled()
                and task.exception() is first
            ):
                first.add_note(f"raised by controller {rank}")
        raise first from None
    return [task.result() for task in running]


class InProcessTrainerGroup(SharedTrainerGroup[BatchT]):
    """A trainer group of one rank, in this process; ``in_thread`` computes while the event loop runs.

    Example:
        >>> class Worker:
        ...     num_updates = 0
        ...     def train_step(self, role, micro_batches):
        ...         self.num_updates += 1
        ...         return {"loss": sum(micro_batches[0])}
        >>> group = InProcessTrainerGroup(Worker())
        >>> asyncio.run(group.train_step("actor", [[0.25, 0.5]])), group.num_updates
        ({'loss': 0.75}, 1)
    """

    def __init__(self, worker: TrainerWorker[BatchT], *, in_thread: bool = False) -> None:
        self._worker = worker
        self._in_thread = in_thread
        self._computing = asyncio.Lock()
        """Held in a thread: batches are scored ahead while the models are trained."""

    @property
    def num_replicas(self) -> int:
        return self._worker.replica("actor")[1]

    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        return await self._compute(
            partial(self._worker.score, role, micro_batches, with_routing=with_routing)
        )

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        return await self._compute(partial(self._worker.train_step, role, micro_batches))

    async def _compute(self, call: Callable[[], ResultT]) -> ResultT:
        if not self._in_thread:
            return call()
        async with self._computing:
            return await asyncio.to_thread(call)

    def export_weights(self, *, averaged: bool = False) -> Weights:
        return self._worker.export_weights(averaged=averaged)

    def close(self) -> None:
        self._worker.close()

    def _ask_all(self, stage: str, message: Message) -> Any:
        del stage
        return message(self._worker)


class SharedTrainerClient(TrainerClient[BatchT]):
    """A controller's access to a trainer group, and to an engine, that all controllers of this process share.

    Args:
        num_ranks: number of ranks whose work is recorded: all of them work in every call.
    """

    def __init__(
        self,
        trainer: SharedTrainerGroup[BatchT],
        group: Collectives,
        devices: DeviceTimers,
        *,
        num_ranks: int = 0,
        turns: DeviceTurns | None = None,
    ) -> None:
        super().__init__(group, devices, turns=turns)
        self._trainer = trainer
        self._ranks = [rank_name(rank) for rank in range(num_ranks)]

    @property
    def num_replicas(self) -> int:
        return self._trainer.num_replicas

    @property
    def can_score_alone(self) -> bool:
        return self._trainer.num_replicas == 1 and self.turns is None

    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        with self.devices.stage("prepare", *self._ranks):
            return await self._trainer.score(role, micro_batches, with_routing=with_routing)

    async def score_alone(self, role: str, micro_batch: BatchT) -> list[Any]:
        [outputs] = await self.score(role, [micro_batch])
        return outputs

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        everyones = list(chain.from_iterable(await self.group.all_gather(micro_batches)))
        metrics: dict[str, float] = {}
        if self.group.rank == 0 and everyones:
            with self.devices.stage("train", *self._ranks):
                metrics = await self._trainer.train_step(role, everyones)
        return await self.group.broadcast(metrics)

    async def update_weights(
        self, policy: PolicyEngine, *, version: int, averaged: bool = False
    ) -> None:
        if self.group.rank == 0:
            # Engines may have started from other weights than the models did, both of version 0.
            version = max(version, policy.weight_version + 1)
            with self.devices.stage("sync", *self._ranks):
                weights = self._trainer.export_weights(averaged=averaged)
                await policy.update_weights(weights, version=version)
        await self.group.barrier()

    async def check_policy(self, policy: PolicyEngine) -> None:
        if self.group.rank == 0:
            await check_weights(policy, digests_of(self._trainer.export_weights()))
        await self.group.barrier()


def share_trainer(
    trainer: SharedTrainerGroup[Any],
    program: Program[OwnRolesT, None],
    *,
    roles: Callable[..., OwnRolesT],
    num_ranks: int = 0,
    turns: DeviceTurns | None = None,
) -> Callable[[Context[Any]], Coroutine[Any, Any, None]]:
    """Return the program for controllers of this process that share a trainer group.

    ``program`` is for a controller that has a `TrainerClient`, in the class ``roles``, which has the fields of the
    shared roles and ``learner``, the client. ``num_ranks`` is the number of ranks whose work is recorded; ``turns`` are
    those of the ranks and the engines, where they share devices.
    """

    async def run(ctx: Context[Any]) -> None:
        client = SharedTrainerClient(
            trainer,
            ctx.group,
            ctx.roles.devices,
            num_ranks=num_ranks,
            turns=turns,
        )
        await program(ctx.with_roles(roles(**vars(ctx.roles), learner=client)))

    return run


@dataclass(eq=False)
class InlineBackend(Generic[JobT, ConfigT, RolesT]):
    """A `Backend` whose controllers, and what they share, belong to this process.

    Example:
        >>> from unittest.mock import AsyncMock
        >>> def make_program(job: str, recorder: Recorder) -> Program:
        ...     async def program(ctx: Context) -> None:
        ...         print(f"controller {ctx.rank} does {job} with the {ctx.roles}")
        ...     return program
        >>> parts = {"learner": InProcessTrainerGroup(None), "close_services": AsyncMock()}
        >>> backend = InlineBackend(None, roles="engine", world_size=2, program=make_program, **parts)
        >>> asyncio.run(backend.run("GRPO", AsyncMock()))
        controller 0 does GRPO with the engine
        controller 1 does GRPO with the engine
    """

    config: ConfigT
    _: KW_ONLY
    roles: RolesT
    """Services that the controllers share."""
    world_size: int
    learner: TrainerGroup
    program: Callable[[JobT, Recorder], Program[RolesT, None]]
    """The program of a job, whose events go to a recorder."""
    close_services: Callable[[], Awaitable[Any]]
    """Ends the services other than the trainer group."""
    turns: DeviceTurns | None = None
    """The turns of the trainer group and the engines; None: they have devices of their own."""
    _group: InlineGroup | None = field(default=None, init=False)

    async def run(self, job: JobT, recorder: Recorder) -> None:
        self._group = InlineGroup(self.world_size)
        try:
            await run_inline(
                self.program(job, recorder),
                roles=self.roles,
                world_size=self.world_size,
                group=self._group,
            )
        except BaseException as error:
            try:
                await self._end_sampling()
            except Exception as other:
                # The error that ended the run comes first; this one may be of an engine that died.
                error.add_note(f"afterwards, trainer and engines could not swap places: {other!r}")
            raise
        await self._end_sampling()

    async def _end_sampling(self) -> None:
        """Give the devices to the models, which may be saved now."""
        if self.turns is not None:
            await self.turns.take("training")

    def stages(self) -> Sequence[str | None]:
        if self._group is None:
            return []
        return [timer.current for timer in self._group.timers]

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """Raise the error; replicas of engines are replaced while the program runs, and nothing else is."""
        del keeps_models
        raise error

    async def close(self) -> None:
        try:
            self.learner.close()
        finally:
            await self.close_services()
