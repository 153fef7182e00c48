"""`token_scores` against logits written out, whole and with the vocabulary divided among ranks."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from rank_pool import RankPool

from gcore_trainer import token_scores

N, D, V = 23, 16, 37


def make_inputs(dtype: torch.dtype, *, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets = torch.randint(0, V, (N,), generator=generator)
    return random(N, D), random(V, D), random(V) if has_bias else None, targets


def written_out(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def gradients(log_probs: torch.Tensor, entropies: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a sum in which every token and both scores have weights of their own."""
    weights = torch.arange(1, N + 1, dtype=log_probs.dtype) / N
    loss = (weights * log_probs).sum() + (weights.flip(0) * entropies).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("chunk_tokens", [1, 5, N, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("changes", [{}, {"logit_scale": 0.4}, {"softcap": 3.0}, {"logit_scale": 2.5, "softcap": 5.0}])
def test_scores_and_gradients(chunk_tokens: int, has_bias: bool, changes: dict[str, Any]) -> None:
    hidden, weight, bias, targets = make_inputs(torch.float64, has_bias=has_bias)
    inputs = [x for x in (hidden, weight, bias) if x is not None]
    expected = written_out(hidden, weight, bias, targets, 0.7, **changes)
    scores = token_scores(
        hidden,
        weight,
        targets,
        bias_V=bias,
        temperature=0.7,
        entropy_grad=True,
        max_logits=chunk_tokens * V,
        **changes,
    )
    torch.testing.assert_close((scores.log_probs, scores.entropies), expected, rtol=1e-12, atol=1e-12)
    actual_grads = gradients(scores.log_probs, scores.entropies, inputs)
    for actual, wanted in zip(actual_grads, gradients(*expected, inputs), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)


def test_entropies_have_no_gradient_unless_asked() -> None:
    hidden, weight, _, targets = make_inputs(torch.float32, has_bias=False)
    scores = token_scores(hidden, weight, targets)
    assert not scores.entropies.requires_grad
    assert scores.log_probs.requires_grad


def test_bfloat16_sums_in_float32() -> None:
    hidden, weight, _, targets = make_inputs(torch.bfloat16, has_bias=False)
    scores = token_scores(hidden, weight, targets, max_logits=3 * V)
    assert scores.log_probs.dtype == torch.float32
    logits = (hidden @ weight.T).float()
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(scores.log_probs, expected, rtol=1e-5, atol=1e-5)
    [actual] = torch.autograd.grad(scores.log_probs.sum(), weight)
    [wanted] = torch.autograd.grad(expected.sum(), weight)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_a_vocabulary_divided_among_ranks(ranks: RankPool, softcap: float | None) -> None:
    """Four ranks of ten rows each: the last three rows are padding, and hold rubbish."""
    hidden, weight, _, targets = make_inputs(torch.float64, has_bias=False)
    expected = written_out(hidden, weight, None, targets, 1.3, softcap=softcap)
    grad_hidden, grad_weight = gradients(*expected, [hidden, weight])
    padded = torch.cat([weight.detach(), torch.full((3, D), 50.0, dtype=torch.float64)])
    parts = [padded[a:b] for a, b in pairwise([0, 10, 20, 30, 40])]
    found = ranks.run("score_part_of_vocabulary", hidden.detach(), parts, targets, V, 1.3, softcap, size=4)
    for rank, (log_probs, entropies, own_hidden, own_weight) in enumerate(found):
        torch.testing.assert_close((log_probs, entropies), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_hidden, grad_hidden, rtol=1e-11, atol=1e-12)
        rows = min(10, V - 10 * rank)
        torch.testing.assert_close(own_weight[:rows], grad_weight[10 * rank :][:rows], rtol=1e-11, atol=1e-12)
        assert not own_weight[rows:].any()
