"""The head's log-probabilities and entropies against logits written out in float64."""

from typing import Any

import pytest
import torch
from gpu_cases import ON_CUDA

from gcore_trainer import token_scores
from gcore_trainer.packing.fused_head import FusedHead

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 300, 64, 1000
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_and_gradients_are_those_of_whole_logits(device: str, dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    given = [torch.randn(NUM_TOKENS, HIDDEN_SIZE), torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * HIDDEN_SIZE**-0.5]
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in given)
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,))
    advantages = torch.randn(NUM_TOKENS)
    scores = token_scores(hidden, weight, targets.to(device), temperature=temperature)
    (scores.log_probs * advantages.to(device)).sum().backward()

    wide_hidden, wide_weight = (x.detach().double().cpu().requires_grad_() for x in (hidden, weight))
    log_probs = (wide_hidden @ wide_weight.T / temperature).log_softmax(-1)
    expected = log_probs.gather(1, targets[:, None])[:, 0]
    (expected * advantages).sum().backward()

    assert scores.log_probs.dtype is torch.float32
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    pairs = [(scores.log_probs, expected), (scores.entropies, entropies)]
    pairs += [(x.grad, e.grad) for x, e in ((hidden, wide_hidden), (weight, wide_weight)) if x.grad is not None]
    assert len(pairs) == 4
    for actual, wanted in pairs:
        assert actual is not None
        assert wanted is not None
        difference = (actual - wanted.to(actual.device)).detach().abs().max()
        assert difference <= TOLERANCES[dtype] * max(1.0, float(wanted.detach().abs().max()))


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5, "logit_scale": 0.25}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_the_fused_kernel_gives_the_log_probs_of_token_scores(
    device: str, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    pytest.importorskip("cut_cross_entropy", reason="pip install 'gcore-trainer[fused]'")
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, device=device, dtype=dtype)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, device=device).mul_(HIDDEN_SIZE**-0.5).to(dtype)
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), device=device)
    found = FusedHead(dtype=dtype, **settings).log_probs(hidden, weight, targets)
    expected = token_scores(hidden, weight, targets, **settings).log_probs
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
