"""What the transfer of weights raises on purpose."""

from gcore_rollout.errors import RolloutError


class WeightSyncError(RolloutError):
    """New weights could not be sent, received or applied."""


class WrongBaseError(WeightSyncError):
    """An update changes weights that are not those which are there: a full one is needed.

    Attributes:
        version: Of the weights that are there; None: there are none, or only what was merged from adapters.
    """

    def __init__(self, message: str, *, version: int | None) -> None:
        super().__init__(message)
        self.version = version


class CorruptWeightsError(WeightSyncError):
    """What was stored is not what was written."""


class PeerLostError(WeightSyncError):
    """Another rank is gone, or did not do its part in time; the process group is of no more use."""
