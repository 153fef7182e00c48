"""A Ray cluster as a run uses it: the connection, its capacity while nodes come and go, and its object stores."""

import asyncio
import logging
import math
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import ray

# Private, because Ray has no public way to keep off logs of processes, to ask whether it would be let in, or to pass a
# token to `ray.init`.
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from ray.exceptions import AuthenticationError, ObjectLostError, RayError

from gcore_controller.context import Reference, nbytes_of
from gcore_controller.errors import ClusterError, ControllerError
from gcore_controller.runtimes.backend import SizedConfig, Sizes

T = TypeVar("T")

Node = Mapping[str, float]
"""The amount of each resource that a node has, by Ray's names."""

_CONNECT_TIMEOUT_S = 10.0
_VERSIONS = re.compile(
    r"Version mismatch:.*Ray: (\S+)\s+Python: (\S+).*Ray: (\S+)\s+Python: (\S+)", re.DOTALL
)
"""The versions of a cluster and of this process, in the error that Ray raises where they differ."""
_POLL_EVERY_S = 1.0
_SETTLED_S = 3.0
"""Nodes that join together are at most a few seconds apart."""


def connect(address: str | None = None, **options: Any) -> None:
    """Connect this process to a cluster by `ray.init`, with a token if there is one, and other ``options`` of it.

    Ray by itself leaves the token aside where the address is given, and retries for 20 seconds when it is refused.
    Without an address it is what RAY_ADDRESS names, or a new cluster on this machine.

    Raises:
        ClusterError: The cluster requires a token and this process has none, or a wrong one; or it runs another
            version of Ray or Python.
        ConnectionError: No cluster answers at the address.
    """
    check_token(address)
    try:
        with _private_token_file():
            ray.init(address=address, **options)
    except RuntimeError as error:
        versions = _VERSIONS.search(str(error))
        if versions is None:
            raise
        raise ClusterError(
            f"the cluster runs Ray {versions[1]} with Python {versions[2]}; expected those of this process: "
            f"Ray {versions[3]} with Python {versions[4]}"
        ) from None


def connect_quietly(
    address: str | None = None, *, variables: Mapping[str, str] | None = None, **options: Any
) -> None:
    """Connect as `connect` does, and keep what Ray and the processes of the cluster log off the screen.

    All processes that Ray starts for this one get the ``variables`` of the environment.
    """
    setattr(ray_worker, "_worker_logs_enabled", False)  # noqa: B010 - private, and Ray has no other way
    if variables:

        def set_variables() -> None:
            os.environ.update(variables)

        # Not ``env_vars``, which Ray writes to its logs: values may be secret.
        options["runtime_env"] = {"worker_process_setup_hook": set_variables}
    connect(address, log_to_driver=False, logging_level=logging.ERROR, **options)


def count_cluster_gpus(address: str) -> float:
    """Return the number of GPUs of all nodes of a cluster; raises as `connect`. Disconnects again."""
    connect_quietly(address)
    try:
        return ray.cluster_resources().get("GPU", 0.0)
    finally:
        ray.shutdown()


def check_token(address: str | None = None) -> None:
    """Ask a cluster whether it accepts this process; use the token from here on if it requires one. See `connect`."""
    address = address or os.environ.get("RAY_ADDRESS", "")
    if not re.fullmatch(r"[^/]+:\d+", address):
        return
    host, _, port = address.rpartition(":")
    try:
        # Ray would try again for 40 seconds.
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address!r}: {error}") from error
    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        try:
            GcsClient(address=address)
        except AuthenticationError:
            # Only now: processes of a cluster without a token could not call one that expects it.
            if not maybe_enable_token_auth_if_token_available(warn_if_disabled=False):
                raise
            GcsClient(address=address)
    except AuthenticationError as error:
        raise ClusterError(
            f"the Ray cluster at {address!r} does not accept this process: {_token(error)}"
        ) from None
    except RayError as error:
        raise ConnectionError(f"what answers at {address!r} is no Ray cluster: {error}") from error


@contextmanager
def _private_token_file() -> Generator[None]:
    """Make the token file that Ray writes for a new cluster on this machine readable by this user alone."""
    file = Path.home() / ".ray" / "auth_token"
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        # Ray keeps the mode of a file that is there.
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield
    finally:
        with suppress(OSError):
            if not file.stat().st_size:
                file.unlink()


def _token(error: AuthenticationError) -> str:
    """Return in words what is wrong with the token, and what is expected."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if "RAY_AUTH_TOKEN_PATH" in str(error.message):
        problem = error.message
    elif mode not in ("", "token"):
        problem = f"RAY_AUTH_MODE is {mode!r}, so no token was sent"
    elif not mode or "no authentication token" in error.message:
        problem = "it has no token"
    elif "RAY_AUTH_TOKEN" in os.environ:
        problem = "the token in RAY_AUTH_TOKEN is not the cluster's"
    else:
        problem = f"the token in {os.environ.get('RAY_AUTH_TOKEN_PATH') or '~/.ray/auth_token'} is not the cluster's"
    return (
        f"{problem}; expected the token that the cluster was started with (`ray get-auth-token` on its head prints it) "
        "in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token, with RAY_AUTH_MODE "
        "unset or 'token'"
    )


@dataclass(frozen=True)
class RayReference(Reference[T]):
    """A reference to a value in Ray's object stores; it lives as long as a reference and the process that put it.

    Its ``value`` is the reference of Ray.
    """

    num_bytes: int

    @property
    def nbytes(self) -> int:
        return self.num_bytes

    async def get(self) -> T:
        """Return the value; its arrays are read-only, and not copied if they are on this node."""
        try:
            return await self.value
        except ObjectLostError as error:
            raise ControllerError(
                f"a value of {self.nbytes} bytes is lost, for the process that put it or its node has ended"
            ) from error


def put(value: T, /) -> Reference[T]:
    """Copy a value into this node's object store; also for services, which have no `Context`."""
    return RayReference(ray.put(value), nbytes_of(value))


def check_capacity(bundle: Mapping[str, float], world_size: int) -> None:
    """Raise `ClusterError` if a cluster, were all of it free, lacks the resources that the controllers need."""
    total: Mapping[str, float] = ray.cluster_resources()
    for name, amount in bundle.items():
        if amount * world_size > total.get(name, 0.0):
            raise ClusterError(
                f"{world_size} controllers need {amount * world_size:g} {name}: "
                f"the cluster has {total.get(name, 0.0):g}; start more nodes, or fewer controllers"
            )


def free_resources() -> str:
    """Return in words the resources that no process has reserved."""
    amounts: dict[str, float] = {"CPU": 0.0, "memory": 0.0, "object_store_memory": 0.0}
    amounts.update(ray.available_resources())
    counts: list[str] = []
    memory: list[str] = []
    for name, amount in amounts.items():
        if name in ("memory", "object_store_memory"):
            memory.append(f"{amount / 1e9:.1f} GB {name}")
        elif "_group_" not in name and ":" not in name:
            counts.append(f"{amount:g} {name}")
    return ", ".join(counts + memory)


class ClusterChangedError(ControllerError):
    """The run has to continue with other processes: nodes have left or joined, or engines are to change their role."""

    def __init__(self, message: str, *, is_swap: bool = False) -> None:
        super().__init__(message)
        self.is_swap = is_swap
        """Whether nothing was lost, and engines are to change their role in a way for which programs start again."""


def _alive_nodes() -> dict[str, Node]:
    """Return the resources of the cluster's nodes, by address and first characters of the id."""
    nodes: dict[str, Node] = {}
    for node in ray.nodes():
        if node["Alive"]:
            name = f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            nodes[name] = node["Resources"]
    return nodes


def has_capacity(nodes: Iterable[Node], config: SizedConfig, sizes: Sizes) -> bool:
    """Return whether each process fits on one of the nodes, if no other run uses them."""
    free = [defaultdict(float, node) for node in nodes]
    needs = _needs(config, sizes)
    needs.sort(key=lambda need: (need["GPU"], need["CPU"]), reverse=True)
    return all(_reserve(free, need) for need in needs)


def _reserve(nodes: Iterable[dict[str, float]], need: Mapping[str, float]) -> bool:
    """Take what a process needs from the first of these nodes that has it; return whether one has."""
    for node in nodes:
        if all(node[name] >= amount for name, amount in need.items()):
            for name, amount in need.items():
                # Ray counts in ten-thousandths.
                node[name] = round(node[name] - amount, 4)
            return True
    return False


def largest(nodes: Iterable[Node], config: SizedConfig) -> Sizes:
    """Return the sizes that the config asks for or, if they do not fit, about the same fraction of each role.

    Raises:
        ClusterError: the nodes lack the capacity for one process of each role.
    """
    nodes = list(nodes)
    full_sizes = config.sizes
    unit = config.rank_unit
    counts = (
        full_sizes.controllers,
        full_sizes.engines,
        full_sizes.ranks // unit,
        *full_sizes.judges.values(),
    )
    sizes = full_sizes
    fractions: set[float] = set()
    for count in counts:
        fractions.update(i / count for i in range(1, count + 1))
    for fraction in sorted(fractions, reverse=True):
        controllers, engines, units, *judges = (
            min(count, max(1, math.floor(count * fraction + 1e-9))) for count in counts
        )
        controllers = min(controllers, engines or controllers)
        sizes = replace(
            full_sizes,
            controllers=controllers,
            engines=engines,
            judges=dict(zip(full_sizes.judges, judges, strict=True)),
            ranks=units * unit,
        )
        if has_capacity(nodes, config, sizes):
            return sizes
    needs = _needs(config, sizes)
    totals = {name: sum(need[name] for need in needs) for name in ("CPU", "GPU")}
    total_needs = " and ".join(f"{amount:g} {name}" for name, amount in totals.items() if amount)
    capacities = [f"{node.get('CPU', 0.0):g} CPU, {node.get('GPU', 0.0):g} GPU" for node in nodes]
    have = "; ".join(capacities) or "ended"
    raise ClusterError(f"{sizes} need {total_needs}: the cluster's nodes have {have}")


def _needs(config: SizedConfig, sizes: Sizes) -> list[dict[str, float]]:
    """Return the resources that each process reserves; an engine over several devices has a CPU for each."""
    is_on_gpu = config.device.startswith("cuda")
    controller = {"CPU": 1.0, "GPU": config.gpus_per_controller}
    engine = {"CPU": 1.0, "GPU": config.ray.gpus_per_engine if is_on_gpu else 0.0}
    engine = {name: amount * sizes.devices_per_engine for name, amount in engine.items()}
    rank = {"CPU": 1.0, "GPU": config.ray.gpus_per_rank if is_on_gpu else 0.0}
    return (
        [controller] * sizes.controllers
        + [engine] * sizes.num_engine_places
        + [rank] * sizes.num_own_ranks
    )


class CapacityWatch:
    """Compares the nodes of a cluster with those that a run was sized for."""

    def __init__(self, config: SizedConfig) -> None:
        self.fitting_sizes = config.sizes
        """The largest sizes that fitted when `size` was called last."""
        self._config = config
        self._nodes: dict[str, Node] = {}
        self._last_change: tuple[frozenset[str], float] = (frozenset(), 0.0)
        """The names of the nodes, and since when there have been these."""

    def size(self) -> Sizes:
        """Return the largest sizes that fit now, or raise `ClusterError` if none do."""
        self._nodes = _alive_nodes()
        if self._config.ray.elastic:
            self.fitting_sizes = largest(self._nodes.values(), self._config)
        return self.fitting_sizes

    @property
    def shortfall(self) -> str:
        sizes = self._config.sizes
        if sizes == self.fitting_sizes:
            return ""
        return f"the cluster has capacity for {self.fitting_sizes}, of {sizes}"

    async def loss(self, sizes: Sizes) -> ClusterChangedError:
        """Wait until nodes are lost and these sizes do not fit any more; return the error that says so."""
        while True:
            await asyncio.sleep(_POLL_EVERY_S)
            nodes = _alive_nodes()
            if nodes.keys() != self._last_change[0]:
                self._last_change = (frozenset(nodes), time.monotonic())
            lost = [name for name in self._nodes if name not in nodes]
            if (
                lost
                and self._config.ray.elastic
                and not has_capacity(nodes.values(), self._config, sizes)
            ):
                return ClusterChangedError(f"node {', '.join(lost)} was lost")

    def check_growth(self) -> None:
        """Raise `ClusterChangedError` if nodes joined some seconds ago, and larger sizes fit."""
        names, since_s = self._last_change
        if (
            not self.shortfall
            or names <= self._nodes.keys()
            or time.monotonic() < since_s + _SETTLED_S
        ):
            return
        nodes = _alive_nodes()
        if largest(nodes.values(), self._config) != self.fitting_sizes:
            joined = ", ".join(name for name in nodes if name not in self._nodes)
            raise ClusterChangedError(f"node {joined} has joined")
