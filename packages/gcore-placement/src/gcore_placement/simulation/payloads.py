"""How large payloads limit controllers: images and video beside the tokens of prompts and samples."""

from dataclasses import dataclass

import numpy as np

from gcore_placement.errors import check_above_0, check_positive
from gcore_placement.workload.traces import Trace


@dataclass(frozen=True, kw_only=True)
class ControllerHost:
    """What one controller's host can take.

    Raises:
        PlacementError: a number is not above 0.
    """

    link_bytes_per_s: float = 12.5e9
    """Of its network link, one way: 100 Gb/s."""
    copy_bytes_per_s: float = 2e9
    """At which one process packs and unpacks payloads."""
    memory_bytes: float = 1e12

    def __post_init__(self) -> None:
        for name in ("link_bytes_per_s", "copy_bytes_per_s", "memory_bytes"):
            check_above_0(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PayloadLoad:
    """What a step's payloads are to the busiest of its controllers."""

    seconds: float
    """In which it receives and hands on what passes through it."""
    held_bytes: float
    """That it holds at once."""
    max_over_mean: float
    """Its bytes over the mean of controllers: 1 is even."""


def payload_load(
    trace: Trace, step: int, *, num_controllers: int, copies: int = 3, host: ControllerHost | None = None
) -> PayloadLoad:
    """One step's payloads through controllers that take prompts in turns.

    Args:
        trace: whose payloads they are.
        step: of the trace.
        num_controllers: that share the step's prompts; 1 is a single controller.
        copies: how often a payload passes through: to the policy, to the judge and to training, say.
        host: of each controller.
    """
    check_positive("num_controllers", num_controllers)
    check_positive("copies", copies)
    host = host or ControllerHost()
    payloads = trace.payload_bytes[trace.step_slice(step)]
    shares = np.bincount(np.arange(len(payloads)) % num_controllers, weights=payloads, minlength=num_controllers)
    most, mean = float(shares.max()), float(shares.mean())
    # It comes in once and goes out for each copy; packing and sending overlap.
    rate = min(host.link_bytes_per_s, host.copy_bytes_per_s)
    return PayloadLoad(seconds=(1 + copies) * most / rate, held_bytes=most, max_over_mean=most / mean if mean else 1.0)
