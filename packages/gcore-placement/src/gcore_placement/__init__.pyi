from .balancing.balance import balance as balance
from .balancing.micro_batch import micro_batches as micro_batches
from .balancing.streaming import StreamingBalancer as StreamingBalancer
from .cluster import Cluster as Cluster, Device as Device
from .correction import Correction as Correction, Stage as Stage
from .costs import (
    EngineCosts as EngineCosts,
    JobCosts as JobCosts,
    SwapCosts as SwapCosts,
    TrainingCosts as TrainingCosts,
)
from .errors import MissingExtraError as MissingExtraError, PlacementError as PlacementError
from .ledger import Ledger as Ledger, StepIntervals as StepIntervals, read_spans as read_spans
from .partition.dynamic_partition import (
    DynamicPartition as DynamicPartition,
    DynamicPartitionConfig as DynamicPartitionConfig,
)
from .partition.role_load import EngineWork as EngineWork, RoleLoad as RoleLoad, engine_load as engine_load
from .partition.space import Partition as Partition, PartitionSpace as PartitionSpace, RoleLimits as RoleLimits
from .partition.strategy_choice import StrategyChoice as StrategyChoice
from .planning.efficiency import Efficiency as Efficiency
from .planning.layouts import TrainingLayout as TrainingLayout
from .planning.plan import Alternative as Alternative, EnginePlan as EnginePlan, Plan as Plan
from .planning.planner import plan as plan
from .planning.step_time import StepTime as StepTime, predict_step as predict_step
from .simulation.comparison import Comparison as Comparison, compare as compare
from .simulation.least_loaded import LeastLoaded as LeastLoaded
from .simulation.replica import Replica as Replica, ReplicaRequest as ReplicaRequest
from .simulation.running_ledger import RunningLedger as RunningLedger
from .simulation.simulator import Simulator as Simulator, StrategyRun as StrategyRun
from .simulation.step_account import SimulatedStep as SimulatedStep
from .strategies import (
    LiveStrategy as LiveStrategy,
    Strategy as Strategy,
    StrategyTraits as StrategyTraits,
    strategy_traits as strategy_traits,
)
from .workload.diffusion import DiffusionWorkload as DiffusionWorkload
from .workload.draws import blend as blend, log_normal as log_normal, uniform as uniform
from .workload.job import Job as Job
from .workload.lengths import Lengths as Lengths
from .workload.model_shape import ModelShape as ModelShape
from .workload.sampled_lengths import (
    SampledLengths as SampledLengths,
    fit_lengths as fit_lengths,
    step_lengths as step_lengths,
)
from .workload.trace_recipes import Drift as Drift, TraceRecipe as TraceRecipe
from .workload.traces import RecordedStep as RecordedStep, Trace as Trace, recorded_trace as recorded_trace
from .workload.transformer import TransformerWorkload as TransformerWorkload
