"""The head's log-probabilities and entropies against logits written out in float64."""

import pytest
import torch

from gcore_trainer import token_scores

NUM_TOKENS, HIDDEN_SIZE, VOCAB_SIZE = 300, 64, 1000
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_scores_and_gradients_are_those_of_whole_logits(
    device: str, dtype: torch.dtype, temperature: float
) -> None:
    torch.manual_seed(0)
    given = [
        torch.randn(NUM_TOKENS, HIDDEN_SIZE),
        torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * HIDDEN_SIZE**-0.5,
    ]
    hidden, weight = (x.to(device, dtype).requires_grad_() for x in given)
    targets = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,))
    advantages = torch.randn(NUM_TOKENS)
    scores = token_scores(hidden, weight, targets.to(device), temperature=temperature)
    (scores.log_probs * advantages.to(device)).sum().backward()

    wide_hidden, wide_weight = (
        x.detach().double().cpu().requires_grad_() for x in (hidden, weight)
    )
    log_probs = (wide_hidden @ wide_weight.T / temperature).log_softmax(-1)
    expected = log_probs.gather(1, targets[:, None])[:, 0]
    (expected * advantages).sum().backward()

    assert scores.log_probs.dtype is torch.float32
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    pairs = [(scores.log_probs, expected), (scores.entropies, entropies)]
    pairs += [
        (x.grad, e.grad)
        for x, e in ((hidden, wide_hidden), (weight, wide_weight))
        if x.grad is not None
    ]
    assert len(pairs) == 4
    for actual, wanted in pairs:
        assert actual is not None
        assert wanted is not None
        difference = (actual - wanted.to(actual.device)).detach().abs().max()
        assert difference <= TOLERANCES[dtype] * max(1.0, float(wanted.detach().abs().max()))
