"""The data-parallel replicas of a trainer, seen by one of them."""

from typing import Any, TypeVar

import torch.distributed as dist

from gcore_trainer.errors import TrainerError

T = TypeVar("T")


class Replicas:
    """Groups of ranks that work on different samples; every method is called by all of them.

    Args:
        group: one rank of each replica; None: this one is alone.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.size = dist.get_world_size(group) if group else 1
        self.rank = dist.get_rank(group) if group else 0

    def gather(self, value: T) -> list[T]:
        """Return every replica's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_or_raise(self, value: T, error: TrainerError | None) -> list[T]:
        """Return every replica's value; if one passes an error, all of them raise it, so that none waits for another.

        Raises:
            TrainerError: the first replica's that has one.
        """
        everyones = self.gather((value, error))
        if found := next(((rank, e) for rank, (_, e) in enumerate(everyones) if e is not None), None):
            rank, first = found
            raise error or type(first)(f"data-parallel rank {rank}: {first}")
        return [v for v, _ in everyones]
