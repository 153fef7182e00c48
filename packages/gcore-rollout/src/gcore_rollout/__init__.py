"""How RLHF samples are made and scored: generation engines and rewards."""

from gcore_rollout.engine import Engine, EngineStats
from gcore_rollout.types import Completion, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineStats", "Request", "SamplingParams"]
