"""Jobs and traces to compare strategies on: plausible numbers, none of them measured.

Engines are of H100 by their data sheet: weights and keys and values are read at 2.4 TB/s a device, products run at 40 %
of 990 TFLOP/s in decoding, 50 % over prompts and 40 % in training; 3 ms of a decoding step are neither. To sleep and to
wake takes a 32B model 35 s, of the 30 to 60 s that G-Core (arXiv 2507.22789, section 1) reports.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.errors import refusal
from gcore_placement.partition import PartitionSpace, RoleLimits
from gcore_placement.simulation.simulator import Simulator
from gcore_placement.simulation.trace_recipes import Drift, TraceRecipe, steady
from gcore_placement.simulation.traces import Trace

_ENGINE_7B = EngineCosts(
    devices_per_replica=1,
    max_num_seqs=256,
    decode_base_s=0.009,
    decode_per_sequence_s=4e-5,
    decode_per_context_token_s=2.4e-8,
    prefill_per_token_s=3.1e-5,
)
_ENGINE_32B = EngineCosts(
    devices_per_replica=4,
    max_num_seqs=256,
    decode_base_s=0.011,
    decode_per_sequence_s=4.2e-5,
    decode_per_context_token_s=2.7e-8,
    prefill_per_token_s=3.3e-5,
)
_TRAINING_7B = TrainingCosts(base_s=2.0, per_token_s=1.15e-4, per_pair_s=3e-9, num_forward_passes=1, sync_s=4.0)
_TRAINING_32B = TrainingCosts(base_s=4.0, per_token_s=5.0e-4, per_pair_s=1e-8, num_forward_passes=1, sync_s=12.0)
_SWAP_7B = SwapCosts(sleep_s=3.0, wake_s=7.0, load_s=12.0)
_SWAP_32B = SwapCosts(sleep_s=10.0, wake_s=25.0, load_s=40.0)

JOBS = {
    "7B": JobCosts(policy=_ENGINE_7B, reward=_ENGINE_7B, training=_TRAINING_7B, swap=_SWAP_7B),
    "7B, 32B judge": JobCosts(policy=_ENGINE_7B, reward=_ENGINE_32B, training=_TRAINING_7B, swap=_SWAP_32B),
    "32B": JobCosts(policy=_ENGINE_32B, reward=_ENGINE_32B, training=_TRAINING_32B, swap=_SWAP_32B),
}
"""By the policy's size; the judge has the same, or its own."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A cluster, and the batch that it is given."""

    num_devices: int
    train_batch_size: int
    unit_devices: int
    """What moves at once at least: a replica, nodes, or racks."""


SCALES = {
    64: Scale(num_devices=64, train_batch_size=256, unit_devices=4),
    512: Scale(num_devices=512, train_batch_size=1024, unit_devices=16),
    10_000: Scale(num_devices=10_000, train_batch_size=8192, unit_devices=400),
}
"""By devices. Batches grow less than clusters do: 64, 32 and 13 responses to a device, 16 to a prompt."""

_STEADY = TraceRecipe(
    name="steady",
    num_steps=60,
    train_batch_size=1,
    response_median=steady(2000),
    judge_median=steady(800),
    acceptance=steady(0.6),
    noise=0.03,
)

SCENARIOS = {
    recipe.name: recipe
    for recipe in (
        _STEADY,
        # Reasoning grows and prompts get easy or stay too hard; the judge's answers stay as they are.
        replace(
            _STEADY,
            name="growing",
            response_median=Drift(first=1000, last=4000),
            acceptance=Drift(first=0.8, last=0.4),
        ),
        # The judge is given longer rubrics, or learns to reason.
        replace(_STEADY, name="judge_grows", judge_median=Drift(first=300, last=2400)),
        replace(_STEADY, name="heavy_tail", response_median=steady(1000), response_sigma=1.3),
        replace(_STEADY, name="slow_judge", judge_median=steady(3000)),
        replace(_STEADY, name="fast_judge", judge_median=steady(150)),
        # Another judge, or another task, from one step to the next.
        replace(_STEADY, name="jump", judge_median=Drift(first=300, last=2400, jump_step=30)),
        # Images fill prompts with tokens and payloads; answers are short.
        replace(
            _STEADY,
            name="multimodal",
            prompt_median=3000,
            max_prompt_length=8192,
            response_median=Drift(first=500, last=1500),
            payload_median_bytes=8e6,
        ),
    )
}
"""By name; sizes are set by the scale."""


def scenario(
    name: str,
    job: str,
    num_devices: int,
    *,
    num_steps: int | None = None,
    seed: int = 0,
    trace: Trace | None = None,
    costs: JobCosts | None = None,
    progress: Callable[[int], None] | None = None,
) -> Simulator:
    """The simulator of a scenario.

    Args:
        name: one of SCENARIOS.
        job: one of JOBS.
        num_devices: one of SCALES.
        num_steps: 60 if None; the drift is over as many.
        seed: of the trace.
        trace: in the place of the scenario's.
        costs: in the place of the job's, for as many devices a replica.
        progress: see `Simulator`.

    Raises:
        PlacementError: there is no scenario, job or scale of that name.
    """
    for field, key, known in (("scenario", name, SCENARIOS), ("job", job, JOBS), ("devices", num_devices, SCALES)):
        if key not in known:
            raise refusal(field, key, f"one of {', '.join(str(other) for other in known)}")
    costs, size, recipe = costs or JOBS[job], SCALES[num_devices], SCENARIOS[name]
    if trace is None:
        steps = recipe.num_steps if num_steps is None else num_steps
        trace = replace(
            recipe,
            num_steps=steps,
            train_batch_size=size.train_batch_size,
            judge_median=_over(recipe.judge_median, steps / recipe.num_steps),
            seed=seed,
        ).trace()
    assert costs.reward is not None
    space = PartitionSpace(
        num_devices=num_devices,
        policy=RoleLimits(devices_per_replica=costs.policy.devices_per_replica),
        reward=RoleLimits(devices_per_replica=costs.reward.devices_per_replica),
        unit_devices=size.unit_devices,
    )
    return Simulator(trace, costs, space, progress=progress)


def _over(drift: Drift, share: float) -> Drift:
    """The same with as large a part of the steps before the jump."""
    return drift if drift.jump_step is None else replace(drift, jump_step=round(drift.jump_step * share))
