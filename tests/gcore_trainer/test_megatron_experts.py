"""Experts as grouped products are those of Megatron-Core's own, one after the other; so is the fused SwiGLU."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron_oracles import (
    CONFIGS,
    EP,
    GROUPS,
    GROUPS_OF_STATE,
    LOSS,
    MOE,
    OPTIMIZER,
    PP,
    SP,
    TP,
    assembled,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import grouped_mm, silu
from trainer_oracles import SIZES, make_samples, routed
from transformers import Qwen3MoeConfig

from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    MegatronConfig,
    ParallelConfig,
    PolicyObjective,
    Sample,
    SFTObjective,
)
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.cpu import megatron_runtime
from gcore_trainer.megatron.experts import GroupedExperts
from gcore_trainer.megatron.features import (
    dispatcher_options,
    fusion_options,
    has_grouped_experts,
)
from gcore_trainer.megatron.model import transformer_config

SHAPE = (SIZES["num_hidden_layers"], MOE["num_experts"], MOE["num_experts_per_tok"])
ONE_BY_ONE = MegatronConfig(grouped_gemm=False, bias_activation_fusion=False)
GROUPED = replace(ONE_BY_ONE, grouped_gemm=True)
BOTH = replace(GROUPED, bias_activation_fusion=True)
SETTINGS = {
    "grouped": GROUPED,
    "fused": replace(ONE_BY_ONE, bias_activation_fusion=True),
    "both": BOTH,
    "grouped, full": replace(GROUPED, recompute_granularity="full"),
    "both, selective": replace(BOTH, recompute_granularity="selective"),
}
# With a smaller eps, an entry whose gradient is no more than rounding error moves by whole steps of the rate.
OPTIONS: dict[str, Any] = {
    "optimizer": replace(OPTIMIZER, eps=1e-5),
    "objective": PolicyObjective(LOSS),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@cache
def samples(kind: str) -> list[Sample]:
    """Samples, with the experts of all tokens where replay is asked for: any, or the first two."""
    found = [
        replace(s, old_log_probs=np.full(s.response_ids.size, -4.5, np.float32), ref_log_probs=None)
        for s in routed(make_samples(GROUPS, seed=0), SHAPE, seed=0)
    ]
    if kind == "own":
        return [replace(s, routed_experts=None) for s in found]
    if kind == "idle":
        experts = np.arange(MOE["num_experts_per_tok"])
        shapes = [
            (s.prompt_ids.size + s.response_ids.size - 1, SHAPE[0], experts.size) for s in found
        ]
        return [
            replace(s, routed_experts=np.broadcast_to(experts, shape).astype(np.int16))
            for s, shape in zip(found, shapes, strict=True)
        ]
    return found


def one_step(
    ranks: Any,
    path: Path,
    size: int,
    layout: dict[str, Any],
    kind: str,
    megatron: MegatronConfig,
    **others: Any,
) -> Any:
    """Log-probs of the first rank, then metrics, weights and state after one step."""
    objective = PolicyObjective(replace(LOSS, kl_loss_coef=0.0))
    options = OPTIONS | {"objective": objective, "megatron": megatron, **others}
    steps = [uneven(samples(kind), data_parallel_size(size, layout), seed=0)]
    results = ranks.run("megatron_scores_and_trains", str(path), layout, options, steps, size=size)
    scores, [metrics], weights, _ = results[0]
    return scores, metrics, weights, assembled(box for *_, boxes in results for box in boxes)


def assert_same_step(found: Any, expected: Any) -> None:
    """Moments after one step are gradients and their squares."""
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=1e-5)
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-6)
    assert largest_difference(found[2], expected[2]) < 1e-5
    for group in GROUPS_OF_STATE:
        assert largest_difference(found[3][group], expected[3][group]) < 1e-5, group


@pytest.mark.parametrize(
    ("name", "size", "layout", "kind", "settings"),
    [
        ("qwen3_moe", 1, {}, "own", ("grouped", "both", "fused")),
        ("qwen3_moe", 1, {}, "replayed", ("grouped, full",)),
        pytest.param("qwen3_moe", 2, {EP: 2}, "own", ("grouped", "both"), marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe", 2, {EP: 2}, "replayed", ("both, selective",), marks=pytest.mark.slow
        ),
        # One of the two ranks has no token.
        ("qwen3_moe", 2, {EP: 2}, "idle", ("grouped", "both")),
        ("qwen3", 1, {}, "own", ("fused", "both")),
        pytest.param(
            "qwen3_moe", 4, {TP: 2, EP: 2, SP: True}, "own", ("both",), marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_moe_raw", 4, {PP: 2, EP: 2}, "own", ("grouped",), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_step_is_that_of_experts_one_by_one(
    rank_server: RankServer,
    root: Path,
    name: str,
    size: int,
    layout: dict[str, Any],
    kind: str,
    settings: tuple[str, ...],
) -> None:
    path, ranks = save_megatron_model(name, root), rank_server.shared(size)
    expected = one_step(ranks, path, size, layout, kind, ONE_BY_ONE)
    assert np.isfinite(expected[1]["actor/grad_norm"])
    for setting in settings:
        assert_same_step(one_step(ranks, path, size, layout, kind, SETTINGS[setting]), expected)


@pytest.mark.parametrize(
    ("size", "layout", "kind", "settings"),
    [
        (2, {EP: 2}, "own", ONE_BY_ONE),
        (2, {EP: 2}, "replayed", BOTH),
        (2, {EP: 2}, "idle", SETTINGS["both, selective"]),
        pytest.param(4, {TP: 2, EP: 2, SP: True}, "own", BOTH, marks=pytest.mark.slow),
        pytest.param(4, {EP: 4}, "replayed", SETTINGS["grouped, full"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_step_is_the_same_when_deepep_exchanges_the_tokens(
    rank_server: RankServer,
    root: Path,
    size: int,
    layout: dict[str, Any],
    kind: str,
    settings: MegatronConfig,
) -> None:
    path, ranks = save_megatron_model("qwen3_moe", root), rank_server.shared(size)
    expected = one_step(ranks, path, size, layout, kind, settings)
    found = one_step(ranks, path, size, layout, kind, settings, deepep=True)
    assert_same_step(found, expected)


@pytest.mark.slow
def test_a_checkpoint_moves_between_the_forms(rank_server: RankServer, root: Path) -> None:
    path, ranks, layout = save_megatron_model("qwen3_moe", root), rank_server.shared(2), {EP: 2}
    counts = {"step": 1, "nonfinite_steps": 0, "optimizer_step": 1}
    options = {"optimizer": OPTIONS["optimizer"], "objective": SFTObjective()}
    steps = [uneven(make_samples(GROUPS, seed=i), 2, seed=i) for i in range(2)]
    forms = [options | {"megatron": megatron} for megatron in (ONE_BY_ONE, GROUPED)]
    for first, second in (forms, forms[::-1]):
        expected = ranks.run("megatron_trains", str(path), layout, first, steps, size=2)
        part = ranks.run("megatron_trains", str(path), layout, first, steps[:1], size=2)
        saved = assembled(box for *_, boxes in part for box in boxes)
        resumed = ranks.run(
            "megatron_resumes", str(path), {}, second, counts, saved, steps[1:], size=2
        )
        assert resumed[0][0][0] == pytest.approx(expected[0][0][1], rel=1e-5, abs=1e-6)
        assert largest_difference(resumed[0][1], expected[0][1]) < 1e-5


@pytest.mark.slow
def test_adapters_learn_next_to_grouped_experts(rank_server: RankServer, root: Path) -> None:
    path, ranks = save_megatron_model("qwen3_moe", root), rank_server.shared(2)
    steps = [uneven(samples("own"), 2, seed=0)] * 2
    options = {
        "optimizer": OPTIONS["optimizer"],
        "objective": SFTObjective(),
        "lora": LoRAConfig(rank=4, alpha=8),
    }
    expected, found = (
        ranks.run(
            "megatron_trains", str(path), {EP: 2}, options | {"megatron": megatron}, steps, size=2
        )[0]
        for megatron in (ONE_BY_ONE, BOTH)
    )
    assert found[0][1] == pytest.approx(expected[0][1], rel=1e-5, abs=1e-6)
    assert largest_difference(found[1], expected[1]) < 1e-5


@pytest.mark.slow
def test_bfloat16_learns(rank_server: RankServer, root: Path) -> None:
    path, ranks = save_megatron_model("qwen3_moe", root), rank_server.shared(2)
    steps = [uneven(make_samples(GROUPS[:1], seed=0), 2, seed=0)] * 6
    options = {
        "optimizer": replace(OPTIMIZER, lr=3e-3, grad_clip=1.0, lr_warmup_steps=0),
        "objective": SFTObjective(),
        "dtype": torch.bfloat16,
        "megatron": BOTH,
    }
    metrics, weights, _ = ranks.run("megatron_trains", str(path), {EP: 2}, options, steps, size=2)[
        0
    ]
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"] - 0.3
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "setting", "device", "expected"),
    [
        ("qwen3_moe", "auto", "cuda", True),
        ("qwen3_moe", "auto", "cpu", False),
        ("qwen3_moe", True, "cpu", True),
        ("qwen3_moe", False, "cuda", False),
        ("qwen3", "auto", "cuda", False),
        ("qwen3", True, "cuda", False),
    ],
)
def test_experts_are_grouped_on_cuda(name: str, setting: Any, device: str, expected: bool) -> None:
    config, architecture = MegatronConfig(grouped_gemm=setting), Architecture(CONFIGS[name])
    assert (
        has_grouped_experts(config, architecture, device_type=device, dtype=torch.bfloat16)
        == expected
    )


def test_experts_of_odd_sizes_are_not_grouped() -> None:
    sizes: dict[str, Any] = SIZES | MOE | {"moe_intermediate_size": 44}
    architecture = Architecture(Qwen3MoeConfig(**sizes))
    options: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16}
    assert not has_grouped_experts(MegatronConfig(), architecture, **options)
    with pytest.raises(ConfigError) as error:
        has_grouped_experts(MegatronConfig(grouped_gemm=True), architecture, **options)
    assert str(error.value) == (
        "grouped_gemm is True; expected false for hidden_size 64 and moe_intermediate_size 44, of which one is not a "
        "multiple of 8, as torch.bfloat16 needs"
    )
    options = {"device_type": "cuda", "dtype": torch.float32}
    assert has_grouped_experts(MegatronConfig(grouped_gemm=True), architecture, **options)
    assert not has_grouped_experts(MegatronConfig(), architecture, **options)


def test_grouped_products_need_torch_2_10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    architecture = Architecture(CONFIGS["qwen3_moe"])
    options: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16}
    assert not has_grouped_experts(MegatronConfig(), architecture, **options)
    with pytest.raises(
        ConfigError, match=r"grouped_gemm is True; expected auto or false before torch 2\.10"
    ):
        has_grouped_experts(MegatronConfig(grouped_gemm=True), architecture, **options)


def test_swiglu_is_fused_on_cuda() -> None:
    fused = [
        (own, device)
        for own in ("auto", True, False)
        for device in ("cuda", "cpu")
        if fusion_options(
            MegatronConfig(bias_activation_fusion=own), device_type=device, has_te=False
        )["bias_activation_fusion"]
    ]
    assert fused == [("auto", "cuda"), (True, "cuda"), (True, "cpu")]
    with pytest.raises(
        ConfigError, match="grouped_gemm is 'on'; expected one of auto, true, false"
    ):
        MegatronConfig(grouped_gemm="on")  # pyright: ignore[reportArgumentType]


def test_passes_of_grouped_experts_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """By fake tensors, which have shapes, types and devices: a rank with tokens, and one without."""
    options = fusion_options(MegatronConfig(), device_type="cuda", has_te=False)
    options |= dispatcher_options(1, device_type="cuda", dtype=torch.bfloat16)
    dtype = torch.bfloat16
    with megatron_runtime(torch.device("cuda")):
        config = transformer_config(
            Architecture(CONFIGS["qwen3_moe"]), ParallelConfig(), options, dtype=dtype
        )
    assert config.bias_activation_fusion
    monkeypatch.setattr("torch.cuda.current_device", lambda: torch.device("cuda", 0))
    undivided = SimpleNamespace(expt_tp=SimpleNamespace(size=lambda: 1))
    # Kernels of torch.compile are not made.
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        experts = GroupedExperts(4, config, undivided)
        assert experts.weight1.device.type == "cuda"
        for counts in ([3, 0, 4, 1], [0, 0, 0, 0]):
            tokens_ND = torch.empty(sum(counts), 64, dtype=dtype, device="cuda")
            output_ND, bias = experts(
                tokens_ND, torch.tensor(counts), torch.empty(sum(counts), device="cuda")
            )
            assert bias is None
            assert (output_ND.device, output_ND.dtype, output_ND.shape) == (
                tokens_ND.device,
                dtype,
                tokens_ND.shape,
            )
        # Fake tensors have no backward pass on CUDA; these are its calls for the second product.
        ends_E = torch.empty(4, dtype=torch.int32, device="cuda")
        grad_ND, inner_NF = (torch.empty(8, size, dtype=dtype, device="cuda") for size in (64, 48))
        assert grouped_mm(grad_ND, experts.weight2, offs=ends_E).shape == inner_NF.shape
        assert grouped_mm(grad_ND.T, inner_NF, offs=ends_E).shape == experts.weight2.shape


@pytest.mark.slow
def test_the_compiled_swiglu_is_the_plain_one() -> None:
    """Compiled by torch for CPU; ranks of other tests call it without."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    with megatron_runtime(torch.device("cuda")):
        for num_tokens in (40, 17, 96):
            inputs = [torch.randn(num_tokens, 96), torch.rand(num_tokens, 1)]
            both: list[list[torch.Tensor]] = []
            for is_fused in (True, False):
                x, probs = (t.clone().requires_grad_() for t in inputs)
                gate, up = x.chunk(2, dim=-1)
                output = (
                    weighted_bias_swiglu_impl(x, None, probs)
                    if is_fused
                    else silu(gate) * up * probs
                )
                output.square().sum().backward()
                assert x.grad is not None
                assert probs.grad is not None
                both.append([output.detach(), x.grad, probs.grad])
            torch.testing.assert_close(*both, rtol=1e-5, atol=1e-5)
