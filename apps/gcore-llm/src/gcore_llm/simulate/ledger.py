"""Where device-seconds go: every one of them to work, or to one named cause of idleness."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from gcore_controller import StageTimer

Work = Literal["generation", "reward", "preparation", "training", "sync"]
Idle = Literal["long_tail", "waiting_for_reward", "reward_devices", "imbalance", "barriers"]

WORK: tuple[Work, ...] = ("generation", "reward", "preparation", "training", "sync")
IDLE: tuple[Idle, ...] = ("long_tail", "waiting_for_reward", "reward_devices", "imbalance", "barriers")
COLUMNS: tuple[Work | Idle, ...] = (*WORK, *IDLE)


class Ledger:
    """Adds up device-seconds in simulated time.

    Either all devices do one thing, as in training, and those whose share is smaller wait for the slowest: imbalance.
    Or they generate and score. Then a device of the reward without a call is idle for that reason (reward_devices), and
    the idle ones of the engine are divided evenly among the controllers: a controller whose responses are still being
    generated leaves its part to the long tail, one that waits for scores alone to the reward, and one that waits for
    other controllers to barriers.
    """

    def __init__(self, *, num_devices: int, num_reward_devices: int, num_controllers: int) -> None:
        self._num_devices = num_devices
        self._num_reward_devices = num_reward_devices
        self._num_engine_devices = num_devices - num_reward_devices
        self._num_generating = 0
        self._num_rewarding = 0
        self._stages: list[str | None] = [None] * num_controllers
        self._num_in = {"gen": 0, "reward": 0}
        self._whole: tuple[Work, float] | None = None
        self._since_s = 0.0
        self._seconds = _zeros()

    def generate(self, num_devices: int) -> None:
        """So many more devices generate; fewer, if negative."""
        self._advance()
        self._num_generating += num_devices

    def reward(self, num_devices: int) -> None:
        """So many more devices score; fewer, if negative."""
        self._advance()
        self._num_rewarding += num_devices

    def enter(self, rank: int, stage: str | None) -> None:
        """A controller goes over to a stage of its program, or is in none."""
        self._advance()
        for name, change in ((self._stages[rank], -1), (stage, 1)):
            if name in self._num_in:
                self._num_in[name] += change
        self._stages[rank] = stage

    @contextmanager
    def whole(self, work: Work, busy_share: float) -> Generator[None]:
        """All devices do this inside the block, where on average they are busy for a share of the time."""
        self._advance()
        assert self._whole is None, f"{work} began during {self._whole}"
        assert not self._num_generating + self._num_rewarding, f"{work} began while responses were being made"
        self._whole = work, busy_share
        try:
            yield
        finally:
            self._advance()
            self._whole = None

    def cut(self) -> dict[str, float]:
        """Device-seconds of each column since the last call."""
        self._advance()
        seconds, self._seconds = self._seconds, _zeros()
        return seconds

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        passed_s, self._since_s = now_s - self._since_s, now_s
        if not passed_s:
            return
        seconds = self._seconds
        if self._whole is not None:
            work, share = self._whole
            seconds[work] += self._num_devices * passed_s * share
            seconds["imbalance"] += self._num_devices * passed_s * (1 - share)
            return
        seconds["generation"] += self._num_generating * passed_s
        seconds["reward"] += self._num_rewarding * passed_s
        seconds["reward_devices"] += (self._num_reward_devices - self._num_rewarding) * passed_s
        part_s = (self._num_engine_devices - self._num_generating) * passed_s / len(self._stages)
        seconds["long_tail"] += part_s * self._num_in["gen"]
        seconds["waiting_for_reward"] += part_s * self._num_in["reward"]
        seconds["barriers"] += part_s * (len(self._stages) - sum(self._num_in.values()))


def _zeros() -> dict[str, float]:
    return dict.fromkeys(map(str, COLUMNS), 0.0)


class WatchedTimer(StageTimer):
    """A controller's stage timer that tells the ledger."""

    def __init__(self, rank: int, ledger: Ledger) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._rank = rank
        self._ledger = ledger

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """See `StageTimer.stage`."""
        try:
            with super().stage(name):
                self._ledger.enter(self._rank, name)
                yield
        finally:
            self._ledger.enter(self._rank, self.current)
