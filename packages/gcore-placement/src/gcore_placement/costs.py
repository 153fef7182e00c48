"""The cost laws of a job's roles, in seconds, shared by plans, simulations and live decisions.

Laws are the costs of many choices at once: their arrays are [num_laws].
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from gcore_placement.quantities import Amount, CheckedQuantities, Floats, Positive

Number = TypeVar("Number", float, Floats)
Costs = TypeVar("Costs")


def times(costs: Costs, factor: float) -> Costs:
    """Return costs, or laws, with all fields that are seconds times a factor."""
    instance: Any = costs
    scaled = {name: value * factor for name, value in vars(costs).items() if name.endswith("_s")}
    return replace(instance, **scaled)


def _at(laws: object, index: int) -> dict[str, Any]:
    """Return the fields of one law as numbers."""
    fields = dict(vars(laws))
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            fields[name] = value[index].item()
    return fields


@dataclass(frozen=True, kw_only=True)
class EngineCosts(CheckedQuantities):
    """One replica that generates by continuous batching: of the policy, or of a generative judge.

    A decoding step gives each of B running sequences, which hold C tokens of context together, one token, and takes

        decode_base_s + decode_per_sequence_s * B + decode_per_context_token_s * C

    Prompts are computed between decoding steps, and running sequences stand still meanwhile.

    Example:
        >>> costs = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> round(costs.decode_s(1000.0, running=1.0, held=0.0), 3)
        10.1
        >>> round(costs.decode_s(1000.0, running=64.0, held=0.0), 3)
        16.4
    """

    devices_per_replica: Positive
    max_num_seqs: Positive
    """Most sequences that run at once; the others wait."""
    decode_base_s: Amount
    decode_per_sequence_s: Amount
    decode_per_context_token_s: Amount = 0.0
    prefill_per_token_s: Amount = 0.0

    def decode_s(self, steps: Number, running: Number, held: Number) -> Number:
        """Return the seconds of decoding steps during which no sequence starts or ends.

        Each of B = ``running`` sequences, which hold C = ``held`` tokens together at first, gets n = ``steps`` tokens:
        the sum of the law over these steps is

            n * (decode_base_s + decode_per_sequence_s * B + decode_per_context_token_s * (C + B n / 2))
        """
        step_s = self.decode_base_s + self.decode_per_sequence_s * running
        return steps * (step_s + self.decode_per_context_token_s * (held + running * steps / 2))

    def steps_within(self, seconds: float, running: float, held: float) -> float:
        """Return the number of steps that take ``seconds``, a fraction included: the inverse of `decode_s`."""
        step_s = (
            self.decode_base_s
            + self.decode_per_sequence_s * running
            + self.decode_per_context_token_s * held
        )
        growth = 2 * self.decode_per_context_token_s * running * seconds
        return 2 * seconds / (step_s + math.sqrt(step_s * step_s + growth))


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineLaws:
    """`EngineCosts` under several numbers of sequences at once."""

    devices_per_replica: int
    max_num_seqs: Floats
    decode_base_s: Floats
    decode_per_sequence_s: Floats
    decode_per_context_token_s: float
    prefill_per_token_s: float

    def costs(self, index: int) -> EngineCosts:
        """Return the law at an index."""
        return EngineCosts(**{**_at(self, index), "max_num_seqs": int(self.max_num_seqs[index])})


@dataclass(frozen=True, kw_only=True)
class TrainingCosts(CheckedQuantities):
    """Preparation and training, which all devices of the job do together; see `forecast.training_seconds`.

    Example:
        >>> from gcore_placement.forecast import training_seconds
        >>> costs = TrainingCosts(base_s=2.0, per_token_s=1e-4, num_forward_passes=1)
        >>> preparation_s, training_s = training_seconds(costs, tokens=4e6, pairs=0.0, num_devices=8)
        >>> print(f"{preparation_s:.2f} s, {training_s:.2f} s")
        16.67 s, 52.00 s
    """

    base_s: Amount = 0.0
    per_token_s: Amount
    """Device-seconds of a token, forward and backward."""
    per_pair_s: Amount = 0.0
    """Device-seconds of a pair of a query token and a key token."""
    forward_share: Amount = 1 / 3
    num_forward_passes: Amount = 0
    """Passes that only score, before the training: old log-probs, reference, values, teachers."""
    sync_s: Amount = 0.0
    """Seconds of sending the new weights to all policy engines."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLaws:
    """`TrainingCosts` of many layouts."""

    base_s: Floats
    per_token_s: Floats
    per_pair_s: Floats
    forward_share: Floats
    num_forward_passes: float

    def costs(self, index: int, *, sync_s: float, moving_s: float) -> TrainingCosts:
        """Return the costs of one layout; `moving_s`: seconds to bring its state from the host and back."""
        costs = TrainingCosts(**_at(self, index), sync_s=sync_s)
        return replace(costs, base_s=costs.base_s + moving_s)


@dataclass(frozen=True, kw_only=True)
class SwapCosts(CheckedQuantities):
    """The seconds of a device's change of role.

    G-Core (arXiv 2507.22789, section 1) reports 30 to 60 s for a 32B model where roles take turns.

    Example:
        >>> swap = SwapCosts(sleep_s=2.0, wake_s=3.0, load_s=20.0)
        >>> config = DynamicPartitionConfig(
        ...     move_s=swap.load_s - swap.wake_s, move_within_s=swap.sleep_s + swap.load_s
        ... )
        >>> config.move_within_s
        22.0
    """

    sleep_s: Amount = 0.0
    """Seconds of putting a replica to sleep, which frees its memory."""
    wake_s: Amount = 0.0
    """Seconds of waking a replica with its weights in host memory."""
    load_s: Amount = 0.0
    """Seconds of starting a replica's new role on its device: of waking the engine of that role, where the host memory
    holds those of all roles, or else of loading its weights, from a peer or from disk."""


@dataclass(frozen=True, kw_only=True)
class JobCosts:
    """The costs of all parts of a step.

    Example:
        >>> engine = EngineCosts(devices_per_replica=1, max_num_seqs=64, decode_base_s=0.01, decode_per_sequence_s=1e-4)
        >>> costs = JobCosts(policy=engine, reward=None, training=TrainingCosts(per_token_s=1e-4))
        >>> correction = Correction(min_count=1)
        >>> correction.observe("generation", predicted_s=20.0, measured_s=30.0)
        >>> round(correction.correct(costs).policy.decode_base_s, 4)
        0.015
    """

    policy: EngineCosts
    reward: EngineCosts | None
    """A generative judge; None: scores take no time."""
    training: TrainingCosts
    swap: SwapCosts = field(default_factory=SwapCosts)
    """Seconds of swaps between roles that share devices, and of replicas that change their role."""
