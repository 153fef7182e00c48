"""Settings of the cluster that a run is on."""

import math
from dataclasses import dataclass

from gcore_runs.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """The cluster, where runtime is ray. All its nodes see the files of this machine under the same paths."""

    address: str = ""
    """HOST:PORT of its head; empty: what RAY_ADDRESS names, or a new one on this machine, for this run. Its token
    is taken from RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token."""
    cpus_per_process: float = 1.0
    """That each controller, engine and training rank reserves."""
    gpus_per_engine: float = 1.0
    """That each engine, of the policy or a judge, reserves, where device is cuda; parts of one may be shared."""
    gpus_per_rank: float = 1.0
    """That each training rank reserves, where device is cuda."""
    elastic: bool = True
    """Where nodes are lost or missing, the run goes on in the size that there is room for, and grows to the numbers of
    controllers, engines and ranks that are asked for as nodes join; False: it ends if they find no room."""
    timeout_s: float = 600.0
    """Until there is room for the processes of a role, and they have started."""

    def __post_init__(self) -> None:
        for name in ("cpus_per_process", "gpus_per_engine", "gpus_per_rank"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"ray.{name} is {getattr(self, name)}: a finite number, 0 or more is needed")
        if not self.timeout_s > 0:
            raise UserError(f"ray.timeout_s is {self.timeout_s}: above 0 is needed")
