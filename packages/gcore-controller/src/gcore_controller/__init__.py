"""Who decides in RLHF: SPMD controllers that run the same async program and meet in collectives."""

from gcore_controller.collectives import Collectives
from gcore_controller.context import Context, Program
from gcore_controller.dynamic_sampling import DynamicSampler, Harvest
from gcore_controller.inline import run_inline
from gcore_controller.inline_collectives import InlineCollectives, InlineGroup
from gcore_controller.references import Reference
from gcore_controller.stages import Span, StageTimer, seconds_by_stage
from gcore_controller.virtual_time import VirtualTimeLoop, run_simulated

__all__ = [
    "Collectives",
    "Context",
    "DynamicSampler",
    "Harvest",
    "InlineCollectives",
    "InlineGroup",
    "Program",
    "Reference",
    "Span",
    "StageTimer",
    "VirtualTimeLoop",
    "run_inline",
    "run_simulated",
    "seconds_by_stage",
]
