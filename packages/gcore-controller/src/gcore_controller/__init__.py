"""Run RLHF on SPMD controllers: each runs the same async program, and they meet in collectives."""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_controller.collectives.base import Collectives
    from gcore_controller.collectives.inline import InlineCollectives, InlineGroup
    from gcore_controller.context import Context, Program
    from gcore_controller.devices import DeviceTimers, merge_spans, rank_name
    from gcore_controller.dynamic_sampling import DynamicSampler, SampledBatch
    from gcore_controller.errors import ClusterError, ControllerDiedError, ControllerError, DeadlineError, RankError
    from gcore_controller.prompt_stealing import SharedPrompts
    from gcore_controller.prompts import PromptLoader, ShardedSampler
    from gcore_controller.references import Reference
    from gcore_controller.rlhf.config import RLHFConfig, RunStart, State
    from gcore_controller.rlhf.modality import (
        Generated,
        Group,
        Modality,
        Prepared,
        RLHFRoles,
        TrainingBatch,
        UnfinishedGroup,
        Wave,
    )
    from gcore_controller.rlhf.recorder import Recorder
    from gcore_controller.rlhf.step import RLHFLoop
    from gcore_controller.runtimes.backend import Backend, InlineBackend, Recovery
    from gcore_controller.runtimes.events import Announced, Announcer, RemoteRecorder
    from gcore_controller.runtimes.inline import run_inline
    from gcore_controller.runtimes.inline_trainer import InProcessTrainerGroup, SharedTrainerClient, share_trainer
    from gcore_controller.runtimes.local.trainer_group import LocalTrainerGroup
    from gcore_controller.runtimes.ray import (
        ActorRole,
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
    from gcore_controller.stages import Span, StageTimer, on_wall_clock, seconds_by_stage
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
    "ClusterError",
    "Collectives",
    "Context",
    "ControllerDiedError",
    "ControllerError",
    "DeadlineError",
    "DeviceTimers",
    "DynamicSampler",
    "Generated",
    "Group",
    "Handles",
    "InProcessTrainerGroup",
    "InlineBackend",
    "InlineCollectives",
    "InlineGroup",
    "LocalTrainerGroup",
    "Modality",
    "Prepared",
    "Program",
    "PromptLoader",
    "RLHFConfig",
    "RLHFLoop",
    "RLHFRoles",
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
    "RunStart",
    "SampledBatch",
    "ShardedSampler",
    "SharedPrompts",
    "SharedTrainerClient",
    "SharedTrainerGroup",
    "SizedConfig",
    "Sizes",
    "Span",
    "StageTimer",
    "State",
    "TrainerClient",
    "TrainerGroup",
    "TrainerSpec",
    "TrainerWorker",
    "TrainingBatch",
    "UnfinishedGroup",
    "VirtualTimeLoop",
    "Wave",
    "check_token",
    "connect",
    "deal",
    "merge_spans",
    "on_wall_clock",
    "rank_name",
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
    **dict.fromkeys(["DeviceTimers", "merge_spans", "rank_name"], "devices"),
    **dict.fromkeys(["DynamicSampler", "SampledBatch"], "dynamic_sampling"),
    **dict.fromkeys(["ClusterError", "ControllerDiedError", "ControllerError", "DeadlineError", "RankError"], "errors"),
    "SharedPrompts": "prompt_stealing",
    **dict.fromkeys(["PromptLoader", "ShardedSampler"], "prompts"),
    "Reference": "references",
    **dict.fromkeys(["RLHFConfig", "RunStart", "State"], "rlhf.config"),
    **dict.fromkeys(
        [
            "Generated",
            "Group",
            "Modality",
            "Prepared",
            "RLHFRoles",
            "TrainingBatch",
            "UnfinishedGroup",
            "Wave",
        ],
        "rlhf.modality",
    ),
    "Recorder": "rlhf.recorder",
    "RLHFLoop": "rlhf.step",
    **dict.fromkeys(["Backend", "InlineBackend", "Recovery"], "runtimes.backend"),
    **dict.fromkeys(["Announced", "Announcer", "RemoteRecorder"], "runtimes.events"),
    "run_inline": "runtimes.inline",
    **dict.fromkeys(["InProcessTrainerGroup", "SharedTrainerClient", "share_trainer"], "runtimes.inline_trainer"),
    "LocalTrainerGroup": "runtimes.local.trainer_group",
    **dict.fromkeys(
        [
            "ActorRole",
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
    **dict.fromkeys(["Span", "StageTimer", "on_wall_clock", "seconds_by_stage"], "stages"),
    **dict.fromkeys(
        ["SharedTrainerGroup", "TrainerClient", "TrainerGroup", "TrainerSpec", "TrainerWorker", "deal"], "trainer_group"
    ),
}
"""The module of each name, which is imported when the name is first used."""


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
