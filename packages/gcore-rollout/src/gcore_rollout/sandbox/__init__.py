"""Python programs of a policy, run in processes of their own with little to break."""

from gcore_rollout.sandbox.sandbox import Isolation, Sandbox
from gcore_rollout.sandbox.types import Outcome, SandboxLimits, SandboxResult

__all__ = ["Isolation", "Outcome", "Sandbox", "SandboxLimits", "SandboxResult"]
