from .balancing.balance import (
    StreamingBalancer as StreamingBalancer,
    balance as balance,
    micro_batches as micro_batches,
)
from .cluster import (
    Cluster as Cluster,
    Device as Device,
    Efficiency as Efficiency,
    gather_seconds as gather_seconds,
)
from .costs import (
    EngineCosts as EngineCosts,
    JobCosts as JobCosts,
    SwapCosts as SwapCosts,
    TrainingCosts as TrainingCosts,
)
from .device_map import (
    DeviceMap as DeviceMap,
    RoleSizes as RoleSizes,
    engine_order as engine_order,
    map_devices as map_devices,
)
from .errors import PlacementError as PlacementError
from .forecast import (
    Correction as Correction,
    Job as Job,
    StepTime as StepTime,
    forecast_step as forecast_step,
    predict_step as predict_step,
)
from .ledger import Ledger as Ledger, StepIntervals as StepIntervals, read_spans as read_spans
from .partition.config import DynamicPartitionConfig as DynamicPartitionConfig
from .partition.dynamic_partition import DynamicPartition as DynamicPartition
from .partition.lend_choice import LendChoice as LendChoice
from .partition.lending import LendingRule as LendingRule
from .partition.space import (
    PartitionSpace as PartitionSpace,
    RoleLimits as RoleLimits,
    RoleLoad as RoleLoad,
    engine_load as engine_load,
)
from .partition.strategy_choice import StrategyChoice as StrategyChoice
from .planning.layouts import EngineLayout as EngineLayout, TrainingLayout as TrainingLayout
from .planning.memory import TrainingState as TrainingState, state_bytes as state_bytes
from .planning.one_device import (
    DevicePlan as DevicePlan,
    DeviceSetting as DeviceSetting,
    Resident as Resident,
    plan_device as plan_device,
)
from .planning.planner import Plan as Plan, plan as plan
from .planning.prediction import predict_layout as predict_layout
from .quantities import Lengths as Lengths, TransformerWorkload as TransformerWorkload
from .simulation.ages import PredictedAges as PredictedAges, predict_ages as predict_ages
from .simulation.live import (
    ReplicaRequest as ReplicaRequest,
    RunningLedger as RunningLedger,
    SimulatedReplica as SimulatedReplica,
    blend as blend,
    log_normal as log_normal,
    uniform as uniform,
)
from .simulation.simulator import (
    Comparison as Comparison,
    Simulator as Simulator,
    compare as compare,
)
from .strategies import STRATEGIES as STRATEGIES, Strategy as Strategy
from .workload.diffusion import DiffusionWorkload as DiffusionWorkload
from .workload.model_shape import ModelShape as ModelShape
from .workload.recorded_runs import SampledLengths as SampledLengths
from .workload.traces import (
    Drift as Drift,
    RecordedStep as RecordedStep,
    Trace as Trace,
    TraceRecipe as TraceRecipe,
    recorded_trace as recorded_trace,
)
