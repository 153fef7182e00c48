"""A Ray cluster on this machine, and the payloads that fit into its memory."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import psutil

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.harness.processes import environment

NEEDS = {"gcore": 3.0, "verl": 6.0, "verl-numpy": 6.0}
"""Peak memory over the payload: objects of this step and the last one; under verl also the serialised copies of
workers and those of the driver, up to four."""

_IN_STORE = 2.0
_SPARE_BYTES = 128 << 20
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If the command was started by `uv run`, Ray would build its environment again for every process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns of four times as many processes; as many start before they are needed.
    "RAY_worker_maximum_startup_concurrency": "8",
}
# verl reserves ten for each worker; nothing here is scheduled by cores.
_NUM_CPUS = 1000


def object_store_bytes(options: ControllerOptions, payload_mb: int) -> int:
    """Return the size of Ray's object store for a payload."""
    if options.object_store_mb:
        return options.object_store_mb << 20
    wanted = int(2.25 * (payload_mb << 20)) + _SPARE_BYTES
    return min(wanted, int(0.45 * psutil.virtual_memory().available))


def lack(contender: str, payload_bytes: int, store_bytes: int) -> str:
    """Return what a payload lacks to fit, or an empty string."""
    if _IN_STORE * payload_bytes > store_bytes:
        return f"{_IN_STORE * payload_bytes / 2**20:,.0f} MB of the object store, which has {store_bytes / 2**20:,.0f}"
    free = psutil.virtual_memory().available
    if NEEDS[contender] * payload_bytes > free:
        return (
            f"about {NEEDS[contender] * payload_bytes / 2**20:,.0f} MB of memory, of which {free / 2**20:,.0f} are free"
        )
    return ""


@contextmanager
def local_cluster(store_bytes: int) -> Generator[None]:
    """Start a new cluster of this machine alone."""
    with environment(**_ENVIRONMENT):
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
