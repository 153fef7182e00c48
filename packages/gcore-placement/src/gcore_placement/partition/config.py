"""The conditions under which devices move during a run."""

from dataclasses import dataclass

from gcore_placement.errors import refusal
from gcore_placement.quantities import Amount, CheckedQuantities, Positive


@dataclass(frozen=True, kw_only=True)
class DynamicPartitionConfig(CheckedQuantities):
    """The conditions under which devices move.

    Example:
        >>> config = DynamicPartitionConfig(move_s=15.0, horizon_steps=50, window=5)
        >>> space = PartitionSpace(num_devices=8, roles=(RoleLimits(devices_per_replica=1),) * 2)
        >>> DynamicPartition(space, space.nearest(4), config).partition.devices
        (4, 4)
    """

    move_s: Amount = 0.0
    """Seconds that a step lasts longer for a move before it."""
    move_within_s: Amount = 0.0
    """Seconds that a step lasts longer for a move within it, which must be earned in the next round."""
    horizon_steps: Positive = 20
    """Rounds over which a move between steps must earn more than it takes."""
    min_gain: Amount = 0.01
    """Least share of generation and rewarding that the best partition must save, or nothing moves."""
    window: Positive = 3
    """Rounds whose medians count as the load; odd. A new load does after `window // 2 + 1` rounds, an outlier never."""
    noise_floor: Amount = 0.05
    """Least noise to assume, as a standard deviation of a load's logarithm."""
    law_error: Amount = 0.1
    """Least error of a role's time by its law to assume, as a standard deviation of its logarithm; added to the noise.
    """
    near: Amount = 1.0
    """Devices move as far as pays even if both medians are off by this many of their deviations."""
    far: Amount = 3.0
    """A round whose load is off the medians by this many deviations is an outlier, or the first after a jump."""
    tolerance: Amount = 0.02
    """Share of each round that following the load may lose to the best fixed partition so far; see `Safeguard`.
    A large number: whatever it loses."""
    is_corrected: bool = True
    """Measurements correct the seconds that a cost model predicts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window % 2 == 0:
            raise refusal("window", self.window, "odd, so that the median is one of the loads")
