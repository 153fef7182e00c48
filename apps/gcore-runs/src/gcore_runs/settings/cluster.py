"""Settings of the cluster that a run is on, and of which engines generate and which judge."""

from dataclasses import dataclass

from gcore_placement import Strategy
from gcore_runs.errors import UserError, check_at_least, check_finite


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The cluster, where runtime is ray. All its nodes see the files of this machine under the same paths."""

    address: str = ""
    """HOST:PORT of its head; empty: what RAY_ADDRESS names, or a new one on this machine, for this run. Its token
    is taken from RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""
    cpus_per_process: float = 1.0
    """CPUs that each controller, engine and training rank reserves."""
    gpus_per_engine: float = 1.0
    """GPUs that each engine, of the policy or a judge, reserves where device is cuda; parts of one may be shared."""
    gpus_per_rank: float = 1.0
    """GPUs that each training rank reserves where device is cuda."""
    elastic: bool = True
    """Where nodes are lost or missing, continue with as many processes as the cluster has capacity for, and grow to the
    numbers of controllers, engines and ranks that are set as nodes join; False: the run ends without that capacity."""
    timeout_s: float = 600.0
    """Seconds until the cluster has capacity for the processes of a role, and they have started."""

    def __post_init__(self) -> None:
        for name in ("cpus_per_process", "gpus_per_engine", "gpus_per_rank"):
            check_finite(f"ray.{name}", getattr(self, name))
        if not self.timeout_s > 0:
            raise UserError(f"ray.timeout_s is {self.timeout_s}; expected above 0")


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """Division of the engines of a run on ray between the policy and a judge; all ranks train."""

    strategy: Strategy = "split"
    """split: rollout.num-processes engines generate, reward-model.judge.num-processes judge. dynamic: this at first;
    then, between steps, an engine at a time moves from the role that idles to the one that is busy, more at once where
    the load has jumped, as long as that saves more than it costs. colocated: each of rollout.num-processes devices has
    an engine of both, and all generate, then all judge; the engines that wait are asleep. auto: dynamic, or colocated
    where that takes less, swaps included."""
    horizon_steps: int = 20
    """Steps over which a move must save more time than it takes; how long moves take is measured."""

    def __post_init__(self) -> None:
        check_at_least("placement.horizon_steps", self.horizon_steps, 1)
