"""`TorchTrainer` over several processes against one process: FSDP2, on real gloo ranks."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankServer
from torch._subclasses.fake_tensor import FakeTensorMode
from trainer_oracles import SIZES, Group, make_samples, off_policy, save_model, split
from transformers import Qwen2Config

from gcore_trainer import (
    LoRAConfig,
    MicroBatch,
    Objective,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    ValueLossConfig,
    ValueObjective,
)
from gcore_trainer.torch.parallel import fits_whole

pytestmark = pytest.mark.slow

GROUPS = [Group(12, [20, 1, 9, 33]), Group(25, [7, 7]), Group(3, [25]), Group(9, [4, 18])]
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, grad_clip=0.5, lr_warmup_steps=3)


def steps_of(path: Path, count: int) -> list[list[Sample]]:
    packed = PackedModel.from_pretrained(path)
    return [off_policy(make_samples(GROUPS, seed=i), packed, seed=i) for i in range(count)]


def dealt(samples: list[Sample], size: int, *, seed: int) -> list[list[MicroBatch]]:
    """Each replica's micro-batches: uneven in number, and none for the last of several replicas in some steps."""
    owners = np.random.default_rng(seed).integers(
        0, size if seed % 2 else max(1, size - 1), len(samples)
    )
    parts = [
        [s for s, owner in zip(samples, owners, strict=True) if owner == r] for r in range(size)
    ]
    return [split(part, seed=seed) if part else [] for part in parts]


def train_alone(
    path: Path, objective: Objective[Any], optimizer: OptimizerConfig, steps: list[list[Sample]]
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    trainer = TorchTrainer(
        PackedModel.from_pretrained(path), optimizer=optimizer, objective=objective
    )
    metrics = [trainer.train_step([samples]) for samples in steps]
    return metrics, dict(trainer.export_weights())


ULYSSES = ParallelConfig(context_parallel_size=2, ulysses_sequence_parallel_size=2)
RING = ParallelConfig(context_parallel_size=2)
BOTH = ParallelConfig(context_parallel_size=4, ulysses_sequence_parallel_size=2)
HSDP = ParallelConfig(fsdp_size=2, gradient_sync="update")
HSDP_RING = ParallelConfig(context_parallel_size=2, fsdp_size=2)


@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (1, ParallelConfig()),
        (2, ParallelConfig()),
        (4, ParallelConfig()),
        (4, ULYSSES),
        (4, RING),
        (4, BOTH),
        (4, HSDP),
        (4, HSDP_RING),
    ],
    ids=[
        "fsdp1",
        "fsdp2",
        "fsdp4",
        "ulysses2-dp2",
        "ring2-dp2",
        "ulysses2-ring2",
        "hsdp2x2",
        "hsdp2x2-ring2",
    ],
)
def test_steps_are_those_of_one_process(
    rank_server: RankServer, qwen2: Path, size: int, parallel: ParallelConfig
) -> None:
    """Uneven parts, dual clip, KL and entropy terms, warm-up, weight decay and clipping included."""
    objective = PolicyObjective(
        PolicyLossConfig(clip_ratio_c=2.0, kl_loss_coef=0.05, entropy_coeff=0.01)
    )
    steps = steps_of(qwen2, 3)
    expected, weights = train_alone(qwen2, objective, OPTIMIZER, steps)
    parts = [
        dealt(samples, parallel.data_parallel_size(size), seed=i) for i, samples in enumerate(steps)
    ]
    arguments = (str(qwen2), objective, OPTIMIZER, parallel, parts, {})
    for metrics, sharded in rank_server.shared(size).run("train", *arguments, size=size):
        for own, alone in zip(metrics, expected, strict=True):
            own, alone = without_tokens(own), without_tokens(alone)
            assert own == pytest.approx(alone, rel=1e-4, abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(sharded[name], tensor, rtol=0, atol=1e-4)


def test_bfloat16_with_float32_weights(rank_server: RankServer, qwen2: Path) -> None:
    """On two ranks as in one process within the resolution of bfloat16; masters and moments stay float32."""
    objective = PolicyObjective(PolicyLossConfig())
    steps = steps_of(qwen2, 3)
    options: dict[str, Any] = {"compute_dtype": torch.bfloat16, "gradient_checkpointing": True}
    exact, _ = train_alone(qwen2, objective, OPTIMIZER, steps)
    packed = PackedModel.from_pretrained(qwen2, **options)
    alone = TorchTrainer(packed, optimizer=OPTIMIZER, objective=objective)
    expected = [alone.train_step([samples]) for samples in steps]
    parts = [dealt(samples, 2, seed=i) for i, samples in enumerate(steps)]
    arguments = (str(qwen2), objective, OPTIMIZER, ParallelConfig(), parts, options)
    for metrics, weights in rank_server.shared(2).run("train", *arguments, size=2):
        assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
        for own, one, truth in zip(metrics, expected, exact, strict=True):
            for name in ("actor/entropy", "actor/grad_norm"):
                assert own[name] == pytest.approx(one[name], rel=0.05)
                assert one[name] == pytest.approx(truth[name], rel=0.05)
                assert one[name] != truth[name]
    for group in ("model", "exp_avg", "exp_avg_sq"):
        assert all(t.dtype == torch.float32 for t in alone.state()[group].values())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_shards_sleep_and_are_offloaded(rank_server: RankServer, qwen2: Path, name: Any) -> None:
    """The same on two ranks to the bit, with states on the device or in host memory; and that of one process."""
    objective = PolicyObjective(PolicyLossConfig())
    steps = steps_of(qwen2, 2)
    parts = [dealt(samples, 2, seed=i) for i, samples in enumerate(steps)]
    optimizer = replace(OPTIMIZER, name=name)
    runs = [
        rank_server.shared(2).run(
            "train_with_naps", str(qwen2), objective, optimizer, parts, offload, size=2
        )
        for offload in (False, True)
    ]
    packed = PackedModel.from_pretrained(qwen2, compute_dtype=torch.bfloat16)
    alone = TorchTrainer(packed, optimizer=OPTIMIZER, objective=objective, offload=True)
    expected = [alone.train_step([samples]) for samples in steps]
    for (metrics, weights, held), (others, other_weights, _) in zip(*runs, strict=True):
        assert held == 0
        assert metrics == others
        torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
        for own, one in zip(metrics, expected, strict=True):
            assert own["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=0.05)


def test_compiled_layers_are_sharded(rank_server: RankServer, tmp_path: Path) -> None:
    """The second rank, which has no samples in the first step, has as many graphs as the other."""
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": 1}
    path = save_model(Qwen2Config(**sizes), tmp_path, seed=0)
    objective = PolicyObjective(PolicyLossConfig())
    steps = steps_of(path, 2)
    expected, _ = train_alone(path, objective, OPTIMIZER, steps)
    parts = [dealt(samples, 2, seed=i) for i, samples in enumerate(steps)]
    arguments = (str(path), objective, OPTIMIZER, parts)
    for metrics, num_graphs in rank_server.shared(2).run("train_compiled", *arguments, size=2):
        assert num_graphs == 4
        for own, alone in zip(metrics, expected, strict=True):
            assert without_tokens(own) == pytest.approx(without_tokens(alone), rel=1e-4, abs=1e-6)


def test_gradient_checkpointing_changes_nothing(qwen2: Path) -> None:
    objective = PolicyObjective(PolicyLossConfig())
    steps = steps_of(qwen2, 2)
    expected, _ = train_alone(qwen2, objective, OPTIMIZER, steps)
    packed = PackedModel.from_pretrained(qwen2, gradient_checkpointing=True)
    trainer = TorchTrainer(packed, optimizer=OPTIMIZER, objective=objective)
    assert [trainer.train_step([samples]) for samples in steps] == expected


def test_a_critic_is_sharded_too(rank_server: RankServer, llama: Path) -> None:
    objective = ValueObjective(ValueLossConfig())
    rng = np.random.default_rng(0)

    def with_targets(sample: Sample) -> Sample:
        values, returns = rng.normal(0, 1, (2, sample.response_ids.size)).astype(np.float32)
        return replace(sample, values=values, returns=returns)

    steps = [[with_targets(s) for s in make_samples(GROUPS, seed=i)] for i in range(3)]
    alone = TorchTrainer(
        PackedValueModel.from_pretrained(llama), optimizer=OPTIMIZER, objective=objective
    )
    expected = [alone.train_step([samples]) for samples in steps]
    [values] = alone.values([steps[0]])
    parts = [dealt(samples, 2, seed=i) for i, samples in enumerate(steps)]
    arguments = (str(llama), objective, OPTIMIZER, ParallelConfig(), parts, {})
    for metrics, _ in rank_server.shared(2).run("train", *arguments, size=2):
        for own, one in zip(metrics, expected, strict=True):
            # A token whose value stands on the clip's edge may fall to either side.
            edge = {"critic/vf_clipfrac": 0.0}
            assert without_tokens(own) | edge == pytest.approx(
                without_tokens(one) | edge, rel=1e-4, abs=1e-6
            )
    assert any(v.any() for v in values)


@pytest.mark.parametrize(
    "options",
    [{}, {"compute_dtype": torch.bfloat16}, {"lora": LoRAConfig(rank=4)}],
    ids=["float32", "bf16", "lora"],
)
def test_gradients_are_reduced_once_an_update(
    rank_server: RankServer, qwen2: Path, options: dict[str, Any]
) -> None:
    """In each of three micro-batches, or in the last one, of which one rank has two only: the same gradients."""
    objective = PolicyObjective(PolicyLossConfig())
    steps: list[list[list[MicroBatch]]] = []
    for samples in steps_of(qwen2, 2):
        half = len(samples) // 2
        first, second = samples[:half], samples[half:]
        steps.append([[first[:1], first[1:3], first[3:]], [second[:2], second[2:]]])

    def gradients(gradient_sync: Any) -> list[Any]:
        parallel = ParallelConfig(gradient_sync=gradient_sync)
        return rank_server.shared(2).run(
            "gradients_of", str(qwen2), objective, parallel, steps, options, size=2
        )

    often, once = gradients("micro_batch"), gradients("update")
    # Of an "auto" on CPU there is one memory for all ranks.
    assert gradients("auto")[0][0][1] == often[0][0][1]
    # Two layers and the rest of the model; of the rest, adapters train nothing.
    num_groups = 2 if "lora" in options else 3
    is_rounded = "compute_dtype" in options
    for own, expected in zip(once, often, strict=True):
        for (found, count), (wanted, wanted_count) in zip(own, expected, strict=True):
            assert (count, wanted_count) == (num_groups, 3 * num_groups)
            assert any(g.any() for g in wanted.values())
            for name, gradient in found.items():
                # FSDP rounds what it has reduced in float32 to the parameter's type: once, or three times.
                tolerance = 2**-7 * wanted[name].abs().max().item() if is_rounded else 1e-6
                torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_activations_in_host_memory_change_no_gradient_of_ranks(
    rank_server: RankServer, qwen2: Path, gradient_checkpointing: bool
) -> None:
    objective = PolicyObjective(PolicyLossConfig())
    steps = [dealt(samples, 2, seed=1) for samples in steps_of(qwen2, 2)]
    options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
    expected, found = (
        rank_server.shared(2).run(
            "gradients_of",
            str(qwen2),
            objective,
            ParallelConfig(),
            steps,
            options | {"activation_offload": o},
            size=2,
        )
        for o in (False, True)
    )
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close([g for g, _ in own], [g for g, _ in wanted], rtol=0, atol=0)


def test_small_gradients_wait_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80e9)
    )
    with FakeTensorMode():
        for billions, device, expected in (
            (0.5, "cuda", True),
            (1.5, "cuda", False),
            (0.5, "cpu", False),
        ):
            shape = (int(billions * 1e6), 1000)
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device=device))
            assert fits_whole([parameter]) is expected
            parameter.requires_grad_(False)
            assert not fits_whole([parameter])


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(context_parallel_size=4),
            r"^context_parallel_size=4 is 4; expected a divisor of the world of 2 ranks",
        ),
        (ParallelConfig(fsdp_size=4), r"^fsdp_size is 4; expected 0, or a divisor of 2 ranks"),
        (
            ParallelConfig(tensor_model_parallel_size=2),
            r"^tensor_model_parallel_size is 2; expected 1 for the torch backend",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    rank_server: RankServer, qwen2: Path, parallel: ParallelConfig, message: str
) -> None:
    arguments = (str(qwen2), PolicyObjective(PolicyLossConfig()), OPTIMIZER, parallel, [], {})
    for error in rank_server.shared(2).errors("train", *arguments, size=2):
        assert re.match(message, error.removeprefix("ConfigError: "))


def test_heads_that_do_not_divide_are_refused(rank_server: RankServer, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        **SIZES,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
    }
    path = save_model(Qwen2Config(**sizes), tmp_path / "three", seed=0)
    message = (
        "ulysses_sequence_parallel_size is 2; expected a divisor of the model's 3 attention heads"
    )
    arguments = (str(path), PolicyObjective(PolicyLossConfig()), OPTIMIZER, ULYSSES, [], {})
    for error in rank_server.shared(2).errors("train", *arguments, size=2):
        assert error == f"ConfigError: {message}"


def test_an_error_of_one_rank_is_raised_by_all(rank_server: RankServer, qwen2: Path) -> None:
    """The second has no advantages; the first does not wait for it for ever."""
    good = make_samples(GROUPS, seed=0)
    bad = [replace(s, advantages=None) for s in good]
    arguments = (
        str(qwen2),
        PolicyObjective(PolicyLossConfig()),
        OPTIMIZER,
        ParallelConfig(),
        [[[good], [bad]]],
        {},
    )
    first, second = rank_server.shared(2).errors("train", *arguments, size=2)
    assert first.startswith("BatchError: rank 1: advantages is None")
    assert second.startswith("BatchError: advantages is None")


def without_tokens(metrics: dict[str, float]) -> dict[str, float]:
    """Without the number of computed tokens: prompts are shared within a replica only."""
    return {name: value for name, value in metrics.items() if name != "perf/computed_tokens"}
