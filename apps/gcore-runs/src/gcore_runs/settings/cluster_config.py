"""Settings of the machines that a run is on: the Ray cluster, and the checkpoints that machines keep of their own."""

from dataclasses import dataclass
from typing import Annotated, Literal

from gcore_runs.settings.bounds import Amount, Checked, above


@dataclass(frozen=True, kw_only=True)
class RayConfig(Checked, section="ray"):
    """The cluster, where runtime is ray. All its nodes see the files of this machine under the same paths."""

    address: str = ""
    """HOST:PORT of its head; empty: what RAY_ADDRESS names, or a new one on this machine, for this run. Its token is
    that of RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""
    cpus_per_process: Amount = 1.0
    """CPUs that each controller, engine and training rank reserves."""
    gpus_per_engine: Amount = 1.0
    """GPUs that each engine, of the policy or a judge, reserves where device is cuda; parts of one may be shared."""
    gpus_per_rank: Amount = 1.0
    """GPUs that each training rank reserves where device is cuda."""
    gpus_per_reward_model: Amount = 1.0
    """GPUs that each controller reserves for reward models that are no engines, such as a classifier or CLIP, where
    device is cuda."""
    elastic: bool = True
    """Where nodes are lost or missing, continue with as many processes as the cluster has capacity for, and grow to the
    numbers of controllers, engines and ranks that are set as nodes join; False: the run ends without that capacity."""
    weight_sync: Literal["full", "delta"] = "full"
    """full: ranks send all new weights. delta: what has changed, where that is less, as in bfloat16 at small learning
    rates; ranks and engines then keep a copy of what they send and have in the host's memory. With actor.lora-rank
    delta sends the adapters alone, after the frozen weights; engines keep these, and ranks keep no copy."""
    env: tuple[str, ...] = ()
    """Names of variables of this command's environment that the processes of a cluster which runs already get, such as
    the key of a reward's service; their values are not written to a log."""
    timeout_s: Annotated[float, above(0, "above 0")] = 600.0
    """Seconds until the cluster has capacity for the processes of a role, and they have started."""


@dataclass(frozen=True, kw_only=True)
class LocalCheckpointsConfig(Checked, section="local_checkpoints"):
    """Checkpoints on the machines after each step, besides those of trainer.save-freq: a rank that dies costs a step.

    Each machine has a copy of the next one's: of several, any one may be lost with its folder.
    """

    folder: str = ""
    """Folder that each machine has of its own, such as one on its disk or in /dev/shm, for two checkpoints at a time;
    $NAME stands for a variable of the rank's environment. Empty: none."""
