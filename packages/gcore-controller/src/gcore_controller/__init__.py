"""The control of RLHF: SPMD controllers that run the same async program and meet in collectives."""

import importlib as _importlib
from typing import TYPE_CHECKING

from gcore_controller.collectives import Collectives
from gcore_controller.context import Context, Program
from gcore_controller.devices import DeviceTimers, merge_spans, rank_name
from gcore_controller.dynamic_sampling import DynamicSampler, SampledBatch
from gcore_controller.inline import run_inline
from gcore_controller.inline_collectives import InlineCollectives, InlineGroup
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
from gcore_controller.stages import Span, StageTimer, on_wall_clock, seconds_by_stage
from gcore_controller.virtual_time import VirtualTimeLoop, run_simulated

if TYPE_CHECKING:
    from gcore_controller.prompt_stealing import SharedPrompts
    from gcore_controller.prompts import PromptLoader, ShardedSampler
    from gcore_controller.rlhf.step import RLHFLoop

__all__ = [
    "Collectives",
    "Context",
    "DeviceTimers",
    "DynamicSampler",
    "Generated",
    "Group",
    "InlineCollectives",
    "InlineGroup",
    "Modality",
    "Prepared",
    "Program",
    "PromptLoader",
    "RLHFConfig",
    "RLHFLoop",
    "RLHFRoles",
    "Recorder",
    "Reference",
    "RunStart",
    "SampledBatch",
    "ShardedSampler",
    "SharedPrompts",
    "Span",
    "StageTimer",
    "State",
    "TrainingBatch",
    "UnfinishedGroup",
    "VirtualTimeLoop",
    "Wave",
    "merge_spans",
    "on_wall_clock",
    "rank_name",
    "run_inline",
    "run_simulated",
    "seconds_by_stage",
]

_NEED_TORCHDATA = {
    "PromptLoader": "gcore_controller.prompts",
    "RLHFLoop": "gcore_controller.rlhf.step",
    "ShardedSampler": "gcore_controller.prompts",
    "SharedPrompts": "gcore_controller.prompt_stealing",
}
"""Modules of the names that are imported on first use, because they load torchdata."""


def __getattr__(name: str) -> object:
    if name in _NEED_TORCHDATA:
        return getattr(_importlib.import_module(_NEED_TORCHDATA[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
