"""Turns of a trainer group and of engines that share devices: which of them is in the devices' memory at a stage."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import DeviceTimers, StageTimer, rank_name

Turn = Literal["sampling", "training", "sync"]
"""A stage that has the devices: sampling, with the engines awake; training, with the trainer; sync, with the trainer
and the weights of the policy's engine, but not its keys and values."""


class LendRule(Protocol):
    """Decides whether training ranks lend their devices to engines; `gcore_placement.LendChoice` is one."""

    @property
    def lends(self) -> bool:
        """True if they do in the next step."""
        ...

    def observe(self, *, generation_s: float, generated: float, swap_s: float) -> bool:
        """Observe the seconds of generation of a step, the tokens or images that were generated, and the seconds of all
        swaps since the last call; return `lends`."""
        ...


class SleepingTrainer(Protocol):
    """A trainer group, or some of its ranks, that can leave their devices; both methods are idempotent."""

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class SleepingEngine(Protocol):
    """An engine that can leave its devices, its weights and its keys and values one by one; see gcore-rollout."""

    async def abort(self) -> None: ...
    async def sleep(self, *, keep_weights: bool = True) -> None: ...
    async def wake(self, *, weights: bool = True, cache: bool = True) -> None: ...


class DeviceTurns:
    """Lets roles that share devices take turns: the one whose turn it is has the memory, and the others are asleep.

    New weights pass in the order that needs least memory: the engine's weights wake and are overwritten, the trainer
    goes to sleep, and only then keys and values wake. Weights that will be overwritten are dropped instead of moved.

    Args:
        trainer: awake at first.
        policy: the engine that takes over the trainer's weights, asleep at first, with its weights kept.
        others: further engines that work in the turn of sampling, such as a judge; asleep at first.
        devices: records the swaps of the training ranks; engines record their own.
        ranks: numbers of the training ranks whose swaps are recorded.
        current: the first turn; None: it is not known who is asleep, and the first call finds out.
    """

    def __init__(
        self,
        trainer: SleepingTrainer,
        policy: SleepingEngine,
        others: Sequence[SleepingEngine] = (),
        *,
        devices: DeviceTimers,
        ranks: Iterable[int] = (),
        current: Turn | None = "training",
    ) -> None:
        self.current = current
        """None: a swap has failed half-way, or none was made yet."""
        self._trainer = trainer
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
                await self._move_trainer(is_awake=False)
                if all_asleep is not None:
                    await all_asleep()
                await _all(engine.wake() for engine in (self._policy, *self._others))
            else:
                if before != "training":
                    await self._end_sampling(keep_weights=turn == "sync")
                    if all_asleep is not None:
                        await all_asleep()
                    await self._move_trainer(is_awake=True)
                if turn == "sync":
                    await self._policy.wake(cache=False)
            self.current = turn

    async def _end_sampling(self, *, keep_weights: bool) -> None:
        async def end(engine: SleepingEngine) -> None:
            await engine.abort()
            await engine.sleep(keep_weights=keep_weights or engine is not self._policy)

        # Together: those of a policy and of a judge are on different devices, unless these take turns themselves.
        await _all(map(end, (self._policy, *self._others)))

    async def _move_trainer(self, *, is_awake: bool) -> None:
        with self._devices.stage("swap", *self._ranks):
            if is_awake:
                await self._trainer.wake()
            else:
                await self._trainer.sleep()


@dataclass(frozen=True, kw_only=True)
class Lending:
    """The loan of the devices of training ranks to engines while the policy samples."""

    num_engines: int
    """Engines on the devices of all ranks."""
    rule: LendRule | None = None
    """Decides, on the first controller, after the sampling of each step; None: they are lent in each step."""


@dataclass(eq=False)
class TurnChoice:
    """A controller's choice of turns, the same on all: in steps in which nothing is lent, the ranks keep theirs."""

    lending: Lending | None
    """None: turns are taken in each step."""
    group: Collectives
    devices: DeviceTimers

    _lends: bool | None = field(default=None, init=False)
    """None: before the first turn."""
    _swap_s: float = field(default=0.0, init=False)

    async def choose(self, turn: Turn, timer: StageTimer) -> Turn:
        """Return the turn to take where the loop is at ``turn``; every controller makes the same calls."""
        rule = self.lending.rule if self.lending is not None else None
        if self._lends is None:
            self._lends = rule is None or rule.lends
        if turn != "training":
            return turn if self._lends else "training"
        if self.lending is not None and self._lends and self.group.rank == 0:
            self.devices.num_lent += self.lending.num_engines
        if rule is not None:
            if self.group.rank == 0:
                rule.observe(
                    generation_s=timer.seconds("gen"),
                    generated=self.devices.generated["gen"],
                    swap_s=self._swap_s,
                )
            self._swap_s = 0.0
            # An update comes before the next turn of sampling: engines that wake then get its weights.
            self._lends = await self.group.broadcast(rule.lends)
        return turn

    @contextmanager
    def swapping(self, timer: StageTimer) -> Generator[None]:
        """Attribute the time inside the block to a swap."""
        start_s = timer.clock()
        with timer.stage("swap"):
            yield
        self._swap_s += timer.clock() - start_s


class TurnTaker(ABC):
    """The transfers that the loop asks a `PolicyTrainer` for, as turns."""

    async def offload(self, timer: StageTimer) -> None:
        await self._take_turn("sampling", timer)

    async def onload(self, timer: StageTimer) -> None:
        await self._take_turn("training", timer)

    async def onload_weights(self, timer: StageTimer) -> None:
        await self._take_turn("sync", timer)

    @abstractmethod
    async def _take_turn(self, turn: Turn, timer: StageTimer) -> None:
        """Bring what a turn needs into the memory of devices that are shared, if any are."""


async def _all(swaps: Iterable[Awaitable[None]]) -> None:
    """Wait until all swaps have ended, and raise the first error."""
    for result in await asyncio.gather(*swaps, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
