"""Run as a script: for each line, a folder, forks a process that publishes there without end, and answers its pid."""

import asyncio
import os
import signal
import sys
from itertools import count

import torch

from gcore_rollout import WeightPublisher, WeightSubscriber

NUM_TENSORS, NUMEL = 40, 2000
OPTIONS = {"full_every": 3, "keep": 2, "part_bytes": 4096, "max_in_flight": 2}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Of which each version changes a few elements of every tensor."""
    values = {f"w{i}": torch.arange(NUMEL, dtype=torch.float32) * i for i in range(NUM_TENSORS)}
    for tensor in values.values():
        tensor[: 100 + version] += version
    return values


def publish(url: str) -> None:
    publisher = WeightPublisher(url, **OPTIONS)
    there = asyncio.run(WeightSubscriber(url).versions())
    for version in count(max(there, default=0) + 1):
        publisher.publish(weights_of(version).items(), version=version)


def serve() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            try:
                publish(f"file://{line.strip()}")
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    serve()
