"""Run RLHF on SPMD controllers: each runs the same async program, and they meet in collectives."""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_controller.collectives.base import Collectives
    from gcore_controller.collectives.inline import InlineCollectives, InlineGroup
    from gcore_controller.context import Context, Program
    from gcore_controller.dynamic_sampling import DynamicSampler, Harvest
    from gcore_controller.errors import ClusterError, ControllerDiedError, ControllerError, DeadlineError
    from gcore_controller.references import Reference
    from gcore_controller.runtimes.inline import run_inline
    from gcore_controller.runtimes.ray import RayControllers, run_ray
    from gcore_controller.runtimes.simulated import VirtualTimeLoop, run_simulated
    from gcore_controller.stages import Span, StageTimer, seconds_by_stage

__all__ = [
    "ClusterError",
    "Collectives",
    "Context",
    "ControllerDiedError",
    "ControllerError",
    "DeadlineError",
    "DynamicSampler",
    "Harvest",
    "InlineCollectives",
    "InlineGroup",
    "Program",
    "RayControllers",
    "Reference",
    "Span",
    "StageTimer",
    "VirtualTimeLoop",
    "run_inline",
    "run_ray",
    "run_simulated",
    "seconds_by_stage",
]

_MODULE_OF = {
    "Collectives": "collectives.base",
    **dict.fromkeys(["InlineCollectives", "InlineGroup"], "collectives.inline"),
    **dict.fromkeys(["Context", "Program"], "context"),
    **dict.fromkeys(["DynamicSampler", "Harvest"], "dynamic_sampling"),
    **dict.fromkeys(["ClusterError", "ControllerDiedError", "ControllerError", "DeadlineError"], "errors"),
    "Reference": "references",
    "run_inline": "runtimes.inline",
    **dict.fromkeys(["RayControllers", "run_ray"], "runtimes.ray"),
    **dict.fromkeys(["VirtualTimeLoop", "run_simulated"], "runtimes.simulated"),
    **dict.fromkeys(["Span", "StageTimer", "seconds_by_stage"], "stages"),
}
"""The module of each name, which is imported when the name is first used."""


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
