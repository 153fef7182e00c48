"""Verdicts on the nodes of a Ray cluster together: alike, on time, connected, and with one file system."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from gcore_runs.doctor.checks import Finding
from gcore_runs.doctor.readings import Readings

_MAX_SKEW_S = 0.5
"""Logs of nodes and spans of devices are put in order by their times."""
_GB = 1e9
_MIN_OBJECT_STORE_BYTES = 2 * _GB


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, as seen from the process that checks it."""

    name: str
    """Address and first characters of Ray's id."""
    readings: Readings | None = None
    """None: no process could be started there."""
    error: str = ""
    """Error of starting a process there."""
    skew_s: float = 0.0
    """Its clock minus ours."""
    skew_error_s: float = 0.0
    """Half of the time that the question took: the skew is known no better."""
    sees_folder: bool = True
    """Whether it found the file that we have just written into the folder of runs."""
    unreachable: Sequence[str] = ()
    """Names of nodes on which it could not reach a port."""
    object_store_bytes: int = 0
    gpus: float = 0.0
    """GPUs that Ray gives to processes there."""


def check_nodes(
    nodes: Sequence[Node], *, expected: int = 0, parameters: int = 0, ours: str = ""
) -> list[Finding]:
    """Return the findings about all nodes: the ``expected`` number of them, with ``ours`` as the version of Python."""
    answering = [node for node in nodes if node.readings is not None]
    findings = chain(
        check_number(nodes, expected=expected),
        check_alike(answering, ours=ours),
        check_gpus_of_ray(answering),
        check_object_stores(answering, parameters=parameters),
        check_clocks(answering),
        check_folders(answering),
        check_connections(answering),
        check_tokens(answering),
    )
    return list(findings)


def check_number(nodes: Sequence[Node], *, expected: int = 0) -> Iterator[Finding]:
    """Check that all nodes are there, and that a process of ours can be started on each."""
    for node in nodes:
        if node.readings is None:
            advice = "install the same gcore there, in the environment in which ray start runs"
            observed = f"{node.name} starts no process: {node.error}"
            yield Finding(check="nodes", verdict="error", found=observed, advice=advice)
    observed = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    if len(nodes) < expected:
        advice = (
            "ray start --address on each of the others; "
            "its output, and logs in /tmp/ray, say why one does not join"
        )
        yield Finding(
            check="nodes",
            verdict="error",
            found=f"{observed} of {expected} have joined",
            advice=advice,
        )
    else:
        yield Finding(
            check="nodes",
            verdict="ok",
            found=f"{observed}: {', '.join(node.name for node in nodes)}",
        )


def check_alike(nodes: Sequence[Node], *, ours: str = "") -> Iterator[Finding]:
    """Check that all nodes have the same versions: what one process pickles, another has to read."""
    names = set[str]()
    for node in nodes:
        names.update(_versions(node))
    different = False
    for name in sorted(names):
        nodes_by_version: dict[str, list[str]] = {}
        for node in nodes:
            version = _versions(node).get(name, "not installed")
            nodes_by_version.setdefault(version, []).append(node.name)
        if len(nodes_by_version) > 1:
            different = True
            text = "; ".join(
                f"{version} on {', '.join(where)}" for version, where in nodes_by_version.items()
            )
            advice = f"install the same {name} on all nodes: one image, or one environment on a shared file system"
            yield Finding(
                check="same versions", verdict="error", found=f"{name} is {text}", advice=advice
            )
    if ours and any(
        _versions(node)["Python"].split(".")[:2] != ours.split(".")[:2] for node in nodes
    ):
        advice = "start this command with the environment of the nodes"
        yield Finding(
            check="same versions", verdict="error", found=f"Python is {ours} here", advice=advice
        )
    elif not different:
        yield Finding(check="same versions", verdict="ok", found="all nodes have the same")


def check_gpus_of_ray(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that Ray gives out the GPUs that each node has."""
    has_gpus = False
    for node in nodes:
        present = len(node.readings.gpus) if node.readings else 0
        has_gpus = has_gpus or bool(present)
        if present and node.gpus < present:
            observed = f"Ray has {node.gpus:g} of the {present} GPUs of {node.name}"
            advice = "ray start there with --num-gpus, unless it is a head without work for them"
            yield Finding(check="gpus of ray", verdict="warning", found=observed, advice=advice)
    if has_gpus:
        yield Finding(
            check="gpus of ray", verdict="ok", found=f"{sum(node.gpus for node in nodes):g}"
        )


def check_object_stores(nodes: Sequence[Node], *, parameters: int = 0) -> Iterator[Finding]:
    """Check that the object stores hold the weights of the model, and fit into /dev/shm."""
    needed_bytes = 2 * parameters + _MIN_OBJECT_STORE_BYTES
    is_fine = True
    for node in nodes:
        size = node.object_store_bytes
        if node.readings is None:
            continue
        shm_bytes = node.readings.shm_bytes
        if shm_bytes and size > shm_bytes:
            is_fine = False
            observed = f"{size / _GB:.1f} GB on {node.name}, whose /dev/shm has {shm_bytes / _GB:.1f} GB: it is on disk"
            advice = "make /dev/shm larger, or ray start --object-store-memory smaller"
            yield Finding(check="object store", verdict="error", found=observed, advice=advice)
        elif size < needed_bytes:
            is_fine = False
            what = (
                f"the weights ({2 * parameters / _GB:.1f} GB in bfloat16) and samples"
                if parameters
                else "samples"
            )
            observed = f"{size / _GB:.1f} GB on {node.name}, {needed_bytes / _GB:.1f} GB are needed for {what}"
            advice = (
                f"ray start --object-store-memory {int(needed_bytes)}, with a /dev/shm of that size"
            )
            verdict = "error" if parameters else "warning"
            yield Finding(check="object store", verdict=verdict, found=observed, advice=advice)
    if is_fine and nodes:
        least = min(node.object_store_bytes for node in nodes)
        yield Finding(
            check="object store", verdict="ok", found=f"{least / _GB:.1f} GB or more on each node"
        )


def check_clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the clocks of the nodes agree."""
    skewed = [node for node in nodes if abs(node.skew_s) - node.skew_error_s > _MAX_SKEW_S]
    for node in skewed:
        observed = f"that of {node.name} is {abs(node.skew_s):.1f} s {'ahead' if node.skew_s > 0 else 'behind'}"
        advice = "logs and timelines would be in a wrong order: start chrony or another NTP client on all nodes"
        yield Finding(check="clocks", verdict="warning", found=observed, advice=advice)
    if nodes and not skewed:
        error_s = max(abs(node.skew_s) + node.skew_error_s for node in nodes)
        yield Finding(
            check="clocks",
            verdict="ok",
            found=f"all within {max(error_s, 0.001):.3f} s of this one's",
        )


def check_folders(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the folder of runs is the same on all nodes."""
    blind = [node.name for node in nodes if not node.sees_folder]
    folder = next((node.readings.folder for node in nodes if node.readings), "")
    if blind:
        observed = f"a file written into {folder} here is not seen on {', '.join(blind)}"
        advice = "mount one file system on all nodes under one path: models, data and runs are read by those paths"
        yield Finding(check="shared folder", verdict="error", found=observed, advice=advice)
    elif nodes:
        yield Finding(
            check="shared folder", verdict="ok", found=f"{folder} is the same on all nodes"
        )


def check_connections(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that processes of every node reach free ports of every other, as training ranks and NCCL do."""
    broken = {node.name: node.unreachable for node in nodes if node.unreachable}
    for name, missed in broken.items():
        observed = f"{name} cannot reach a free port of {', '.join(missed)}"
        advice = "a firewall must let all TCP ports pass between nodes, and nothing from elsewhere"
        yield Finding(check="connections", verdict="error", found=observed, advice=advice)
    if nodes and not broken:
        yield Finding(
            check="connections", verdict="ok", found="every node reaches free ports of every other"
        )


def check_tokens(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the cluster requires a token, which its processes show by their mode."""
    open_nodes = [
        node.name for node in nodes if node.readings and node.readings.token.mode != "token"
    ]
    if open_nodes:
        observed = "the cluster requires none: anyone who reaches its ports can run programs on it"
        make = "(umask 077; ray get-auth-token --generate) on the head"
        advice = f"{make}, the same ~/.ray/auth_token on all nodes, ray start again"
        yield Finding(check="ray token", verdict="warning", found=observed, advice=advice)
        return
    readable = sorted(
        {
            n.readings.token.source
            for n in nodes
            if n.readings and n.readings.token.readable_by_others
        }
    )
    if readable:
        observed = f"required; {', '.join(readable)} can be read by others"
        advice = f"chmod 600 {' '.join(readable)}"
        yield Finding(check="ray token", verdict="warning", found=observed, advice=advice)
    elif nodes:
        yield Finding(check="ray token", verdict="ok", found="required by the cluster")


def _versions(node: Node) -> Mapping[str, str]:
    assert node.readings is not None
    return {"Python": node.readings.python} | node.readings.versions
