"""A ledger that counts device-seconds while a simulation runs."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal, get_args

Work = Literal["generation", "reward", "preparation", "training", "sync"]
Idle = Literal["long_tail", "waiting_for_reward", "reward_devices", "imbalance", "barriers"]

WORK: tuple[Work, ...] = get_args(Work)
IDLE: tuple[Idle, ...] = get_args(Idle)


class RunningLedger:
    """Adds up device-seconds: each goes to work, or to one cause of idleness.

    Either all devices do one thing, as in training, where devices with a smaller share wait for the slowest
    (imbalance), or they generate and score. Then reward devices without a call are idle for that reason
    (reward_devices), and idle engine devices are divided evenly among the controllers: the part of a controller counts
    as the long tail while its responses are generated, as waiting for the reward while it waits for scores alone, and
    as barriers while it waits for other controllers.

    `gcore_placement.Ledger` assigns the time of a run that has ended, from its spans.

    Args:
        clock: returns the simulated time in seconds.
    """

    def __init__(
        self, *, num_devices: int, num_reward_devices: int, num_controllers: int, clock: Callable[[], float]
    ) -> None:
        self._num_devices = num_devices
        self._num_reward_devices = num_reward_devices
        self._num_engine_devices = num_devices - num_reward_devices
        self._clock = clock
        self._num_generating = 0
        self._num_rewarding = 0
        self._stages: list[str | None] = [None] * num_controllers
        self._num_in = {"gen": 0, "reward": 0}
        self._whole: tuple[Work, float] | None = None
        self._since_s = 0.0
        self._seconds = dict.fromkeys((*WORK, *IDLE), 0.0)

    def generate(self, num_devices: int) -> None:
        """Count more devices as generating, or fewer if negative."""
        self._advance()
        self._num_generating += num_devices

    def reward(self, num_devices: int) -> None:
        """Count more devices as scoring, or fewer if negative."""
        self._advance()
        self._num_rewarding += num_devices

    def enter(self, rank: int, stage: str | None) -> None:
        """Note the stage of its program that a controller is in from now on; None: it is in none."""
        self._advance()
        for name, change in ((self._stages[rank], -1), (stage, 1)):
            if name in self._num_in:
                self._num_in[name] += change
        self._stages[rank] = stage

    @contextmanager
    def whole(self, work: Work, busy_share: float) -> Generator[None]:
        """Count all devices as doing ``work`` inside the block, busy for a share of the time on average."""
        self._advance()
        assert self._whole is None, f"{work} started during {self._whole}"
        assert not self._num_generating + self._num_rewarding, f"{work} started while responses were generated"
        self._whole = work, busy_share
        try:
            yield
        finally:
            self._advance()
            self._whole = None

    def cut(self) -> dict[str, float]:
        """Return the device-seconds of each of WORK and IDLE since the last call."""
        self._advance()
        seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {str(name): value for name, value in seconds.items()}

    def _advance(self) -> None:
        now_s = self._clock()
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
