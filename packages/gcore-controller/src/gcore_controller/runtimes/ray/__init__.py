"""The runtime on a Ray cluster: controllers, engines and training ranks are actors that call each other directly."""

import os

from gcore_controller.errors import make_extra_error

# If the program was started by `uv run`, Ray would build its environment again for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    from gcore_controller.runtimes.ray.actors import (
        ActorRole as ActorRole,
        RoleActors as RoleActors,
    )
    from gcore_controller.runtimes.ray.backend import Handles as Handles, RayBackend as RayBackend
    from gcore_controller.runtimes.ray.cluster import (
        RayReference as RayReference,
        check_token as check_token,
        connect as connect,
        connect_quietly as connect_quietly,
        count_cluster_gpus as count_cluster_gpus,
        put as put,
    )
    from gcore_controller.runtimes.ray.controllers import (
        RayControllers as RayControllers,
        run_ray as run_ray,
    )
    from gcore_controller.runtimes.ray.trainer_group import (
        RayTrainerClient as RayTrainerClient,
        RayTrainerGroup as RayTrainerGroup,
    )
except ImportError as error:
    raise make_extra_error("ray", "ray") from error
