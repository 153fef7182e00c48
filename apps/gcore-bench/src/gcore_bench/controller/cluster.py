"""The Ray cluster of this machine alone that a payload is measured in."""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from gcore_bench.harness.processes import environment

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # If the command was started by `uv run`, Ray would build its environment again for every process.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray warns of four times as many processes; as many start before they are needed.
    "RAY_worker_maximum_startup_concurrency": "8",
}


@contextmanager
def local_cluster(store_bytes: int) -> Generator[Any]:
    """Start a new Ray cluster of this machine alone, and yield Ray."""
    with environment(**_ENVIRONMENT):
        import ray

        # verl reserves ten cores for each worker; nothing here is scheduled by cores.
        options: dict[str, Any] = {"num_cpus": 1000, "object_store_memory": store_bytes, "include_dashboard": False}
        with ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options):
            yield ray
