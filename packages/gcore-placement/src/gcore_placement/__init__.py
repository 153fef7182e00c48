"""Where RLHF work should run: what it takes, how to share it out evenly, and a plan for all of a job's roles.

Pure and light: numpy is the only dependency, and nothing here touches a device.
"""

from gcore_placement.balance import balance
from gcore_placement.cluster import Cluster, Device
from gcore_placement.correction import Correction
from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.diffusion_workload import DiffusionWorkload
from gcore_placement.dynamic_partition import DynamicPartition, DynamicPartitionConfig
from gcore_placement.efficiency import Efficiency
from gcore_placement.errors import MissingExtraError, PlacementError
from gcore_placement.job import Job
from gcore_placement.ledger import Ledger, StepIntervals, read_spans
from gcore_placement.lengths import Lengths
from gcore_placement.micro_batch import micro_batches
from gcore_placement.model_shape import ModelShape
from gcore_placement.partition import Partition, PartitionSpace, RoleLimits
from gcore_placement.planning.layouts import TrainingLayout
from gcore_placement.planning.plan import Alternative, EnginePlan, Plan
from gcore_placement.planning.planner import plan
from gcore_placement.planning.step_time import StepTime, predict_step
from gcore_placement.role_load import EngineWork, RoleLoad, engine_load
from gcore_placement.simulation.simulator import Simulator, StrategyRun
from gcore_placement.simulation.step_account import SimulatedStep
from gcore_placement.simulation.trace_recipes import Drift, TraceRecipe
from gcore_placement.simulation.traces import RecordedStep, Trace, recorded_trace
from gcore_placement.strategy_choice import StrategyChoice
from gcore_placement.streaming import StreamingBalancer
from gcore_placement.workload import TransformerWorkload

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
    "StepIntervals",
    "StepTime",
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
