"""What a job's parts take: the laws that plans, simulations and live decisions share, in seconds.

Predicted from a model's shape and a device's data sheet by the planner, or fitted to the spans of a run.
"""

from dataclasses import dataclass, field, fields

from gcore_placement.errors import check_amounts, check_positive


def _check_seconds(costs: object, *names: str) -> None:
    for name in names:
        check_amounts(name, getattr(costs, name))


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """One replica that generates by continuous batching: of the policy, or of a generative judge.

    A decoding step gives each of B running sequences, which hold C tokens of context together, one token, and takes

        decode_base_s + decode_per_sequence_s * B + decode_per_context_token_s * C

    Prompts are computed between decoding steps. Every field is finite and at least 0, counts at least 1.

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


@dataclass(frozen=True, kw_only=True)
class SwapCosts:
    """What it takes to give devices to another role. Every field is finite and at least 0.

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
    """All that a step of a job takes."""

    policy: EngineCosts
    reward: EngineCosts | None
    """A generative judge; None: scores are made at once, elsewhere."""
    training: TrainingCosts
    swap: SwapCosts = field(default_factory=SwapCosts)
    """Between generation, rewarding and training, where they share devices; and when a replica changes its role."""
