"""One of the places that a `TieredCheckpointer` saves to: where it is, how often, and how long steps stay there."""

import os
from dataclasses import KW_ONLY, dataclass

from gcore_ckpt.retention import Retention


@dataclass(frozen=True)
class Tier(Retention):
    """A place for steps, and which steps go there.

    Attributes:
        path: A folder or a URL, as for `Checkpointer`. With `replicas`, a folder that each machine has of its own, such
            as one on its disk or in `/dev/shm`; else one place that all ranks see.
        every: The steps to save there are the multiples of this.
        keep: After each commit, delete the lowest steps there until this many are left. None keeps all.
        keep_every: Steps that are multiples of this stay there for good.
        keep_best: As many steps with the best metric of `save` stay there, too.
        best_mode: Whether the highest metric is the best, or the lowest: `"max"` or `"min"`.
        replicas: Number of other machines that get a copy of what a machine's ranks write. 0 survives the death of
            processes, 1 the loss of any one machine with its disk. None: the place is not on the machines.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> disk = Tier("/local/checkpoints", every=5, keep=2, replicas=1)
        >>> remote = Tier("s3://bucket/run", every=50, keep=3, keep_best=1)
        >>> def due(step: int) -> list[str]:
        ...     return [tier.path for tier in (disk, remote) if step % tier.every == 0]
        >>> due(55)
        ['/local/checkpoints']
        >>> due(100)
        ['/local/checkpoints', 's3://bucket/run']
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    every: int = 1
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; expected 1 or more")
        if self.replicas is not None and self.replicas < 0:
            raise ValueError(
                f"replicas is {self.replicas}; expected None (a place that all ranks see) or 0 or more"
            )
        if self.replicas is not None and "://" in str(self.path):
            raise ValueError(
                f"replicas is {self.replicas} and path is {self.path}; expected a folder of each machine"
            )
        super().__post_init__()
