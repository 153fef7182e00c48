"""What training ranks have in common, however they are started."""

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gcore_runs.errors import RankError, UserError

if TYPE_CHECKING:
    import torch

Replica = tuple[int, int]
"""A rank's data-parallel replica, and how many there are."""


class RankLearner(Protocol):
    """The models in one rank's process; what they compute are further methods, with micro-batches as the last argument.

    All ranks make the same calls, with the micro-batches of their replicas.
    """

    @property
    def num_updates(self) -> int:
        """Updates of all models so far."""
        ...

    @property
    def roles(self) -> Sequence[Any]:
        """Names of the models there are."""
        ...

    def replicas(self, role: Any) -> Replica:
        """This rank's data-parallel rank in a role, and how many there are."""
        ...

    @property
    def export_weights(self) -> Callable[..., Iterable[tuple[str, "torch.Tensor"]]]:
        """A method: the policy's names and weights, one at a time, whole on every rank."""
        ...


def deal(costs: Sequence[float], num_replicas: int) -> list[list[int]]:
    """Which micro-batches each replica gets: in its n-th pass each has one of about the same cost."""
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    # The first replica to have the heavier one in a pass is the last in the next.
    parts: list[list[int]] = [[] for _ in range(num_replicas)]
    for n, start in enumerate(range(0, len(order), num_replicas)):
        replicas = range(num_replicas) if n % 2 == 0 else reversed(range(num_replicas))
        for replica, i in zip(replicas, order[start : start + num_replicas], strict=False):
            parts[replica].append(i)
    return parts


def sendable(error: Exception) -> Exception:
    """The error itself where its kind is one that the command line expects, else its traceback."""
    from gcore_ckpt import CheckpointError
    from gcore_trainer import TrainerError

    if isinstance(error, CheckpointError | TrainerError | UserError):
        return error
    return RankError(f"a training rank failed:\n{''.join(traceback.format_exception(error))}")
