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
    from gcore_placement.planning.step_time import StepTime, predict_step
    from gcore_placement.simulation.comparison import Comparison, compare
    from gcore_placement.simulation.least_loaded import LeastLoaded
    from gcore_placement.simulation.replica import Replica, ReplicaRequest
    from gcore_placement.simulation.running_ledger import RunningLedger
    from gcore_placement.simulation.simulator import Simulator, StrategyRun
    from gcore_placement.simulation.step_account import SimulatedStep
    from gcore_placement.strategies import LiveStrategy, Strategy, StrategyTraits, strategy_traits
    from gcore_placement.workload.diffusion import DiffusionWorkload
    from gcore_placement.workload.draws import blend, log_normal, uniform
    from gcore_placement.workload.job import Job
    from gcore_placement.workload.lengths import Lengths
    from gcore_placement.workload.model_shape import ModelShape
    from gcore_placement.workload.sampled_lengths import SampledLengths, fit_lengths, step_lengths
    from gcore_placement.workload.trace_recipes import Drift, TraceRecipe
    from gcore_placement.workload.traces import RecordedStep, Trace, recorded_trace
    from gcore_placement.workload.transformer import TransformerWorkload

__all__ = [
    "Alternative",
    "Cluster",
    "Comparison",
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
    "LeastLoaded",
    "Ledger",
    "Lengths",
    "LiveStrategy",
    "MissingExtraError",
    "ModelShape",
    "Partition",
    "PartitionSpace",
    "PlacementError",
    "Plan",
    "RecordedStep",
    "Replica",
    "ReplicaRequest",
    "RoleLimits",
    "RoleLoad",
    "RunningLedger",
    "SampledLengths",
    "SimulatedStep",
    "Simulator",
    "Stage",
    "StepIntervals",
    "StepTime",
    "Strategy",
    "StrategyChoice",
    "StrategyRun",
    "StrategyTraits",
    "StreamingBalancer",
    "SwapCosts",
    "Trace",
    "TraceRecipe",
    "TrainingCosts",
    "TrainingLayout",
    "TransformerWorkload",
    "balance",
    "blend",
    "compare",
    "engine_load",
    "fit_lengths",
    "log_normal",
    "micro_batches",
    "plan",
    "predict_step",
    "read_spans",
    "recorded_trace",
    "step_lengths",
    "strategy_traits",
    "uniform",
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
    "planning.step_time": "StepTime predict_step",
    "simulation.comparison": "Comparison compare",
    "simulation.least_loaded": "LeastLoaded",
    "simulation.replica": "Replica ReplicaRequest",
    "simulation.running_ledger": "RunningLedger",
    "simulation.simulator": "Simulator StrategyRun",
    "simulation.step_account": "SimulatedStep",
    "strategies": "LiveStrategy Strategy StrategyTraits strategy_traits",
    "workload.diffusion": "DiffusionWorkload",
    "workload.draws": "blend log_normal uniform",
    "workload.job": "Job",
    "workload.lengths": "Lengths",
    "workload.model_shape": "ModelShape",
    "workload.sampled_lengths": "SampledLengths fit_lengths step_lengths",
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
