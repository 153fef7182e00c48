"""The runtime on a Ray cluster: controllers, engines and training ranks are actors that call each other directly."""

import os

from gcore_controller.errors import MissingExtraError

# If the program was started by `uv run`, Ray would build its environment again for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    from gcore_controller.runtimes.ray.backend import Handles, PlacementMovedError, RayBackend
    from gcore_controller.runtimes.ray.cluster import CapacityChangedError, RayReference, check_token, connect, put
    from gcore_controller.runtimes.ray.controllers import RayControllers, run_ray
    from gcore_controller.runtimes.ray.role_actors import Role as ActorRole, RoleActors
    from gcore_controller.runtimes.ray.trainer_group import RayTrainerClient, RayTrainerGroup
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

__all__ = [
    "ActorRole",
    "CapacityChangedError",
    "Handles",
    "PlacementMovedError",
    "RayBackend",
    "RayControllers",
    "RayReference",
    "RayTrainerClient",
    "RayTrainerGroup",
    "RoleActors",
    "check_token",
    "connect",
    "put",
    "run_ray",
]
