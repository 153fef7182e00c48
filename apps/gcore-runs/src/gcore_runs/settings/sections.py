"""Sections of an app's settings, as far as the settings of every run use them."""

from typing import Literal, Protocol


class EngineSection(Protocol):
    """Settings of an engine that runs in several processes."""

    @property
    def num_processes(self) -> int: ...


class JudgeReplicas(EngineSection, Protocol):
    """Settings of a judge's engine."""

    @property
    def tensor_parallel_size(self) -> int: ...


class PolicyReplicas(EngineSection, Protocol):
    """Settings of the policy's engine."""

    @property
    def colocated(self) -> bool | Literal["auto"]:
        """True if trainer and engines take turns on the same devices; auto: see `BaseRLConfig.takes_turns`."""
        ...
