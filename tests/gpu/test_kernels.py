"""Triton's kernels on the GPU against torch's operations; that they are built, and used."""

from pathlib import Path

import pytest
import torch
from gpu_cases import ON_CUDA, load_packed
from torch.utils.checkpoint import checkpoint

from gcore_trainer.packing import head, layer_kernels, logit_kernels
from gcore_trainer.packing.accumulating_linear import accumulate_gradients

pytestmark = ON_CUDA
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, device="cuda", generator=torch.Generator("cuda").manual_seed(sum(shape))
    )


def test_layers_use_them(folders: dict[str, Path]) -> None:
    assert logit_kernels.compile_on(torch.device("cuda"))
    for name in ("qwen2", "qwen3"):
        model = load_packed(folders[name], "cuda", torch.bfloat16).model
        fused = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
        kind = name.title()
        assert {f"{kind}RMSNorm", f"{kind}MLP", f"{kind}Attention"} <= fused


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("unit", ["swiglu", "geglu"])
def test_gated_units(unit: str, dtype: torch.dtype) -> None:
    gate, up = (
        x.to(dtype).requires_grad_() for x in (random(3, 1030), random(1030, 3).T.contiguous())
    )
    found = getattr(layer_kernels, unit)(gate, up)
    silu, gelu = torch.nn.functional.silu(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    expected = (silu if unit == "swiglu" else gelu) * up
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    weights = random(3, 1030).to(dtype)
    for a, b in zip(
        *(torch.autograd.grad((x * weights).sum(), (gate, up)) for x in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("width", [1000, 151_936])
def test_moments_and_gradients_of_logits(width: int) -> None:
    logits = 5 * random(9, width)
    exact = logits.double()
    for a, b in zip(
        logit_kernels.moments(logits), head.moments_(exact.clone(), has_bias=False), strict=True
    ):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)
    columns, pulls = torch.arange(9, device="cuda"), random(9)
    log_sums, probs = exact.logsumexp(-1), exact.softmax(-1)
    entropies = log_sums - (probs * exact).sum(-1)
    arguments = logits, columns, log_sums.float(), pulls, entropies.float(), pulls
    found = [logit_kernels.gradient(*arguments, dtype) for dtype in DTYPES]
    wanted = probs - torch.nn.functional.one_hot(columns, width)
    wanted += probs * (exact - log_sums[:, None] + entropies[:, None])
    wanted *= pulls[:, None]
    torch.testing.assert_close(found[0].double(), wanted, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1], found[0].bfloat16())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gradients_of_linear_layers_are_added_up_in_float32(
    dtype: torch.dtype, has_bias: bool
) -> None:
    """Of two passes, one of them checkpointed, on top of what is there."""
    layer = torch.nn.Linear(72, 40, bias=has_bias, device="cuda", dtype=dtype)
    for parameter in layer.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    layer.forward = accumulate_gradients(layer)
    totals = [torch.ones_like(parameter, dtype=torch.float64) for parameter in layer.parameters()]
    for length, is_checkpointed in ((33, False), (20, True)):
        x, grad = (random(1, length, width).to(dtype).requires_grad_() for width in (72, 40))
        out = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        out.backward(grad)
        torch.testing.assert_close(out, torch.nn.functional.linear(x, layer.weight, layer.bias))
        torch.testing.assert_close(x.grad, grad @ layer.weight)
        totals[0] += grad[0].double().T @ x[0].double()
        if has_bias:
            totals[1] += grad[0].double().sum(0)
    for parameter, total in zip(layer.parameters(), totals, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), total, rtol=1e-5, atol=1e-4)
