"""Jobs and traces to compare strategies on: plausible numbers, none of them measured.

Engines are of H100 by their data sheet: weights and keys and values are read at 2.4 TB/s a device, products run at 40 %
of 990 TFLOP/s in decoding, 50 % over prompts and 40 % in training; 3 ms of a decoding step are neither. To sleep and to
wake takes a 32B model 35 s, of the 30 to 60 s that G-Core (arXiv 2507.22789, section 1) reports.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.partition.space import PartitionSpace, RoleLimits
from gcore_placement.quantities import check_known
from gcore_placement.simulation.simulator import Simulator
from gcore_placement.workload.recorded_runs import PublishedCurve
from gcore_placement.workload.traces import Drift, Trace, TraceRecipe, steady

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
_TRAINING_7B = TrainingCosts(
    base_s=2.0, per_token_s=1.15e-4, per_pair_s=3e-9, num_forward_passes=1, sync_s=4.0
)
_TRAINING_32B = TrainingCosts(
    base_s=4.0, per_token_s=5.0e-4, per_pair_s=1e-8, num_forward_passes=1, sync_s=12.0
)
_SWAP_7B = SwapCosts(sleep_s=3.0, wake_s=7.0, load_s=12.0)
_SWAP_32B = SwapCosts(sleep_s=10.0, wake_s=25.0, load_s=40.0)

JOBS = {
    "7B": JobCosts(policy=_ENGINE_7B, reward=_ENGINE_7B, training=_TRAINING_7B, swap=_SWAP_7B),
    "7B, 32B judge": JobCosts(
        policy=_ENGINE_7B, reward=_ENGINE_32B, training=_TRAINING_7B, swap=_SWAP_32B
    ),
    "32B": JobCosts(policy=_ENGINE_32B, reward=_ENGINE_32B, training=_TRAINING_32B, swap=_SWAP_32B),
}
"""Costs by the size of the policy; the judge has the same size, or its own."""


SCALES = {
    37: (148, 1),
    64: (256, 4),
    512: (1024, 16),
    10_000: (8192, 400),
}
"""The batch size of a cluster by its devices, and the least devices to move at once: a replica, nodes, or racks.

Batches grow less than clusters do: 64, 64, 32 and 13 responses per device, 16 per prompt. On 37 devices, engines of 4
leave one unassigned."""

_STEADY = TraceRecipe(
    name="steady",
    num_steps=60,
    train_batch_size=1,
    response_median=steady(2000),
    judge_median=steady(800),
    acceptance=steady(0.6),
    noise=0.03,
)

_CURRICULUM = replace(
    _STEADY,
    name="curriculum",
    response_median=Drift(first=6000, last=600, jump_step=30),
    judge_median=Drift(first=200, last=2400, jump_step=30),
    acceptance=steady(0.4),
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
        # A judge that reasons is tried and taken back.
        replace(
            _STEADY,
            name="judge_swap_back",
            judge_median=Drift(first=200, last=4000, jump_step=20, back_step=40),
            acceptance=steady(0.4),
        ),
        # Long reasoning with short verdicts; then chat, with short answers and a judge that thinks.
        _CURRICULUM,
        # As in DAPO's recipe, which samples three batches at once and mostly needs no more.
        replace(_CURRICULUM, name="large_waves", gen_batch_ratio=3.0),
        # A long run: the policy learns to be brief, the judge to reason.
        replace(
            _STEADY,
            name="crossing",
            num_steps=100,
            response_median=Drift(first=8000, last=1500),
            judge_median=Drift(first=100, last=6000),
            acceptance=steady(0.4),
        ),
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
"""Trace recipes by name; the scale sets their sizes."""

_STILL = replace(_STEADY, name="no_change", num_steps=80, judge_median=steady(850))


def _swinging(name: str, *, is_shuffled: bool = False, **course: Any) -> TraceRecipe:
    """Return a recipe whose load goes from one role to the other: long responses, then judgements that reason."""
    response = Drift(first=4000, last=1000, **course)
    judge = Drift(first=300, last=2400, **course)
    return replace(
        _STILL, name=name, response_median=response, judge_median=judge, is_shuffled=is_shuffled
    )


FAMILY = {
    recipe.name: recipe
    for recipe in (
        *(_swinging(f"square_{period}", period=period) for period in (2, 3, 4, 6, 8, 12, 20, 40)),
        *(_swinging(f"sine_{period}", period=period, shape="sine") for period in (6, 12, 20, 40)),
        *(_swinging(f"pulse_{period}", period=period, shape="pulse") for period in (4, 10, 20)),
        _swinging("one_jump", jump_step=40),
        _swinging("there_and_back", jump_step=27, back_step=53),
        _swinging("one_drift"),
        _swinging("coin", period=2, is_shuffled=True),
        replace(_STILL, name="noise", noise=0.3),
        replace(_STILL, name="heavy_noise", noise=0.3, noise_freedom=2.0),
        _STILL,
    )
}
"""Trace recipes by name on which dynamic must not be much slower than the best split: periods in steps, jumps, a drift,
noise and none of these."""

PUBLISHED = {
    curve.name: curve
    for curve in (
        PublishedCurve(
            name="r1_zero",
            source="DeepSeek-R1-Zero (Nature 645, 2025), figure 1b: coarse points, good to a quarter",
            points=(
                (0, 500, 32_768),
                (2000, 2500, 32_768),
                (4000, 4000, 32_768),
                (6000, 6000, 32_768),
                (8200, 9500, 65_536),
                (10_000, 15_000, 65_536),
            ),
        ),
        PublishedCurve(
            name="deepscaler",
            source="DeepScaleR-1.5B (Agentica, 2025): means at the ends of its phases of 8K and 16K tokens",
            points=((0, 5500, 8192), (1040, 3500, 16_384), (1520, 5500, 16_384)),
        ),
    )
}
"""Response lengths of published runs, by name. Neither had a judge: its lengths are an assumption."""


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
    """Return the simulator of a scenario: of SCENARIOS, FAMILY or PUBLISHED, for one of JOBS and of SCALES.

    Args:
        num_steps: the scenario's if None, 60 of a published run; the drift is over as many.
        trace: in the place of the scenario's.
        costs: in the place of the job's, for as many devices a replica.
        progress: see `Simulator`.
    """
    recipes = SCENARIOS | FAMILY
    check_known("scenario", name, recipes | PUBLISHED)
    check_known("job", job, JOBS)
    check_known("devices", num_devices, SCALES)
    costs = costs or JOBS[job]
    train_batch_size, unit_devices = SCALES[num_devices]
    if trace is None and name in PUBLISHED:
        trace = PUBLISHED[name].trace(
            num_steps=num_steps or 60, num_prompts=train_batch_size, seed=seed
        )
    elif trace is None:
        trace = resize(
            recipes[name], num_steps=num_steps, train_batch_size=train_batch_size, seed=seed
        ).trace()
    assert costs.reward is not None
    policy = RoleLimits(devices_per_replica=costs.policy.devices_per_replica)
    reward = RoleLimits(devices_per_replica=costs.reward.devices_per_replica)
    space = PartitionSpace(
        num_devices=num_devices, roles=(policy, reward), unit_devices=unit_devices
    )
    return Simulator(trace, costs, space, progress=progress)


def resize(
    recipe: TraceRecipe, *, num_steps: int | None, train_batch_size: int, seed: int
) -> TraceRecipe:
    """Return the recipe with another number of steps, with jumps at the same fractions of them; periods stay."""
    steps = recipe.num_steps if num_steps is None else num_steps

    def move(step: int | None) -> int | None:
        return None if step is None else round(step * steps / recipe.num_steps)

    def over(drift: Drift) -> Drift:
        return replace(drift, jump_step=move(drift.jump_step), back_step=move(drift.back_step))

    return replace(
        recipe,
        num_steps=steps,
        train_batch_size=train_batch_size,
        seed=seed,
        response_median=over(recipe.response_median),
        judge_median=over(recipe.judge_median),
        acceptance=over(recipe.acceptance),
    )
