"""Trainer groups: the models in training, on one rank or on many, as ranks and the process of the run see them.

The app provides a `TrainerWorker`, the models on one rank. Each runtime provides a `TrainerGroup`, which the process of
the run holds: `runtimes.inline` in this process, `runtimes.local` on local processes, and `runtimes.ray` on Ray actors.
Ranks in processes of their own answer the messages of this module. Controllers call a `TrainerClient`.
"""

import faulthandler
import os
import re
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from gcore_controller.errors import ClusterError, DeviceError, RankCodeError, RankError
from gcore_controller.hangs import limit_s, log_of, record_collectives

if TYPE_CHECKING:
    import torch

BatchT = TypeVar("BatchT", bound=Sequence[Any])
"""A micro-batch."""
BatchT_contra = TypeVar("BatchT_contra", bound=Sequence[Any], contravariant=True)

State = dict[str, Any]
"""The part of a checkpoint besides the models, such as the states of the controllers."""
Weights = Iterable[tuple[str, "torch.Tensor"]]
"""Names and tensors, which can be iterated over once. Their attribute ``digests``, if any, is filled on the way."""

Replica = tuple[int, int]
"""The data-parallel replica that a rank belongs to, and the number of replicas."""

Joined = tuple[dict[str, Replica], str]
"""A rank's replica in each role, and the file that its standard error goes to."""


class TrainerWorker(Protocol[BatchT_contra]):
    """The models in training on one rank.

    All ranks of a group make the same calls, each with the micro-batches of its data-parallel replica.
    """

    @property
    def roles(self) -> Sequence[str]:
        """Names of the models, such as actor, critic and reference."""
        ...

    @property
    def num_updates(self) -> int:
        """Updates of all models so far."""
        ...

    def replica(self, role: str) -> Replica:
        """Return this rank's data-parallel replica of a role, and the number of replicas."""
        ...

    def sleep(self, *, keep_weights: bool) -> None:
        """Move all models out of the device's memory, or with ``keep_weights`` all but the policy's weights.

        Idempotent. Until `wake` no model computes; those that are saved or exported come back by themselves.
        """

    def wake(self) -> None:
        """Move the models back. Idempotent."""

    def score(
        self, role: str, micro_batches: Sequence[BatchT_contra], *, with_routing: bool
    ) -> list[list[Any]]:
        """Return a model's outputs for each sample; ``with_routing`` in pairs with the experts of its tokens."""
        ...

    def train_step(self, role: str, micro_batches: Sequence[BatchT_contra]) -> dict[str, float]:
        """Update a model once, on the micro-batches of all replicas together, and return metrics."""
        ...

    def export_weights(self, *, averaged: bool) -> Weights:
        """Yield the weights of the policy, or of its moving average, in the same order on every rank.

        Each tensor is whole on the rank that sends it, and on the meta device on the others.
        """
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write the folder of the policy, as its library loads it."""

    def save(self, step: int, rest: State) -> None:
        """Checkpoint all models together with ``rest``; return once they are copied."""

    def load(self) -> State:
        """Load the latest checkpoint, and return the ``rest`` that was saved in it; empty: there is no checkpoint."""
        ...

    def close(self) -> None:
        """Wait until checkpoints are written."""


_LOSSES = {"DistError", "RayError"}
"""Names of the errors of torch.distributed and of Ray, neither of which is imported here."""
_LOSS = re.compile(r"gloo/|NCCL|\bnccl[A-Z]|Connection (closed|reset|refused)|Broken pipe|TCPStore")
"""Words of the errors of collectives whose other ranks are gone."""
_DEVICE_FAILURE = re.compile(
    r"uncorrectable (ECC|NVLink) error|unspecified launch failure|hardware stack error"
)
"""Words of CUDA's errors after which a device may fail again."""

Message = Callable[[TrainerWorker[Any]], Any]
"""A call to a rank: with its worker, in its process, it returns the answer. It can be pickled."""


class TrainerGroup(ABC):
    """All ranks of the models in training, as the process of the run sees them between two steps.

    Example:
        >>> from unittest.mock import Mock
        >>> def checkpoint(group: TrainerGroup, step: int, controllers: list[State]) -> None:
        ...     group.save(step, {"controllers": controllers})
        ...     group.save_pretrained(Path(f"step {step}"))
        >>> worker = Mock()
        >>> checkpoint(InProcessTrainerGroup(worker), 10, [{}])
        >>> worker.save.call_args.args
        (10, {'controllers': [{}]})
    """

    @property
    def num_updates(self) -> int:
        """Updates of all models so far."""
        return self._ask_all("num_updates", attrgetter("num_updates"))

    def save_pretrained(self, path: Path) -> None:
        """See `TrainerWorker.save_pretrained`."""
        self._ask_all("save_pretrained", methodcaller("save_pretrained", path.absolute()))

    def save(self, step: int, rest: State) -> None:
        """See `TrainerWorker.save`."""
        self._ask_all("save", methodcaller("save", step, rest))

    def load(self) -> State:
        """See `TrainerWorker.load`."""
        return self._ask_all("load", methodcaller("load"))

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """See `TrainerWorker.sleep`."""
        self._ask_all("sleep", methodcaller("sleep", keep_weights=keep_weights))

    async def wake(self) -> None:
        """See `TrainerWorker.wake`."""
        self._ask_all("wake", methodcaller("wake"))

    @abstractmethod
    def close(self) -> None:
        """Wait until checkpoints are written, and end the processes of the group, if it has any."""

    @abstractmethod
    def _ask_all(self, stage: str, message: Message) -> Any:
        """Send a message to all ranks, wait for all answers, and return that of rank 0.

        ``stage`` is its name in errors, and what `hangs.limit_s` limits its time by.
        """


class SharedTrainerGroup(TrainerGroup, Generic[BatchT]):
    """A trainer group that the controllers of this process share; several calls may be in flight at once.

    Example:
        >>> import asyncio
        >>> async def train(group: SharedTrainerGroup, samples: list[float]) -> dict[str, float]:
        ...     return await group.train_step("actor", [[sample] for sample in samples])
        >>> class Worker:
        ...     def train_step(self, role, micro_batches):
        ...         return {"micro_batches": float(len(micro_batches))}
        >>> asyncio.run(train(InProcessTrainerGroup(Worker()), [0.1, 0.2]))
        {'micro_batches': 2.0}
    """

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """Number whose multiples are the numbers of micro-batches that load the replicas of the policy evenly."""

    @abstractmethod
    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        """See `TrainerWorker.score`."""

    @abstractmethod
    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        """Update a model once on the micro-batches, and return metrics."""

    @abstractmethod
    def export_weights(self, *, averaged: bool = False) -> Weights:
        """Yield the weights of the policy, or of its moving average."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The ranks of a trainer group. The callables are pickled and sent to the processes of the ranks.

    Example:
        >>> def make_worker(device: str):
        ...     return torch.nn.Linear(4, 2).to(device)  # in a run, a TrainerWorker
        >>> spec = TrainerSpec(make_worker=make_worker, num_ranks=2, device="cpu", num_threads=1, enter_process=print)
        >>> spec.make_worker(spec.device).weight.device.type
        'cpu'
    """

    make_worker: Callable[[str], TrainerWorker[Any]]
    """Build the models of a rank on a device; called in its process, after torch.distributed was initialised."""
    num_ranks: int
    device: str
    """Type of the devices, as torch names it."""
    num_threads: int
    """Threads of torch that the ranks of a machine share."""
    enter_process: Callable[[int], None]
    """Called with the rank in its process before anything is built, for instance to redirect its output."""
    put_weights: Callable[..., Any] | None = None
    """Copy weights that are not on the meta device to where engines on other nodes can read them; needed on Ray.

    Called with the weights, their ``version``, and ``base_version``, the version that they may be sent as changes of,
    or None. Returns a reference, whose ``join`` makes one of those of all ranks, and ``after`` adds the one before;
    then ``next_base`` is the ``base_version`` of the next, and ``version`` is its own."""
    write_weights: Callable[[Weights, Path], Any] | None = None
    """Write weights that are not on the meta device to a file, each to its place, and return the layout of the file;
    needed by local ranks."""
    open_memory: Callable[[], Any] | None = None
    """Make memory that holds weights, whose ``write`` calls their ``write_to`` with the path of a file and takes the
    layout that is returned; needed by local ranks."""
    expected_errors: tuple[type[Exception], ...] = ()
    """Errors that callers get as they were raised; any other becomes what `rank_failure` says, with its traceback."""
    heartbeat_timeout_s: float = 120.0
    """How long a rank's process may be stopped or, on Ray, show no sign of life, whatever it computes, until the rank
    counts as lost. One that is alive may take ten times as long to answer as it took so far, and five of these timeouts
    at least; see `hangs.limit_s`."""
    preload: Sequence[str] = ()
    """Modules that all local processes need; they are imported once."""


def rank_failure(
    error: BaseException, rank: int, message: str, expected: tuple[type[Exception], ...]
) -> BaseException:
    """Return the error to raise for an error of a rank: itself if it is ``expected``, else one with the message.

    That is a `DeviceError` if the rank's device failed, a `RankError` if it says that it has lost another rank, and
    else a `RankCodeError`.
    """
    if isinstance(error, (RankError, ClusterError, *expected)):
        return error
    if isinstance(error, RuntimeError) and _DEVICE_FAILURE.search(str(error)):
        return DeviceError(message, rank)
    kinds = {base.__name__ for base in type(error).__mro__}
    is_loss = isinstance(error, ConnectionError) or not kinds.isdisjoint(_LOSSES)
    is_loss = is_loss or (isinstance(error, RuntimeError) and _LOSS.search(str(error)) is not None)
    if is_loss:
        return RankError(message)
    return RankCodeError(message)


def _check_interfaces() -> None:
    """Raise `ClusterError` unless this machine has the network interfaces that gloo is to use."""
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name and name not in interfaces:
            raise ClusterError(
                f"GLOO_SOCKET_IFNAME is {name!r}; expected an interface of {socket.gethostname()}: "
                f"{', '.join(interfaces)}"
            )


def join_ranks(
    spec: TrainerSpec, rank: int, store: Any, device: str, *, num_here: int = 1
) -> tuple[TrainerWorker[Any], Joined]:
    """Build the models together with the other ranks, which meet in ``store``, one of torch.distributed's.

    ``num_here`` of them are on this machine.

    From here on SIGUSR1 writes the stacks of all threads to the standard error. Once the models are built, a collective
    of any group may take as long as the first call of a stage.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import (
        _set_pg_timeout,  # pyright: ignore[reportPrivateUsage]  # there is no public name
        _world,  # pyright: ignore[reportPrivateUsage]  # nor of the groups of a process
    )

    torch.set_num_threads(max(1, spec.num_threads // num_here))
    faulthandler.register(signal.SIGUSR1, file=2, chain=False)
    _check_interfaces()
    options: dict[str, Any] = {"backend": "gloo"}
    if device.startswith("cuda"):
        record_collectives()
        # Objects, and waits for a rank that writes, go over gloo: NCCL would end a run in which a wait takes long.
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device(device)}
    dist.init_process_group(**options, store=store, rank=rank, world_size=spec.num_ranks)
    worker = spec.make_worker(device)
    timeout = timedelta(seconds=limit_s("", {}, spec.heartbeat_timeout_s))
    # A group has torch's default, whatever that of the world is.
    for group in _world.pg_map:
        _set_pg_timeout(timeout, group)
    replicas = {role: worker.replica(role) for role in worker.roles}
    return worker, (replicas, log_of(os.getpid()))


def deal(costs: Sequence[float], num_replicas: int) -> list[list[int]]:
    """Assign micro-batches to replicas, so that in its n-th pass each replica has one of about the same cost.

    Returns the indices of each replica's micro-batches. ``costs`` are in any unit.
    """
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    # The first replica to have the heavier one in a pass is the last in the next.
    parts: list[list[int]] = [[] for _ in range(num_replicas)]
    for n, start in enumerate(range(0, len(order), num_replicas)):
        replicas = list(range(num_replicas))
        if n % 2 == 1:
            replicas.reverse()
        for replica, i in zip(replicas, order[start : start + num_replicas], strict=False):
            parts[replica].append(i)
    return parts
