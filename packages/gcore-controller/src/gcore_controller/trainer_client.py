"""A controller's access to the models in training, and the transfers of models and engines that share devices."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import DeviceTimers, StageTimer, rank_name
from gcore_controller.trainer_group import BatchT, Weights

Turn = Literal["sampling", "training", "sync"]
"""A stage that has the devices: sampling, with the engines awake; training, with the trainer; sync, with the trainer
and the weights of the policy's engine, but not its keys and values."""


class PolicyEngine(Protocol):
    """The engine that generates with the policy's weights, such as a `gcore_rollout.Engine`.

    Engines that share devices with the models leave these, their weights and their keys and values one by one.
    """

    @property
    def weight_version(self) -> int: ...
    async def update_weights(self, weights: Any, *, version: int) -> None:
        """Take over weights, which are iterated over once."""

    async def abort(self) -> None: ...
    async def sleep(self, *, keep_weights: bool = True) -> None: ...
    async def wake(self, *, weights: bool = True, cache: bool = True) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Lending:
    """The loan of the devices of training ranks to engines while the policy samples.

    Example:
        >>> def is_worth_it(*, generation_s: float, generated: int, swap_s: float) -> bool:
        ...     return generation_s > 10 * swap_s
        >>> lending = Lending(num_engines=4, choose=is_worth_it)
        >>> lending.choose(generation_s=60.0, generated=8192, swap_s=2.0)
        True
    """

    num_engines: int
    """Engines on the devices of all ranks."""
    choose: Callable[..., bool] | None = None
    """Says on the first controller, after the sampling of each step, whether they are lent in the next one, such as
    `gcore_placement.LendChoice.observe`: called with ``generation_s``, seconds of generation, ``generated``, tokens or
    images, and ``swap_s``, seconds of all swaps since the last call. They are not lent in the first step. None: they
    are lent in each step."""


class DeviceTurns:
    """Lets roles that share devices take turns: the one whose turn it is has the memory, and the others are asleep.

    New weights pass in the order that needs least memory: all of the trainer but the policy's weights goes to sleep,
    the engine's weights wake and are overwritten, the trainer's weights go to sleep, and only then keys and values
    wake. Weights that will be overwritten are dropped instead of moved.

    Args:
        policy: the engine that takes over the trainer's weights, asleep at first, with its weights kept.
        others: further engines that work in the turn of sampling, such as a judge; asleep at first.
        devices: records the swaps of the training ranks; engines record their own.
        ranks: numbers of the training ranks whose swaps are recorded.
        sleep_models: puts these ranks to sleep, with ``keep_weights`` all but the policy's weights; they are awake at
            first. Idempotent, as ``wake_models`` is.
        wake_models: wakes these ranks.
        current: the first turn; None: it is not known who is asleep, and the first call finds out.
        lending: the loan of the ranks' devices, if that is what the turns are for; None: turns are taken in each step.

    Example:
        >>> from unittest.mock import AsyncMock
        >>> async def sleep(*, keep_weights: bool) -> None:
        ...     print("the models sleep")
        >>> engine = AsyncMock()
        >>> turns = DeviceTurns(engine, sleep_models=sleep, wake_models=AsyncMock(), devices=DeviceTimers())
        >>> asyncio.run(turns.take("sampling"))
        the models sleep
        >>> engine.wake.await_count, turns.current
        (1, 'sampling')
    """

    def __init__(
        self,
        policy: PolicyEngine,
        others: Sequence[PolicyEngine] = (),
        *,
        sleep_models: Callable[..., Awaitable[None]],
        wake_models: Callable[[], Awaitable[None]],
        devices: DeviceTimers,
        ranks: Iterable[int] = (),
        current: Turn | None = "training",
        lending: Lending | None = None,
    ) -> None:
        self.lending = lending
        self.current = current
        """None: a swap has failed half-way, or none was made yet."""
        self._sleep_models = sleep_models
        self._wake_models = wake_models
        self._policy = policy
        self._others = list(others)
        self._devices = devices
        self._ranks = [rank_name(rank) for rank in ranks]
        self._swapping = asyncio.Lock()

    async def take(
        self, turn: Turn, *, all_asleep: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Put to sleep what ``turn`` does not need, then wake what it needs. Idempotent.

        Samples that still run at the end of the turn of sampling are aborted. After `training` comes `sync`, with an
        update of the policy's weights, before the next turn of sampling. After an error, the next call tries again.

        Args:
            all_asleep: awaited before anything wakes: a barrier, where several processes each take the turn with their
                own engines and ranks, which share devices with those of the others.
        """
        async with self._swapping:
            if turn == self.current:
                return
            before = self.current
            self.current = None
            if turn == "sampling":
                with self._devices.stage("swap", *self._ranks):
                    await self._sleep_models(keep_weights=False)
                if all_asleep is not None:
                    await all_asleep()
                await _all(engine.wake() for engine in (self._policy, *self._others))
            else:
                if before != "training":
                    await self._end_sampling(keep_weights=turn == "sync")
                    if all_asleep is not None:
                        await all_asleep()
                with self._devices.stage("swap", *self._ranks):
                    if turn == "training":
                        await self._wake_models()
                    else:
                        await self._sleep_models(keep_weights=True)
                if turn == "sync":
                    if all_asleep is not None:
                        await all_asleep()
                    await self._policy.wake(cache=False)
            self.current = turn

    async def _end_sampling(self, *, keep_weights: bool) -> None:
        async def end(engine: PolicyEngine) -> None:
            await engine.abort()
            await engine.sleep(keep_weights=keep_weights or engine is not self._policy)

        # Together: those of a policy and of a judge are on different devices, unless these take turns themselves.
        await _all(map(end, (self._policy, *self._others)))


class TrainerClient(ABC, Generic[BatchT]):
    """A controller's access to the models in training, wherever their ranks run.

    Every controller makes the same calls in the same order, each with micro-batches of its own, except `score_alone`.

    Args:
        devices: record when the ranks work that this controller calls.
        turns: those of ranks and engines on devices that they share; None: they have devices of their own.

    Example:
        >>> from types import SimpleNamespace
        >>> async def program(ctx: Context) -> None:
        ...     learner: TrainerClient = ctx.roles.learner
        ...     print(ctx.rank, await learner.train_step("actor", [["a sample"]]))
        >>> worker = SimpleNamespace(train_step=lambda role, micro_batches: {"micro_batches": len(micro_batches)})
        >>> shared = share_trainer(InProcessTrainerGroup(worker), program, roles=SimpleNamespace)
        >>> results = run_simulated(shared, roles=SimpleNamespace(devices=DeviceTimers()), world_size=2)
        0 {'micro_batches': 2}
        1 {'micro_batches': 2}
    """

    def __init__(
        self,
        group: Collectives,
        devices: DeviceTimers,
        *,
        turns: DeviceTurns | None = None,
    ) -> None:
        self.group = group
        self.devices = devices
        self.turns = turns
        self._lending: Lending | None = None
        if turns is not None:
            self._lending = turns.lending
        self._lends = self._lending is None or self._lending.choose is None
        """Whether engines get the devices in the present step, and from `onload` on in the next one."""
        self._swap_s = 0.0

    async def offload(self, timer: StageTimer) -> None:
        """Move the models out of devices that they share with engines, and the engines in, to sample.

        This, `onload` and `onload_weights` do nothing where nothing is shared; see `DeviceTurns`. Their time counts as
        stage ``swap`` of the timer.
        """
        await self._take_turn("sampling" if self._lends else "training", timer)

    async def onload(self, timer: StageTimer) -> None:
        """Move the engines out, whose running samples are aborted, and the models in, to train."""
        if self._lending is not None:
            await self._choose_lending(self._lending, timer)
        await self._take_turn("training", timer)

    async def onload_weights(self, timer: StageTimer) -> None:
        """Move out all but the policy's weights, and in those of the policy's engine, which can be updated then."""
        await self._take_turn("sync" if self._lends else "training", timer)

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """Number whose multiples are the numbers of micro-batches that load the replicas of the policy evenly."""

    @property
    @abstractmethod
    def can_score_alone(self) -> bool:
        """True if `score_alone` can be called: the models are whole on one rank, and stay on its device."""

    @abstractmethod
    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        """See `TrainerWorker.score`."""

    @abstractmethod
    async def score_alone(self, role: str, micro_batch: BatchT) -> list[Any]:
        """Return a model's outputs for each sample, without the other controllers, also while they sample."""

    @abstractmethod
    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """Update a model once on the micro-batches of all callers; return metrics, empty if there are none."""

    @abstractmethod
    async def update_weights(self, policy: Any, *, version: int, averaged: bool = False) -> None:
        """Send the present weights, or their moving average, to the `PolicyEngine` of every controller.

        ``version`` is the lowest that the engines may give to the weights.
        """

    @abstractmethod
    async def check_policy(self, policy: Any) -> None:
        """Compare every tensor of every controller's engine with the present weights; engines raise if one differs."""

    async def _choose_lending(self, lending: Lending, timer: StageTimer) -> None:
        """Count the engines that were lent in this step, and choose whether they are in the next one."""
        is_first = self.group.rank == 0
        if is_first and self._lends:
            self.devices.num_lent += lending.num_engines
        if lending.choose is None:
            return
        lends = None
        if is_first:
            lends = lending.choose(
                generation_s=timer.seconds("gen"),
                generated=self.devices.generated["gen"],
                swap_s=self._swap_s,
            )
        self._swap_s = 0.0
        # An update comes before the next turn of sampling: engines that wake then get its weights.
        self._lends = await self.group.broadcast(lends)

    async def _take_turn(self, turn: Turn, timer: StageTimer) -> None:
        """Bring what a turn needs into the memory of devices that are shared, if any are."""
        if self.turns is None or turn == self.turns.current:
            return
        start_s = timer.clock()
        with timer.stage("swap"):
            # No controller's calls are cut short, and nothing wakes where something of another controller is awake.
            await self.group.barrier()
            await self._swap(self.turns, turn)
            await self.group.barrier()
        self._swap_s += timer.clock() - start_s

    async def _swap(self, turns: DeviceTurns, turn: Turn) -> None:
        """Take a turn on the devices that all controllers share."""
        if self.group.rank == 0:
            await turns.take(turn)


async def check_weights(policy: Any, digests: Mapping[str, Any]) -> None:
    """Have an engine compare its weights with digests, if it can."""
    check = getattr(policy, "check_weights", None)
    if check is not None:
        await check(digests)


def digests_of(weights: Weights) -> Mapping[str, Any]:
    """Iterate over all weights, and return the digests that they come with; empty if there are none."""
    for _ in weights:
        pass
    return getattr(weights, "digests", {})


async def _all(swaps: Iterable[Awaitable[None]]) -> None:
    """Wait until all swaps have ended, and raise the first error."""
    for result in await asyncio.gather(*swaps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
