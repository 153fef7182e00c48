"""Triton's kernels, run by its interpreter on a CPU, against torch's operations; and which layers use them.

`test_kernels.py` runs these in a process of their own.
"""

import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from trainer_oracles import VOCAB_SIZE, Group, make_samples, save_model
from transformers import (
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.glm4 import modeling_glm4
from transformers.models.qwen2 import modeling_qwen2

from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    TorchParallel,
    TorchTrainer,
    compile_layers,
    token_scores,
)
from gcore_trainer.packing import head, layer_kernels, logit_kernels
from gcore_trainer.torch import loading
from gcore_trainer.torch.fused_layers import fuse_layers

CPU = torch.device("cpu")
assert os.environ["TRITON_INTERPRET"] == "1", (
    "before Triton is imported: `test_kernels.py` runs this"
)
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def gradients(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    weights = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
    assert isinstance(loss, torch.Tensor)
    return torch.autograd.grad(loss, inputs)


def fuse_on_cpu(packed: PackedModel) -> None:
    assert fuse_layers(packed.model, CPU) > 0


def two_steps(rank: int, path: Path, folder: Path, results: Any) -> None:
    """Train shards of the model, with its own layers and with fused ones."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2
    )
    batches = [
        make_samples([Group(4, [6, 3]), Group(7, [2, 5])], seed=seed)[rank::2] for seed in range(2)
    ]
    norms: list[float] = []
    for fuses in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loading, "fuse_on_cuda", fuse_on_cpu if fuses else id)
            trainer = TorchTrainer(
                PackedModel.from_pretrained(path, sharded=True, gradient_checkpointing=True),
                optimizer=OptimizerConfig(lr=1e-2),
                objective=PolicyObjective(PolicyLossConfig()),
                parallel=TorchParallel.join(ParallelConfig()),
            )
        norms.append([trainer.train_step([batch]) for batch in batches][-1]["actor/grad_norm"])
    results.put(norms)
    torch.distributed.destroy_process_group()


def test_fused_layers_of_sharded_models(qwen2: Path, tmp_path: Path) -> None:
    # It is the first test, because one before it could have started a thread.
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    ranks = [
        context.Process(target=two_steps, args=(rank, qwen2, tmp_path, results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    found = [results.get(timeout=600) for _ in ranks]
    for process in ranks:
        process.join()
    assert found[0] == found[1]
    plain, fused = found[0]
    assert fused == pytest.approx(plain, rel=1e-4)
    assert fused != plain


@settings(max_examples=30)
@given(
    num_tokens=st.integers(0, 6),
    vocab_size=st.sampled_from([1, 7, 2048, 2049, 5000]),
    temperature=st.sampled_from([1.0, 0.6]),
    entropy_grad=st.booleans(),
    spread=st.sampled_from([0.1, 3.0, 40.0]),
    seed=st.integers(0, 100),
)
def test_scores_by_kernels(
    num_tokens: int,
    vocab_size: int,
    temperature: float,
    entropy_grad: bool,
    spread: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 4, generator=generator).requires_grad_()
    weight = (spread * torch.randn(vocab_size, 4, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    options: dict[str, Any] = {
        "temperature": temperature,
        "entropy_grad": entropy_grad,
        "max_logits": 4 * vocab_size,
    }

    def scored() -> tuple[torch.Tensor, ...]:
        scores = token_scores(hidden, weight, targets, **options)
        outputs = [scores.log_probs, *([scores.entropies] if entropy_grad else [])]
        return scores.log_probs, scores.entropies, *gradients(outputs, [hidden, weight])

    expected = scored()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_has_kernels", lambda *_: True)
        found = scored()
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5 * max(1.0, spread))


def test_gradients_of_logits_are_narrow() -> None:
    logits = 3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    columns, pulls = torch.tensor([0, 299, 7, -1, 300]), torch.linspace(-1, 1, 5)
    arguments = logits, columns, logits.logsumexp(-1), pulls, None, None
    exact, rounded = (
        logit_kernels.gradient(*arguments, dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    # The interpreter rounds towards 0.
    torch.testing.assert_close(rounded.float(), exact, rtol=2**-7, atol=0)
    # A column outside of the row, as of another rank's part of the vocabulary, stands for none.
    torch.testing.assert_close(exact[3:], logits[3:].softmax(-1) * pulls[3:, None])


def test_a_logit_that_is_minus_infinity() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    peak, total, dot = logit_kernels.moments(logits)
    below = torch.tensor([-1.0, 0.0])
    torch.testing.assert_close(
        (peak, total, dot), (torch.tensor([2.0]), below.exp().sum()[None], -below.exp()[:1])
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 1030)], ids=str)
@pytest.mark.parametrize("unit", ["swiglu", "geglu"])
def test_gated_units(
    unit: str, dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(2)
    )
    gelu = partial(torch.nn.functional.gelu, approximate="tanh")
    found = getattr(layer_kernels, unit)(gate, up)
    expected = (torch.nn.functional.silu if unit == "swiglu" else gelu)(gate) * up
    pairs = zip(
        (found, *gradients([found], [gate, up])),
        (expected, *gradients([expected], [gate, up])),
        strict=True,
    )
    for a, e in pairs:
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 16), ((3, 1), 24)])
def test_rotation(
    dtype: torch.dtype, tolerance: float, heads: tuple[int, int], head_dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 9, count, head_dim) for count in heads]
    q, k = (
        torch.randn(x, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for x in shapes
    )
    angles = torch.randn(1, 9, head_dim, generator=generator)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    found, expected = (
        layer_kernels.rotate(q, k, cos, sin),
        modeling_qwen2.apply_rotary_pos_emb(q, k, cos, sin),
    )
    for a, e in zip(
        (*found, *gradients(found, [q, k])), (*expected, *gradients(expected, [q, k])), strict=True
    ):
        assert a.shape == e.shape
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


ALL = {"RMSNorm", "MLP", "Attention"}
FUSED: dict[type[PreTrainedConfig], set[str]] = {
    Qwen2Config: ALL,
    Qwen3Config: ALL,
    LlamaConfig: ALL,
    Olmo2Config: ALL,
    # Gate and up are one projection.
    Phi3Config: {"RMSNorm", "Attention"},
    # The activation is another, and norms add 1 to their weight.
    Gemma2Config: ALL,
    Gemma3TextConfig: ALL,
    # Pairs are neighbours.
    Glm4Config: {"RMSNorm"},
    # No RMSNorm.
    CohereConfig: {"MLP"},
    # Experts, and angles of half a head.
    GptOssConfig: {"RMSNorm"},
}
KINDS = ("TopKRouter", "RMSNorm", "MLP", "Attention")


@pytest.mark.parametrize("config", FUSED, ids=lambda config: config.__name__)
def test_layers_that_kernels_compute_give_the_same(
    config: type[PreTrainedConfig], tmp_path: Path
) -> None:
    experts: dict[str, Any] = (
        {"num_local_experts": 4, "num_experts_per_tok": 2} if config is GptOssConfig else {}
    )
    path = save_model(config(**SIZES, **experts), tmp_path, seed=0)
    samples = make_samples([Group(5, [7, 1, 3]), Group(8, [2])], seed=0)
    plain, fused = PackedModel.from_pretrained(path), PackedModel.from_pretrained(path)
    untouched = {id(m) for m in fused.model.modules() if "forward" in vars(m)}
    assert fuse_layers(fused.model, CPU) > 0
    own = [m for m in fused.model.modules() if "forward" in vars(m) and id(m) not in untouched]
    own = [m for m in own if type(m) is not torch.nn.Linear]
    assert {next(kind for kind in KINDS if type(m).__name__.endswith(kind)) for m in own} == FUSED[
        config
    ]
    scores = [packed.score(samples).log_probs for packed in (plain, fused)]
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    grads = [
        gradients([s], list(packed.model.parameters()))
        for s, packed in zip(scores, (plain, fused), strict=True)
    ]
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)


def test_a_rotation_that_does_not_fit_is_the_models_own(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    fuse_layers(packed.model, CPU)
    attention = next(m for m in packed.model.modules() if type(m).__name__ == "Qwen2Attention")
    rotated = vars(attention)["forward"].__func__.__globals__["apply_rotary_pos_emb"]
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    angles = torch.randn(2, 3, 8)
    # Several sequences with positions of their own.
    expected = modeling_qwen2.apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(rotated(q, k, angles.cos(), angles.sin()), expected, rtol=0, atol=0)
    # The module's own function is as it was, for other models.
    assert modeling_qwen2.apply_rotary_pos_emb is not rotated
    assert modeling_glm4.apply_rotary_pos_emb is not rotated


def test_compiled_layers_have_no_kernels(qwen2: Path) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    assert fuse_layers(packed.model, CPU) > 0
    compile_layers(packed, backend="eager")
    assert not packed.fuses_layers
    assert not any(
        "forward" in vars(m) for layer in packed.layers() for m in layer.modules() if m is not layer
    )


@pytest.mark.parametrize("share", [None, 0.5, 1.0])
def test_the_last_product_of_a_checkpointed_layer_is_torchs(
    qwen2: Path, share: float | None
) -> None:
    packed = PackedModel.from_pretrained(
        qwen2, gradient_checkpointing=share is not None, checkpointed_layers=share or 1.0
    )
    fuse_layers(packed.model, CPU)
    layers: list[Any] = packed.layers()
    own = ["forward" in vars(layer.mlp.down_proj) for layer in layers]
    num_checkpointed = round((share or 0.0) * len(layers))
    assert own == [False] * num_checkpointed + [True] * (len(layers) - num_checkpointed)
    assert all("forward" in vars(layer.mlp.up_proj) for layer in layers)
