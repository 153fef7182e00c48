"""Verdicts on the nodes of a Ray cluster together: alike, on time, connected, and with one file system."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gcore_runs.doctor.checks import Finding, judge
from gcore_runs.doctor.readings import Readings

_MAX_SKEW_S = 0.5
"""Logs of nodes and spans of devices are put in order by their times."""
_GB = 1e9
_HERE = "this command"
_SHARED = ("Python", "ray", "gcore-llm", "gcore-diffusion", "gcore-runs", "gcore-controller")
"""This command exchanges objects of these with the nodes: their versions must be equal."""
_MIN_OBJECT_STORE_BYTES = 2 * _GB


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, as seen from the process that checks it."""

    name: str
    """Address and first characters of Ray's id."""
    readings: Readings = field(default_factory=Readings)
    error: str = ""
    """Error of starting a process there, without which there are no readings."""
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
    all_reduce: Finding | None = None
    """Outcome of its part of the all-reduce; None: it had none."""


def check_nodes(
    nodes: Sequence[Node],
    *,
    expected: int = 0,
    parameters: int = 0,
    ours: Readings | None = None,
) -> list[Finding]:
    """Return the findings about all nodes: the ``expected`` number of them, and like ``ours``, this machine."""
    answering = [node for node in nodes if not node.error]
    findings = chain(
        check_number(nodes, expected=expected),
        check_alike(answering, ours),
        check_gpus_of_ray(answering),
        check_object_stores(answering, parameters=parameters),
        check_clocks(answering),
        check_folders(answering),
        check_connections(answering),
        check_tokens(answering),
        check_all_reduce(answering),
    )
    return list(findings)


def check_number(nodes: Sequence[Node], *, expected: int = 0) -> Iterator[Finding]:
    """Check that all nodes are there, and that a process of ours can be started on each."""
    for node in nodes:
        if node.error:
            advice = "install the same gcore there, in the environment in which ray start runs"
            yield judge("nodes", f"{node.name} starts no process: {node.error}", error=advice)
    observed = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
    error = ""
    if len(nodes) < expected:
        observed += f" of {expected} have joined"
        error = (
            "ray start --address on each of the others; "
            "its output, and logs in /tmp/ray, say why one does not join"
        )
    else:
        observed += f": {', '.join(node.name for node in nodes)}"
    yield judge("nodes", observed, error=error)


def check_alike(nodes: Sequence[Node], ours: Readings | None = None) -> Iterator[Finding]:
    """Check that all nodes, and this command, have the same versions and variables.

    What one process pickles, another has to read; and processes have the variables of their node.
    """
    versions = {node.name: _versions(node.readings) for node in nodes}
    variables = {node.name: node.readings.environment for node in nodes}
    if ours and nodes:
        shared = {name: _versions(ours)[name] for name in _SHARED if name in _versions(ours)}
        versions[_HERE] = {**versions[nodes[0].name], **shared}
        variables[_HERE] = {**variables[nodes[0].name], **ours.environment}
    differences = _differences(versions)
    for name, observed in differences.items():
        advice = f"install the same {name} everywhere: one image, or one environment on a shared file system"
        yield judge("same versions", observed, error=advice)
    if not differences:
        yield judge("same versions", "all nodes have the same")
    for name, observed in _differences(variables).items():
        advice = f"set {name} alike on all nodes before ray start, or send this command's by --ray.env {name}"
        yield judge("variables", observed, warning=advice)


def _differences(values: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the names whose values differ between places, and in words the places of every value."""
    differences: dict[str, str] = {}
    for name in sorted(set[str]().union(*values.values()) - {"CUDA_VISIBLE_DEVICES"}):
        places: dict[str, list[str]] = {}
        for place, entries in values.items():
            places.setdefault(entries.get(name, "missing"), []).append(place)
        if len(places) > 1:
            texts = [f"{value} on {', '.join(where)}" for value, where in places.items()]
            differences[name] = f"{name} is {'; '.join(texts)}"
    return differences


def check_gpus_of_ray(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that Ray gives out the GPUs that each node has."""
    for node in nodes:
        present = len(node.readings.gpus)
        if node.gpus < present:
            observed = f"Ray has {node.gpus:g} of the {present} GPUs of {node.name}"
            advice = "ray start there with --num-gpus, unless it is a head without work for them"
            yield judge("gpus of ray", observed, warning=advice)
    total = sum(node.gpus for node in nodes)
    if total:
        yield judge("gpus of ray", f"{total:g}")


def check_object_stores(nodes: Sequence[Node], *, parameters: int = 0) -> Iterator[Finding]:
    """Check that the object stores hold the weights of the model, and fit into /dev/shm."""
    needed_bytes = 2 * parameters + _MIN_OBJECT_STORE_BYTES
    is_fine = True
    for node in nodes:
        observed = f"{node.object_store_bytes / _GB:.1f} GB on {node.name}"
        error = ""
        warning = ""
        shm_bytes = node.readings.shm_bytes
        if shm_bytes and node.object_store_bytes > shm_bytes:
            observed += f", whose /dev/shm has {shm_bytes / _GB:.1f} GB: it is on disk"
            error = "make /dev/shm larger, or ray start --object-store-memory smaller"
        elif node.object_store_bytes < needed_bytes:
            observed += (
                f", {needed_bytes / _GB:.1f} GB are needed for weights in bfloat16 and samples"
            )
            warning = (
                f"ray start --object-store-memory {int(needed_bytes)}, with a /dev/shm of that size"
            )
            error = warning if parameters else ""
        if error or warning:
            is_fine = False
            yield judge("object store", observed, error=error, warning=warning)
    if is_fine and nodes:
        least = min(node.object_store_bytes for node in nodes)
        yield judge("object store", f"{least / _GB:.1f} GB or more on each node")


def check_clocks(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the clocks of the nodes agree."""
    skewed = [node for node in nodes if abs(node.skew_s) - node.skew_error_s > _MAX_SKEW_S]
    for node in skewed:
        observed = f"that of {node.name} is {abs(node.skew_s):.1f} s {'ahead' if node.skew_s > 0 else 'behind'}"
        advice = "logs and timelines would be in a wrong order: start chrony or another NTP client on all nodes"
        yield judge("clocks", observed, warning=advice)
    if nodes and not skewed:
        error_s = max(abs(node.skew_s) + node.skew_error_s for node in nodes)
        yield judge("clocks", f"all within {max(error_s, 0.001):.3f} s of this one's")


def check_folders(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the folder of runs is the same on all nodes."""
    if not nodes:
        return
    blind = [node.name for node in nodes if not node.sees_folder]
    folder = nodes[0].readings.folder
    if blind:
        observed = f"a file written into {folder} here is not seen on {', '.join(blind)}"
        advice = "mount one file system on all nodes under one path: models, data and runs are read by those paths"
        yield judge("shared folder", observed, error=advice)
    else:
        yield judge("shared folder", f"{folder} is the same on all nodes")


def check_connections(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that processes of every node reach free ports of every other, as training ranks and NCCL do."""
    broken = {node.name: node.unreachable for node in nodes if node.unreachable}
    for name, missed in broken.items():
        observed = f"{name} cannot reach a free port of {', '.join(missed)}"
        advice = "a firewall must let all TCP ports pass between nodes, and nothing from elsewhere"
        yield judge("connections", observed, error=advice)
    if nodes and not broken:
        yield judge("connections", "every node reaches free ports of every other")


def check_tokens(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Check that the cluster requires a token, which its processes show by their mode."""
    tokens = [node.readings.token for node in nodes]
    readable = sorted({token.source for token in tokens if token.readable_by_others})
    observed = "required by the cluster"
    warning = ""
    if any(token.mode != "token" for token in tokens):
        observed = "the cluster requires none: anyone who reaches its ports can run programs on it"
        warning = (
            "(umask 077; ray get-auth-token --generate) on the head, "
            "the same ~/.ray/auth_token on all nodes, ray start again"
        )
    elif readable:
        observed = f"required; {', '.join(readable)} can be read by others"
        warning = f"chmod 600 {' '.join(readable)}"
    if tokens:
        yield judge("ray token", observed, warning=warning)


def check_all_reduce(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Return what nodes know of the all-reduce: its first rank has measured it."""
    for node in nodes:
        if node.all_reduce and node.all_reduce.found:
            yield node.all_reduce


def _versions(readings: Readings) -> Mapping[str, str]:
    return {"Python": readings.python} | readings.versions
