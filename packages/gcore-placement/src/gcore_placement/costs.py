"""The cost laws of a job's roles, in seconds, shared by plans, simulations and live decisions.

The planner predicts them from a model's shape and a device's data sheet; a run's timings give them by a fit.
"""

from dataclasses import dataclass, field, fields
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from gcore_placement.errors import check_amounts, check_positive

Number = TypeVar("Number", float, NDArray[np.float64])


def _check_seconds(costs: object, *names: str) -> None:
    for name in names:
        check_amounts(name, getattr(costs, name))


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """One replica that generates by continuous batching: of the policy, or of a generative judge.

    A decoding step gives each of B running sequences, which hold C tokens of context together, one token, and takes

        decode_base_s + decode_per_sequence_s * B + decode_per_context_token_s * C

    Prompts are computed between decoding steps, and running sequences stand still meanwhile. Every field is finite and
    at least 0, counts at least 1.

    Raises:
        PlacementError: a field is out of these bounds.
    """

    devices_per_replica: int
    max_num_seqs: int
    """Most sequences that run at once; the others wait."""
    decode_base_s: float
    decode_per_sequence_s: float
    decode_per_context_token_s: float = 0.0
    prefill_per_token_s: float = 0.0

    def __post_init__(self) -> None:
        check_positive("devices_per_replica", self.devices_per_replica)
        check_positive("max_num_seqs", self.max_num_seqs)
        _check_seconds(self, *(f.name for f in fields(self) if f.name.endswith("_s")))

    def decode_s(self, steps: Number, running: Number, held: Number) -> Number:
        """Return the seconds of decoding steps during which no sequence starts or ends.

        Each of B = ``running`` sequences, which hold C = ``held`` tokens together at first, gets n = ``steps`` tokens:
        the sum of the law over these steps is

            n * (decode_base_s + decode_per_sequence_s * B + decode_per_context_token_s * (C + B n / 2))
        """
        step_s = self.decode_base_s + self.decode_per_sequence_s * running
        return steps * (step_s + self.decode_per_context_token_s * (held + running * steps / 2))

    def steps_within(self, seconds: Number, running: Number, held: Number) -> Number:
        """Return the number of steps that take ``seconds``, a fraction included: the inverse of `decode_s`."""
        step_s = self.decode_base_s + self.decode_per_sequence_s * running + self.decode_per_context_token_s * held
        growth = 2 * self.decode_per_context_token_s * running * seconds
        return cast("Number", 2 * seconds / (step_s + np.sqrt(step_s * step_s + growth)))


@dataclass(frozen=True, kw_only=True)
class TrainingCosts:
    """Preparation and training, which all devices of the job do together.

    A step over T tokens with A attended pairs takes, on each of D devices whose work is even,

        base_s + (per_token_s * T + per_pair_s * A) / D

    and a pass that only scores takes `forward_share` of the second term. Every field is finite and at least 0.

    Raises:
        PlacementError: a field is out of these bounds.
    """

    base_s: float = 0.0
    per_token_s: float
    """Device-seconds of a token, forward and backward."""
    per_pair_s: float = 0.0
    """Device-seconds of a query token and a key token that it attends to."""
    forward_share: float = 1 / 3
    num_forward_passes: int = 0
    """Passes that only score, before the training: old log-probs, reference, values."""
    sync_s: float = 0.0
    """Seconds in which the new weights reach all policy engines."""

    def __post_init__(self) -> None:
        _check_seconds(self, *(f.name for f in fields(self)))

    def seconds(self, tokens: float, pairs: float, num_devices: int) -> tuple[float, float]:
        """Return the seconds of preparation and of training for a step of so many tokens and attended pairs."""
        pass_s = (self.per_token_s * tokens + self.per_pair_s * pairs) / num_devices
        return self.num_forward_passes * self.forward_share * pass_s, self.base_s + pass_s


@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """The seconds in which devices change their role. Every field is finite and at least 0.

    G-Core (arXiv 2507.22789, section 1) reports 30 to 60 s for a 32B model where roles take turns.

    Raises:
        PlacementError: a field is out of these bounds.
    """

    sleep_s: float = 0.0
    """Seconds in which a replica gives its memory up."""
    wake_s: float = 0.0
    """Seconds until a replica that slept, its weights in host memory, serves again."""
    load_s: float = 0.0
    """Seconds in which a device that never held the role's weights gets them, from a peer or from disk."""

    def __post_init__(self) -> None:
        _check_seconds(self, *(f.name for f in fields(self)))


@dataclass(frozen=True, kw_only=True)
class JobCosts:
    """The costs of all parts of a step."""

    policy: EngineCosts
    reward: EngineCosts | None
    """A generative judge; None: scores are made at once, elsewhere."""
    training: TrainingCosts
    swap: SwapCosts = field(default_factory=SwapCosts)
    """Between generation, rewarding and training, where they share devices; and when a replica changes its role."""
