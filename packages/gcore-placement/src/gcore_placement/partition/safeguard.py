"""A safeguard for partitions that follow the load: where that loses, the best fixed partition so far takes over."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gcore_placement.errors import refusal
from gcore_placement.quantities import Floats

LOST = 0.15
"""Rounds that following the load may lose to the best fixed partition, beyond tolerance and a move, before it ends."""
WON = 0.5
"""Rounds that following must win by before it starts again, if it has lost nothing yet."""
_LEAD = 3.0
"""Lead, in moves, at which another partition first replaces the fixed one; at least `LOST` rounds."""


class Safeguard:
    """Chooses after each round between the partition that follows the load and the best fixed one so far.

    A load that swings faster than it can be followed costs a move and a wrong partition each time, while a fixed
    partition between the extremes would serve it well. By the law of seconds the loss of every partition in a round is
    known, whichever was used. So the two are compared all the time, in rounds of usual length: following ends once it
    has lost more than a move and `LOST` rounds to the fixed partition, beyond a share ``tolerance`` of each round's
    seconds (Page's cumulative sum, Biometrika 41, 1954), and starts again once it would have won `WON` rounds, or what
    it has lost since it had won most. That threshold doubles with each `LOST` rounds that following has lost in
    total.

    Of two partitions between which the load swings either leads for a while, and to change to the present leader each
    time gains nothing (follow the leader; Cesa-Bianchi and Lugosi, "Prediction, learning, and games", 2006, section
    3.2). So the lead that makes another partition the fixed one doubles each time that a change turns back. Of two
    partitions of which neither ever leads by more than D seconds there are then at most 2 + log2(D / L) changes, L the
    first of these leads, which cost at most 4 D seconds, and a round and a move for each.

    Bound: if rounds are alike and the two choices differ by at most g of them in any of T rounds, following loses at
    most ``tolerance * T + m + g + LOST * (1 + log2(max(1, g * T / WON)))`` rounds to the best fixed partition so far,
    in total and whatever the load does, m being the length of a move: before it could lose more, it would have to win
    more than g T.

    Args:
        role_devices: devices of each role in each partition: [num_partitions, num_roles].
        start: the index of the first partition.
        tolerance: share of each round's seconds.
    """

    def __init__(self, role_devices: Floats, start: int, tolerance: float) -> None:
        self._role_devices = role_devices
        self._tolerance = tolerance
        self._spent_P = np.zeros(len(role_devices))
        """Seconds of all rounds on each partition."""
        self._fixed = start
        self._gained_R = np.zeros(role_devices.shape[1])
        """Devices that each role gained when the fixed partition last changed."""
        self._num_turns = 0
        """Number of changes of the fixed partition that turned back the change before."""
        self._evidence = 0.0
        """Rounds by which the other choice is better, in a cumulative sum that stays at or above 0."""
        self._won = 0.0
        """Rounds that following has won over the fixed partition while it was chosen; below 0: lost."""
        self._most_won = 0.0
        """Maximum of `_won` so far."""
        self._least_s = self._least_s2 = 0.0
        """Sums of the least seconds of all rounds, and of their squares."""
        self.follows_load = True
        """The present choice."""

    def choose(
        self, seconds_P: Floats, *, before: int, after: int, move_s: float, is_within_step: bool
    ) -> int:
        """Observe a round, and return the index of the next round's partition.

        Args:
            seconds_P: the round's seconds on each partition: [num_partitions].
            before: index of the partition that followed the load up to this round.
            after: the same from the next round on.
            move_s: seconds by which devices that move are late.
            is_within_step: whether the next round belongs to the same step: the choice then stays.
        """
        self._spent_P += seconds_P
        following_s = float(seconds_P[before])
        fixed_s = float(seconds_P[self._fixed])
        following_s += self._late_s(before, after, move_s)
        best = int(self._spent_P.argmin())
        least_s = float(seconds_P.min())
        self._least_s += least_s
        self._least_s2 += least_s**2
        # The mean, weighted by seconds: a wave of a few prompts is no usual round.
        usual_s = self._least_s2 / self._least_s if self._least_s else 1.0
        lead_s = max(_LEAD * move_s, LOST * usual_s) * 2**self._num_turns
        if not is_within_step and self._spent_P[self._fixed] - self._spent_P[best] > lead_s:
            fixed_s += self._late_s(self._fixed, best, move_s)
            gained_R = self._role_devices[best] - self._role_devices[self._fixed]
            self._num_turns += float(gained_R @ self._gained_R) < 0
            self._fixed = best
            self._gained_R = gained_R
        won = (fixed_s - following_s) / usual_s
        allowed = self._tolerance * least_s / usual_s
        if self.follows_load:
            self._won += won
            self._most_won = max(self._most_won, self._won)
            self._evidence = max(0.0, self._evidence - won - allowed)
            threshold = LOST + move_s / usual_s
        else:
            self._evidence = max(0.0, self._evidence + won - allowed)
            threshold = max(WON, self._most_won - self._won) * 2 ** (max(0.0, -self._won) / LOST)
        if self._evidence > threshold and not is_within_step:
            self.follows_load = not self.follows_load
            self._evidence = 0.0
        return after if self.follows_load else self._fixed

    def _late_s(self, before: int, after: int, move_s: float) -> float:
        """Return the seconds that a move adds: `move_s` times the largest share of new devices of any role."""
        had = self._role_devices[before]
        has = self._role_devices[after]
        return move_s * float((1 - had / has).max())

    def state(self) -> dict[str, Any]:
        """Return the state as plain data, for JSON."""
        values = {name.removeprefix("_"): getattr(self, name) for name in _STATE}
        return {**values, "spent": self._spent_P.tolist(), "gained": self._gained_R.tolist()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`; PlacementError if its number of partitions differs."""
        if len(state["spent"]) != len(self._spent_P):
            raise refusal(
                "partitions of the state",
                len(state["spent"]),
                f"{len(self._spent_P)}, as the space has",
            )
        self._spent_P = np.array(state["spent"], dtype=np.float64)
        self._gained_R = np.array(state["gained"], dtype=np.float64)
        for name in _STATE:
            setattr(self, name, state[name.removeprefix("_")])


_STATE = (
    "_fixed",
    "_num_turns",
    "_evidence",
    "_won",
    "_most_won",
    "_least_s",
    "_least_s2",
    "follows_load",
)
