"""A Ray cluster on this machine, and what fits into its memory."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.environment import QUIET

NEEDS = {"gcore": 3.0, "verl": 6.0, "verl-numpy": 6.0}
"""Most memory at once over the payload: objects of this step and the last one; under verl, besides, what workers
serialise and what the driver holds, which are up to four copies."""

_IN_STORE = 2.0
_SPARE_BYTES = 128 << 20
_ENVIRONMENT = {
    **QUIET,
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Where the command was started by `uv run`, Ray would build its environment anew for every process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # At four times as many processes Ray begins to warn of them; as many are made before they are needed.
    "RAY_worker_maximum_startup_concurrency": "8",
}
# verl reserves ten for a worker; nothing here is scheduled by its need of a core.
_NUM_CPUS = 1000


def object_store_bytes(options: ControllerOptions, payload_mb: int) -> int:
    """Size of Ray's object store for a payload."""
    if options.object_store_mb:
        return options.object_store_mb << 20
    wanted = int(2.25 * (payload_mb << 20)) + _SPARE_BYTES
    return min(wanted, int(0.45 * psutil.virtual_memory().available))


def lack(contender: str, payload_bytes: int, store_bytes: int) -> str:
    """Why a payload does not fit, or nothing."""
    if _IN_STORE * payload_bytes > store_bytes:
        return f"{_IN_STORE * payload_bytes / 2**20:,.0f} MB of the object store, which has {store_bytes / 2**20:,.0f}"
    free = psutil.virtual_memory().available
    if NEEDS[contender] * payload_bytes > free:
        return (
            f"about {NEEDS[contender] * payload_bytes / 2**20:,.0f} MB of memory, of which {free / 2**20:,.0f} are free"
        )
    return ""


@contextmanager
def quiet_stderr(log: Path) -> Generator[None]:
    """What Ray's processes say goes to a file."""
    stderr = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


@contextmanager
def local_cluster(store_bytes: int) -> Generator[None]:
    """A cluster of this machine alone, whatever others there are."""
    before = os.environ.copy()
    os.environ.update(_ENVIRONMENT)
    import ray

    ray.init(
        address="local",
        num_cpus=_NUM_CPUS,
        object_store_memory=store_bytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
