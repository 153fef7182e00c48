"""Ranks of a `MegatronTrainer` give their devices' memory back for a while, or that of the optimizer for good."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_oracles import (
    CONFIGS,
    EP,
    GROUPS,
    OPTIMIZER,
    TP,
    assembled,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import make_samples

from gcore_placement import Job, Lengths, ModelShape, TrainingLayout, TrainingState
from gcore_placement.planning.layouts import TrainingLayouts
from gcore_placement.planning.memory import offloaded_optimizer_bytes, training_memory
from gcore_trainer import LoRAConfig, MegatronConfig, SFTObjective

pytestmark = pytest.mark.slow

OVERLAP = MegatronConfig(overlap_grad_reduce=True, overlap_param_gather=True)
kinds = pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("qwen3_tied", {TP: 2}, {"dtype": torch.bfloat16}),
        ("qwen3_moe", {EP: 2}, {"megatron": OVERLAP}),
        ("qwen3", {TP: 2}, {"lora": LoRAConfig(rank=4)}),
    ],
    ids=["tp, bfloat16", "ep, late gathers", "adapters"],
)


def training_of(
    name: str, layout: dict[str, Any], options: dict[str, Any], folder: Path, *, size: int
) -> tuple[str, list[Any], dict[str, Any]]:
    """A model's folder, uneven batches of two steps, and all options of its trainer."""
    path = save_megatron_model(name, folder)
    replicas = data_parallel_size(size, layout)
    steps = [uneven(make_samples(GROUPS, seed=i), replicas, seed=i) for i in range(2)]
    return str(path), steps, {"optimizer": OPTIMIZER, "objective": SFTObjective(), **options}


@kinds
def test_ranks_that_slept_continue_to_the_bit(
    rank_server: RankServer,
    tmp_path: Path,
    name: str,
    layout: dict[str, Any],
    options: dict[str, Any],
) -> None:
    path, steps, options = training_of(name, layout, options, tmp_path, size=2)
    pool = rank_server.shared(2)
    expected = pool.run("megatron_trains", path, layout, options, steps, size=2)
    rested = pool.run("megatron_rests", path, layout, options, steps, size=2)
    for (metrics, weights, boxes), (own_metrics, own_weights, own_boxes, held, error) in zip(
        expected, rested, strict=True
    ):
        assert own_metrics == metrics
        torch.testing.assert_close(own_weights, weights, rtol=0, atol=0)
        (own, other) = ({str(box[:4]): box[4] for box in parts} for parts in (own_boxes, boxes))
        torch.testing.assert_close(own, other, rtol=0, atol=0)
        assert all(50 * asleep < awake - asleep for awake, _, asleep in held), held
        for awake, kept, _ in held:
            # Of bfloat16 2 of 6 + 12 bytes a parameter, of float32 4 of 16 and less, where ranks share moments.
            # Adapters have few states.
            assert kept < (1.0 if "lora" in options else 0.45) * awake, held
        assert "expected a call of wake() before" in error


@kinds
def test_updates_in_host_memory_are_those_on_the_device(
    rank_server: RankServer,
    tmp_path: Path,
    name: str,
    layout: dict[str, Any],
    options: dict[str, Any],
) -> None:
    path, steps, options = training_of(name, layout, options, tmp_path, size=4)
    pool = rank_server.shared(4)
    expected = pool.run("megatron_trains", path, layout, options, steps, size=4)
    options["offload"] = True
    found = pool.run("megatron_trains", path, layout, options, steps, size=4)
    for (metrics, weights, boxes), (own_metrics, own_weights, own_boxes) in zip(
        expected, found, strict=True
    ):
        for row, own_row in zip(metrics, own_metrics, strict=True):
            assert own_row == pytest.approx(row, rel=1e-4)
        (own, other) = ({str(box[:4]): box[4] for box in parts} for parts in (own_boxes, boxes))
        assert largest_difference(own, other) < 1e-5
        assert own_weights.keys() == weights.keys()
    # A state of the one continues in the other, with the same tensors.
    saved: dict[str, dict[str, torch.Tensor]] = assembled(b for *_, boxes in found for b in boxes)
    numbers = {"step": 2, "nonfinite_steps": 0, "optimizer_step": 2}
    resumed = pool.run("megatron_resumes", path, layout, options, numbers, saved, steps[:1], size=4)
    again = pool.run("megatron_trains", path, layout, options, [*steps, steps[0]], size=4)
    assert resumed[0][0][0] == again[0][0][-1]
    torch.testing.assert_close(resumed[0][1], again[0][1], rtol=0, atol=0)


@pytest.mark.parametrize("offload", [False, True])
def test_states_take_what_the_plan_says(
    rank_server: RankServer, tmp_path: Path, offload: bool
) -> None:
    """Of a rank of two that share moments: 6 bytes a parameter and 12 / 2, or 6 and 16 / 2 in host memory."""
    path = save_megatron_model("qwen3_tied", tmp_path)
    steps = [uneven(make_samples(GROUPS, seed=0), 2, seed=0)]
    options: dict[str, Any] = {"optimizer": OPTIMIZER, "objective": SFTObjective()}
    options |= {"dtype": torch.bfloat16, "offload": offload}
    found = rank_server.shared(4).run("megatron_holds", str(path), {TP: 2}, options, steps, size=4)
    job = Job(
        policy=ModelShape.from_config(CONFIGS["qwen3_tied"].to_dict()),
        prompt_lengths=Lengths.recorded([16]),
        response_lengths=Lengths.recorded([16]),
        train_batch_size=4,
        n=4,
    )
    layout = TrainingLayout(
        backend="megatron",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=2,
        gradient_checkpointing=False,
        ppo_max_token_len=64,
    )
    state = TrainingState(offload="optimizer" if offload else "none")
    parts = training_memory(job, TrainingLayouts(layout), state=state)
    resident = sum(float(parts[name][0]) for name in ("weights", "gradients", "optimizer"))
    on_device = training_memory(job, TrainingLayouts(layout))["optimizer"][0]
    host = offloaded_optimizer_bytes(float(on_device), job, state) if offload else 0
    for held, on_host in found:
        assert held == pytest.approx(resident, rel=0.05)
        # Without the gradients, which are copied there for an update.
        assert on_host == pytest.approx(0.75 * host, rel=0.05)
