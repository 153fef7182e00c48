"""The readings of every node of a Ray cluster, taken by a process on each."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_controller import connect_quietly
from gcore_runs.doctor.all_reduce import time_all_reduce
from gcore_runs.doctor.checks import Finding
from gcore_runs.doctor.node_checks import Node
from gcore_runs.doctor.readings import Readings, existing_folder, read_machine

_TIMEOUT_S = 120.0
"""Starting a process on a node, and importing torch there, may take a minute from a shared file system."""
_JOIN_TIMEOUT_S = 60.0
_REACH_TIMEOUT_S = 3.0
_SEEN_TIMEOUT_S = 5.0
"""A file may be seen on another client of NFS this much later."""


class Probe:
    """A process on a node, which reads its machine and meets those of the others."""

    def read(self, folder: str) -> Readings:
        """See `read_machine`."""
        if not os.environ.get("CUDA_VISIBLE_DEVICES"):
            # Ray hides all GPUs from a process that reserves none.
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        return read_machine(Path(folder))

    def time_s(self) -> float:
        """Return the time of this node's clock."""
        return time.time()

    def sees(self, marker: str) -> bool:
        """Return whether a file that was written on another machine is here."""
        deadline_s = time.monotonic() + _SEEN_TIMEOUT_S
        while not Path(marker).is_file():
            if time.monotonic() >= deadline_s:
                return False
            with suppress(OSError):
                # Listing a folder makes NFS ask for what is new in it.
                list(Path(marker).parent.iterdir())
            time.sleep(0.2)
        return True

    def listen(self) -> tuple[str, int]:
        """Listen on a free port of the address by which Ray knows this node, as training ranks do."""
        self._listener = socket.create_server((ray.util.get_node_ip_address(), 0))
        return self._listener.getsockname()[:2]

    def unreachable(self, addresses: Mapping[str, tuple[str, int]]) -> list[str]:
        """Return the names of addresses that this node cannot connect to."""
        missed: list[str] = []
        for name, address in addresses.items():
            try:
                socket.create_connection(address, timeout=_REACH_TIMEOUT_S).close()
            except OSError:
                missed.append(name)
        return missed

    def all_reduce(self, ranks: Mapping[tuple[str, int], int]) -> Finding | None:
        """Take part in the all-reduce of nodes with these numbers of ranks, by the addresses on which they listen."""
        address = self._listener.getsockname()[:2]
        self._listener.close()
        nodes = [node for node, num_ranks in ranks.items() if num_ranks]
        if address not in nodes:
            return None
        # The port of the first one is free now, and ranks meet there.
        host, port = nodes[0]
        rendezvous = [f"--nnodes={len(nodes)}", f"--node-rank={nodes.index(address)}"]
        rendezvous += [f"--master-addr={host}", f"--master-port={port}"]
        return time_all_reduce(ranks[address], rendezvous)


def read_cluster(
    address: str, folder: Path, *, expected: int = 0, num_ranks: int = 0
) -> list[Node]:
    """Connect to a cluster, wait a minute for the ``expected`` number of nodes, and read each.

    ``num_ranks`` of each node take part in an all-reduce; 0: one for each GPU.

    Raises:
        ClusterError: it requires a token that this process does not have.
        ConnectionError: no cluster answers at the address.
    """
    connect_quietly(address)
    try:
        return _read(_wait_for_nodes(expected), folder.absolute(), num_ranks)
    finally:
        ray.shutdown()


def _wait_for_nodes(expected: int) -> dict[str, dict[str, Any]]:
    deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) >= expected or time.monotonic() > deadline_s:
            return {f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})": node for node in alive}
        time.sleep(1.0)


def _read(ray_nodes: Mapping[str, dict[str, Any]], folder: Path, num_ranks: int) -> list[Node]:
    remote: Any = ray.remote
    probes: dict[str, Any] = {}
    for name, node in ray_nodes.items():
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        probes[name] = remote(Probe).options(num_cpus=0, scheduling_strategy=on_node).remote()
    readings, errors = _ask(probes, lambda probe: probe.read.remote(str(folder)))
    probes = {name: probes[name] for name in readings}
    skews = {name: _measure_skew(probe) for name, probe in probes.items()}
    seen = _ask_for_marker(probes, folder)
    addresses, _ = _ask(probes, lambda probe: probe.listen.remote())
    missed, _ = _ask(probes, lambda probe: probe.unreachable.remote(addresses))
    ranks = {address: num_ranks or readings[name].torch_gpus for name, address in addresses.items()}
    outcomes: dict[str, Finding] = {}
    if sum(ranks.values()) > 1:
        outcomes, _ = _ask(probes, lambda probe: probe.all_reduce.remote(ranks))
    nodes: list[Node] = []
    for name, node in ray_nodes.items():
        skew_s, skew_error_s = skews.get(name, (0.0, 0.0))
        resources: Mapping[str, float] = node["Resources"]
        nodes.append(
            Node(
                name=name,
                readings=readings.get(name, Readings()),
                error=errors.get(name, ""),
                skew_s=skew_s,
                skew_error_s=skew_error_s,
                sees_folder=seen.get(name, False),
                unreachable=missed.get(name, list(addresses)),
                object_store_bytes=int(resources.get("object_store_memory", 0)),
                gpus=resources.get("GPU", 0.0),
                all_reduce=outcomes.get(name),
            )
        )
    return nodes


def _measure_skew(probe: Any) -> tuple[float, float]:
    """Return by how much the clock of a node is ahead of ours, and the error of that, in seconds."""
    start_s = time.time()
    there_s: float = ray.get(probe.time_s.remote())
    end_s = time.time()
    return there_s - (start_s + end_s) / 2, (end_s - start_s) / 2


def _ask_for_marker(probes: Mapping[str, Any], folder: Path) -> Mapping[str, bool]:
    """Return which nodes see a file that is written into the folder of runs, or the one that it will be in.

    All do where this process cannot write it.
    """
    marker = existing_folder(folder) / f".gcore-doctor-{uuid.uuid4().hex}"
    try:
        marker.touch()
    except OSError:
        return dict.fromkeys(probes, True)
    try:
        return _ask(probes, lambda probe: probe.sees.remote(str(marker)))[0]
    finally:
        marker.unlink(missing_ok=True)


def _ask(
    probes: Mapping[str, Any], call_probe: Callable[[Any], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the answers of all nodes, and the errors of those that did not answer."""
    calls = {name: call_probe(probe) for name, probe in probes.items()}
    done: Sequence[Any] = []
    if calls:
        done, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=_TIMEOUT_S)
    answers: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, call in calls.items():
        if call not in done:
            errors[name] = f"no answer within {_TIMEOUT_S:.0f} s"
            continue
        try:
            answers[name] = ray.get(call)
        except Exception as error:
            errors[name] = (str(error).strip() or repr(error)).splitlines()[-1].strip()
    return answers, errors
