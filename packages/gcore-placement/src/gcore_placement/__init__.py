"""Placement of RLHF work: what it costs, how to divide it evenly, and a plan for all roles of a job.

Pure and light: numpy is the only dependency, and nothing here touches a device. Names are imported when they are first
used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gcore_placement.balancing.balance import balance
    from gcore_placement.balancing.micro_batch import micro_batches
    from gcore_placement.balancing.streaming import StreamingBalancer
    from gcore_placement.cluster import Cluster, Device
    from gcore_placement.correction import Correction, Stage
    from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
    from gcore_placement.errors import MissingExtraError, PlacementError
    from gcore_placement.ledger import Ledger, StepIntervals, read_spans
    from gcore_placement.partition.dynamic_partition import DynamicPartition, DynamicPartitionConfig
    from gcore_placement.partition.role_load import EngineWork, RoleLoad, engine_load
    from gcore_placement.partition.space import Partition, PartitionSpace, RoleLimits
    from gcore_placement.partition.strategy_choice import StrategyChoice
    from gcore_placement.planning.efficiency import Efficiency
    from gcore_placement.planning.layouts import TrainingLayout
    from gcore_placement.planning.plan import Alternative, EnginePlan, Plan
    from gcore_placement.planning.planner import plan
    from gcore_placement.planning.step_time import StepTime, Strategy, predict_step
    from gcore_placement.simulation.simulator import Simulator, StrategyRun
    from gcore_placement.simulation.step_account import SimulatedStep
    from gcore_placement.workload.diffusion import DiffusionWorkload
    from gcore_placement.workload.job import Job
    from gcore_placement.workload.lengths import Lengths
    from gcore_placement.workload.model_shape import ModelShape
    from gcore_placement.workload.trace_recipes import Drift, TraceRecipe
    from gcore_placement.workload.traces import RecordedStep, Trace, recorded_trace
    from gcore_placement.workload.transformer import TransformerWorkload

__all__ = [
    "Alternative",
    "Cluster",
    "Correction",
    "Device",
    "DiffusionWorkload",
    "Drift",
    "DynamicPartition",
    "DynamicPartitionConfig",
    "Efficiency",
    "EngineCosts",
    "EnginePlan",
    "EngineWork",
    "Job",
    "JobCosts",
    "Ledger",
    "Lengths",
    "MissingExtraError",
    "ModelShape",
    "Partition",
    "PartitionSpace",
    "PlacementError",
    "Plan",
    "RecordedStep",
    "RoleLimits",
    "RoleLoad",
    "SimulatedStep",
    "Simulator",
    "Stage",
    "StepIntervals",
    "StepTime",
    "Strategy",
    "StrategyChoice",
    "StrategyRun",
    "StreamingBalancer",
    "SwapCosts",
    "Trace",
    "TraceRecipe",
    "TrainingCosts",
    "TrainingLayout",
    "TransformerWorkload",
    "balance",
    "engine_load",
    "micro_batches",
    "plan",
    "predict_step",
    "read_spans",
    "recorded_trace",
]

_MODULES = {
    "balancing.balance": "balance",
    "balancing.micro_batch": "micro_batches",
    "balancing.streaming": "StreamingBalancer",
    "cluster": "Cluster Device",
    "correction": "Correction Stage",
    "costs": "EngineCosts JobCosts SwapCosts TrainingCosts",
    "errors": "MissingExtraError PlacementError",
    "ledger": "Ledger StepIntervals read_spans",
    "partition.dynamic_partition": "DynamicPartition DynamicPartitionConfig",
    "partition.role_load": "EngineWork RoleLoad engine_load",
    "partition.space": "Partition PartitionSpace RoleLimits",
    "partition.strategy_choice": "StrategyChoice",
    "planning.efficiency": "Efficiency",
    "planning.layouts": "TrainingLayout",
    "planning.plan": "Alternative EnginePlan Plan",
    "planning.planner": "plan",
    "planning.step_time": "StepTime Strategy predict_step",
    "simulation.simulator": "Simulator StrategyRun",
    "simulation.step_account": "SimulatedStep",
    "workload.diffusion": "DiffusionWorkload",
    "workload.job": "Job",
    "workload.lengths": "Lengths",
    "workload.model_shape": "ModelShape",
    "workload.trace_recipes": "Drift TraceRecipe",
    "workload.traces": "RecordedStep Trace recorded_trace",
    "workload.transformer": "TransformerWorkload",
}
"""Exported names by module; nothing is imported before it is asked for."""

_MODULE_OF = {_name: f"{__name__}.{_module}" for _module, _names in _MODULES.items() for _name in _names.split()}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
