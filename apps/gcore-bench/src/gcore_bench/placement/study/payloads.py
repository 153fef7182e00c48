"""The load of controllers from large payloads: images and video in addition to tokens."""

from dataclasses import dataclass

import numpy as np

from gcore_placement import Trace
from gcore_placement.errors import check_above_0, check_positive


@dataclass(frozen=True, kw_only=True)
class ControllerHost:
    """The rates and the memory of one controller's host.

    Raises:
        PlacementError: a number is not above 0.
    """

    link_bytes_per_s: float = 12.5e9
    """Bytes per second of its network link, one way: 100 Gb/s."""
    copy_bytes_per_s: float = 2e9
    """Bytes per second at which one process packs and unpacks payloads."""
    memory_bytes: float = 1e12

    def __post_init__(self) -> None:
        for name in ("link_bytes_per_s", "copy_bytes_per_s", "memory_bytes"):
            check_above_0(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class PayloadLoad:
    """The load of a step's payloads on the busiest controller."""

    seconds: float
    """Seconds in which it receives payloads and sends them on."""
    held_bytes: float
    """Bytes that it holds at once."""
    max_over_mean: float
    """Its bytes over the mean of all controllers; 1 is even."""


def payload_load(
    trace: Trace, step: int, *, num_controllers: int, copies: int = 3, host: ControllerHost | None = None
) -> PayloadLoad:
    """Return the load of one step's payloads on controllers that take prompts in turn.

    Args:
        trace: holds the payloads.
        step: index of the step.
        num_controllers: controllers that share the step's prompts.
        copies: how often a payload passes through: to the policy, to the judge and to training, say.
        host: host of each controller.
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
