"""Run RLHF on SPMD controllers: each runs the same async program, and they meet in collectives."""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_controller.collectives.base import Collectives
    from gcore_controller.collectives.inline import InlineCollectives, InlineGroup
    from gcore_controller.context import Context, Program
    from gcore_controller.dynamic_sampling import DynamicSampler, Harvest
    from gcore_controller.errors import ClusterError, ControllerDiedError, ControllerError, DeadlineError, RankError
    from gcore_controller.references import Reference
    from gcore_controller.runtimes.backend import Backend, InlineBackend, Recovery
    from gcore_controller.runtimes.events import Announced, Announcer, Recorder, RemoteRecorder
    from gcore_controller.runtimes.inline import run_inline
    from gcore_controller.runtimes.inline_trainer import InProcessTrainerGroup, SharedTrainerClient, share_trainer
    from gcore_controller.runtimes.local.trainer_group import LocalTrainerGroup
    from gcore_controller.runtimes.ray import (
        ActorRole,
        CapacityChangedError,
        Handles,
        RayBackend,
        RayControllers,
        RayTrainerClient,
        RayTrainerGroup,
        RoleActors,
        check_token,
        connect,
        run_ray,
    )
    from gcore_controller.runtimes.simulated import VirtualTimeLoop, run_simulated
    from gcore_controller.runtimes.sizes import SizedConfig, Sizes
    from gcore_controller.stages import Span, StageTimer, seconds_by_stage
    from gcore_controller.trainer_group import (
        SharedTrainerGroup,
        TrainerClient,
        TrainerGroup,
        TrainerSpec,
        TrainerWorker,
        deal,
    )

__all__ = [
    "ActorRole",
    "Announced",
    "Announcer",
    "Backend",
    "CapacityChangedError",
    "ClusterError",
    "Collectives",
    "Context",
    "ControllerDiedError",
    "ControllerError",
    "DeadlineError",
    "DynamicSampler",
    "Handles",
    "Harvest",
    "InProcessTrainerGroup",
    "InlineBackend",
    "InlineCollectives",
    "InlineGroup",
    "LocalTrainerGroup",
    "Program",
    "RankError",
    "RayBackend",
    "RayControllers",
    "RayTrainerClient",
    "RayTrainerGroup",
    "Recorder",
    "Recovery",
    "Reference",
    "RemoteRecorder",
    "RoleActors",
    "SharedTrainerClient",
    "SharedTrainerGroup",
    "SizedConfig",
    "Sizes",
    "Span",
    "StageTimer",
    "TrainerClient",
    "TrainerGroup",
    "TrainerSpec",
    "TrainerWorker",
    "VirtualTimeLoop",
    "check_token",
    "connect",
    "deal",
    "run_inline",
    "run_ray",
    "run_simulated",
    "seconds_by_stage",
    "share_trainer",
]

_MODULE_OF = {
    "Collectives": "collectives.base",
    **dict.fromkeys(["InlineCollectives", "InlineGroup"], "collectives.inline"),
    **dict.fromkeys(["Context", "Program"], "context"),
    **dict.fromkeys(["DynamicSampler", "Harvest"], "dynamic_sampling"),
    **dict.fromkeys(["ClusterError", "ControllerDiedError", "ControllerError", "DeadlineError", "RankError"], "errors"),
    "Reference": "references",
    **dict.fromkeys(["Backend", "InlineBackend", "Recovery"], "runtimes.backend"),
    **dict.fromkeys(["Announced", "Announcer", "Recorder", "RemoteRecorder"], "runtimes.events"),
    "run_inline": "runtimes.inline",
    **dict.fromkeys(["InProcessTrainerGroup", "SharedTrainerClient", "share_trainer"], "runtimes.inline_trainer"),
    "LocalTrainerGroup": "runtimes.local.trainer_group",
    **dict.fromkeys(
        [
            "ActorRole",
            "CapacityChangedError",
            "Handles",
            "RayBackend",
            "RayControllers",
            "RayTrainerClient",
            "RayTrainerGroup",
            "RoleActors",
            "check_token",
            "connect",
            "run_ray",
        ],
        "runtimes.ray",
    ),
    **dict.fromkeys(["VirtualTimeLoop", "run_simulated"], "runtimes.simulated"),
    **dict.fromkeys(["SizedConfig", "Sizes"], "runtimes.sizes"),
    **dict.fromkeys(["Span", "StageTimer", "seconds_by_stage"], "stages"),
    **dict.fromkeys(
        ["SharedTrainerGroup", "TrainerClient", "TrainerGroup", "TrainerSpec", "TrainerWorker", "deal"], "trainer_group"
    ),
}
"""The module of each name, which is imported when the name is first used."""


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
