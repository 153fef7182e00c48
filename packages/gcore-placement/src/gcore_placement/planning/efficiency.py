"""The shares of their data sheets that devices reach."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import check_amounts, check_share, refusal


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of their data sheets that devices reach, and the overheads of programs.

    The defaults are common values: Megatron trains at 40 to 50 % of the peak (arXiv 2104.04473 and the tables
    of its repository); engines read memory at about three quarters of its rate. `Correction` corrects the
    predictions by measurements. Every share is above 0 and at most 1.

    Raises:
        PlacementError: a field is out of its bounds.
    """

    training: float = 0.45
    """Share of the peak in training's matrix products."""
    attention: float = 0.45
    """Share of the peak in training's attention, between FlashAttention 2 and 3 on H100 (arXiv 2407.08608)."""
    prefill: float = 0.5
    """Share of the peak in an engine's pass over prompts."""
    decode: float = 0.4
    """Share of the peak in a decoding step, where products and not memory are what limits it."""
    memory: float = 0.75
    """Share of the memory's rate."""
    links: float = 0.7
    """Share of the links' rates."""
    host: float = 0.4
    """Share of the rate to the host's memory."""
    free_memory: float = 0.92
    """Share of a device's memory that may be planned with; the rest is for contexts, buffers and fragmentation."""
    activations: float = 1.25
    """Bytes of activations, over those that the formula counts: transformers' norms, which are not fused, keep more."""
    decode_step_s: float = 0.003
    """Seconds that a decoding step takes in addition to its arithmetic."""
    decode_sequence_s: float = 5e-6
    """Seconds that each running sequence adds to it."""
    all_reduce_s: float = 1e-5
    """Seconds of a sum over devices in addition to its bytes."""
    overlap: float = 1.0
    """Overlap of work that could be done at the same time: reading weights and multiplying, or gathering weights and
    multiplying by others. 1: it takes as long as the longer of the two; 0: as long as both, as on a CPU, whose
    cores do all of it."""
    micro_batch_s: float = 0.02
    """Seconds that a micro-batch takes in addition to its arithmetic."""
    swap_s: float = 1.0
    """Seconds to put an engine to sleep, or to wake it, in addition to its bytes."""

    def together_s(self, one_s: NDArray[np.float64], other_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of two kinds of work that could be done at the same time."""
        return np.maximum(one_s, other_s) + (1 - self.overlap) * np.minimum(one_s, other_s)

    def __post_init__(self) -> None:
        for name in ("training", "attention", "prefill", "decode", "memory", "links", "host", "free_memory"):
            check_share(name, getattr(self, name))
        if not 0 <= self.overlap <= 1:
            raise refusal("overlap", self.overlap, "a number in [0, 1]")
        for name in ("activations", "decode_step_s", "decode_sequence_s", "all_reduce_s", "micro_batch_s", "swap_s"):
            check_amounts(name, getattr(self, name))
