"""Image samplers and a judge on a simulated cluster."""

from dataclasses import replace
from typing import Any

from gcore_bench.diffusion.options import DiffusionOptions
from gcore_placement import (
    Comparison,
    Drift,
    EngineCosts,
    JobCosts,
    PartitionSpace,
    RoleLimits,
    Simulator,
    SwapCosts,
    TraceRecipe,
    TrainingCosts,
    compare,
)
from gcore_placement.simulation.scenarios import JOBS
from gcore_placement.workload.traces import steady

NUM_DEVICES = 64
UNIT_DEVICES = 4

SAMPLER = EngineCosts(devices_per_replica=1, max_num_seqs=16, decode_base_s=0.01, decode_per_sequence_s=0.024)
"""Stable Diffusion 3.5 medium at 512 x 512. A token is a denoising step of an image: 1024 tokens of it and 333 of its
prompt, with guidance, through 2.2 billion parameters, 12 TFLOP, at half of an H100's 990 TFLOP/s."""

JUDGE = JOBS["7B"].policy
"""A vision-language model of 7B; it reads an image as 1,000 tokens."""

COSTS = JobCosts(
    policy=SAMPLER,
    reward=JUDGE,
    # Forward and backward of two steps of every image, and the reference's pass over them.
    training=TrainingCosts(base_s=1.0, per_token_s=2 * 3 * 0.024 / 1100, num_forward_passes=1, sync_s=1.5),
    swap=SwapCosts(sleep_s=2.0, wake_s=5.0, load_s=8.0),
)

_IMAGES = TraceRecipe(
    name="images, verdicts of one length",
    num_steps=60,
    train_batch_size=192,
    n=24,
    prompt_median=1090,
    prompt_sigma=0.05,
    response_median=steady(10),
    response_sigma=0.0,
    judge_median=steady(400),
    acceptance=steady(0.9),
    noise=0.03,
)


def run_simulation(options: DiffusionOptions) -> list[Comparison]:
    """Compare all strategies on verdicts that stay, grow, and jump."""
    limits = RoleLimits(devices_per_replica=1)
    space = PartitionSpace(num_devices=NUM_DEVICES, roles=(limits, limits), unit_devices=UNIT_DEVICES)
    drifts = {
        "images, verdicts as they are": steady(400),
        "images, verdicts grow": Drift(first=100, last=3000),
        "images, verdicts jump": Drift(first=100, last=3000, jump_step=options.sim_steps // 2),
    }
    given: dict[str, Any] = {"num_steps": options.sim_steps, "seed": options.seed + 1}
    recipes = [replace(_IMAGES, name=name, judge_median=drift, **given) for name, drift in drifts.items()]
    return [compare(recipe.name, Simulator(recipe.trace(), COSTS, space)) for recipe in recipes]
