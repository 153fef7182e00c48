"""The memory that programs can have: what the machine has free, what its container may still take, and the C heap."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of glibc's mallopt, from malloc.h."""
_KEPT_BYTES = 1 << 29


def keep_free_memory() -> None:
    """Let the C heap of this process keep up to 512 MiB that is freed, where its C library can (glibc); else nothing.

    Passes of a model on the CPU allocate and free the same large tensors again and again. By default most of that goes
    back to the system each time, which clears its pages before it gives them out: a fifth of the time of a small model.
    Models that sleep return it all the same (malloc_trim).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of a machine, and the limit of the container that this process is in."""

    total_bytes: int
    machine_available_bytes: int
    """Memory of the machine that programs can have without swapping."""
    limit_bytes: int | None = None
    """Limit of the container, or of a cgroup above it, that leaves least; None: there is none."""
    used_bytes: int = 0
    """Memory that this cgroup uses, without the file cache that it would give back."""

    @property
    def available_bytes(self) -> int:
        """Memory that this process and others of its container can have."""
        if self.limit_bytes is None:
            return self.machine_available_bytes
        return min(self.machine_available_bytes, max(0, self.limit_bytes - self.used_bytes))


def available_host_bytes() -> float:
    """Return the memory that programs of this container, or else of this machine, can have without swapping."""
    return float(host_memory().available_bytes)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read the memory of the machine, and the limits of cgroups v1 and v2, from the files of Linux under ``root``."""
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    sizes = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines}
    total_bytes = sizes["MemTotal"]
    limits = [(limit, used) for limit, used in _limits(root) if limit < total_bytes]
    limit_bytes, used_bytes = min(limits, key=lambda pair: pair[0] - pair[1], default=(None, 0))
    return HostMemory(
        total_bytes=total_bytes,
        machine_available_bytes=sizes["MemAvailable"],
        limit_bytes=limit_bytes,
        used_bytes=used_bytes,
    )


def _limits(root: Path) -> Iterable[tuple[int, int]]:
    """Yield limit and usage of every cgroup that this process is in and that can be seen: all of them hold."""
    mounted = root / "sys/fs/cgroup"
    try:
        entries = [
            line.split(":", 2)
            for line in (root / "proc/self/cgroup").read_text("utf-8").splitlines()
        ]
    except OSError:
        return
    for _, controllers, path in entries:
        if "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            tops = [mounted / "memory"]
        elif not controllers:
            names = "memory.max", "memory.current", "inactive_file"
            tops = [mounted, mounted / "unified"]
        else:
            continue
        for top in tops:
            cgroup = top / path.strip("/")
            # In a container the path is often that of the host, and the container's own cgroup is the top.
            for folder in dict.fromkeys([cgroup, *cgroup.parents, top]):
                if not folder.is_relative_to(top):
                    continue
                pair = _read_limit(folder, *names)
                if pair is not None:
                    yield pair


def _read_limit(folder: Path, limit: str, usage: str, cache: str) -> tuple[int, int] | None:
    try:
        limit_bytes = int((folder / limit).read_text("ascii"))
        used_bytes = int((folder / usage).read_text("ascii"))
        lines = (folder / "memory.stat").read_text("ascii").splitlines()
    except (OSError, ValueError):
        # Not a folder of this kind, or its limit is "max".
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.split()[0] == cache)
    return limit_bytes, max(0, used_bytes - cached)
