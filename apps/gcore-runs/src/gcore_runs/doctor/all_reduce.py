"""A timed all-reduce over all ranks of one or several machines, each started by torchrun."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from gcore_runs.doctor.checks import Finding, judge

_TIMEOUT_S = 100.0
_NUM_REPEATS = 5
_NUM_BYTES = 64 << 20


def time_all_reduce(num_ranks: int, rendezvous: Sequence[str] = ("--standalone",)) -> Finding:
    """Start this machine's ranks, and return what the first of all ranks has measured; empty: it is elsewhere.

    Each has a GPU, with NCCL, or on machines without GPUs they are on CPU, with gloo.

    Args:
        num_ranks: ranks of this machine.
        rendezvous: options of torchrun by which the ranks of several machines meet.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    command = [*torchrun, f"--nproc-per-node={num_ranks}", "-m", __name__]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        reasons = re.findall(r"\w+Error: .*", str(error.stderr))
        advice = "NCCL_DEBUG=INFO shows why; name the network of the nodes in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        return judge("all-reduce", [*reasons, str(error)][0], error=advice)
    return judge("all-reduce", done.stdout.strip())


def main() -> None:
    """Take part as one rank; the first prints the bandwidth."""
    import torch
    import torch.distributed as dist

    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    num_ranks = dist.get_world_size()
    values = torch.zeros(_NUM_BYTES // 4, device=device)
    times_s: list[float] = []
    for _ in range(_NUM_REPEATS):
        start_s = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # waits for the device
        times_s.append(time.perf_counter() - start_s)
    if dist.get_rank() == 0:
        gb_per_s = 2 * (num_ranks - 1) / num_ranks * _NUM_BYTES / min(times_s) / 1e9
        size = f"{_NUM_BYTES >> 20} MiB in {1e3 * min(times_s):.3g} ms"
        print(f"{num_ranks} ranks on {device}, {size}: bus bandwidth {gb_per_s:.3g} GB/s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
