"""The load of controllers from large payloads: images and video in addition to tokens."""

from dataclasses import dataclass
from typing import NamedTuple

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


class PayloadLoad(NamedTuple):
    """The busiest controller's seconds to receive a step's payloads and send them on, and the bytes it holds at once.

    `max_over_mean` are its bytes over the mean of all controllers; 1 is even.
    """

    seconds: float
    held_bytes: float
    max_over_mean: float


def payload_load(
    trace: Trace, step: int, *, num_controllers: int, copies: int = 3, host: ControllerHost | None = None
) -> PayloadLoad:
    """Return the load of one step's payloads on controllers that take prompts in turn.

    A payload passes through ``copies`` times: to the policy, to the judge and to training, say.
    """
    check_positive("num_controllers", num_controllers)
    check_positive("copies", copies)
    host = host or ControllerHost()
    payloads = trace.payload_bytes[trace.step_slice(step)]
    shares = np.bincount(np.arange(len(payloads)) % num_controllers, weights=payloads, minlength=num_controllers)
    most, mean = float(shares.max()), float(shares.mean())
    # It comes in once and goes out for each copy; packing and sending overlap.
    rate = min(host.link_bytes_per_s, host.copy_bytes_per_s)
    return PayloadLoad((1 + copies) * most / rate, most, most / mean if mean else 1.0)
