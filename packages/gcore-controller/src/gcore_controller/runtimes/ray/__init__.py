"""The `ray` runtime: every controller is an actor of a Ray cluster, and they talk to each other directly."""

import os

from gcore_controller.errors import MissingExtraError

# Where the program was started by `uv run`, Ray would build its environment anew for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    from gcore_controller.runtimes.ray.connection import check_token, connect
    from gcore_controller.runtimes.ray.controllers import RayControllers, run_ray
    from gcore_controller.runtimes.ray.references import RayReference, put
    from gcore_controller.runtimes.ray.replies import reason_of
    from gcore_controller.runtimes.ray.resources import free_resources
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

__all__ = ["RayControllers", "RayReference", "check_token", "connect", "free_resources", "put", "reason_of", "run_ray"]
