"""`FusedHead` against `token_scores`, with a plain function in place of the library's kernel."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gcore_trainer import ConfigError, MissingExtraError, PackedModel, Sample, token_scores
from gcore_trainer.packing import fused_head
from gcore_trainer.packing.fused_head import FusedHead

N, D, V = 23, 16, 37
SAMPLES = [Sample(prompt_ids=np.arange(2, 9), response_ids=np.arange(3, 3 + length)) for length in (5, 1, 8)]


def plain_kernel(*, e: torch.Tensor, c: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Compute what `cut_cross_entropy.cce_lse_forward.cce_lse_forward_kernel` does: sums are in float32."""
    assert e.is_contiguous()
    assert e.dtype is c.dtype
    logits = e.float() @ c.float().T
    return (logits if softcap is None else torch.tanh(logits / softcap) * softcap).logsumexp(-1)


def head(dtype: torch.dtype = torch.float32, **settings: Any) -> FusedHead:
    return FusedHead(dtype=dtype, kernel=plain_kernel, **settings)


def inputs(dtype: torch.dtype, num_tokens: int = N) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, D, generator=generator).to(dtype) for n in (num_tokens, V))
    return hidden, weight, torch.randint(0, V, (num_tokens,), generator=generator)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, {}),
        (torch.float32, {"temperature": 0.7, "logit_scale": 0.3}),
        (torch.float32, {"softcap": 3.0, "logit_scale": 0.3}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"temperature": 0.5, "logit_scale": 0.25}),
        (torch.bfloat16, {"softcap": 3.0, "logit_scale": 2.0}),
        (torch.float16, {"temperature": 2.0}),
    ],
)
def test_log_probs_are_those_of_token_scores(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(fused_head, "_ROWS", 10)
    hidden, weight, targets = inputs(dtype)
    found = head(dtype, **settings).log_probs(hidden, weight, targets)
    # In float32, because products in half precision are rounded on a CPU.
    expected = token_scores(hidden.float(), weight.float(), targets, **settings).log_probs
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_wider_head_is_rounded_as_in_token_scores() -> None:
    hidden, weight, targets = inputs(torch.float32)
    narrow = hidden.bfloat16()
    found = head(torch.bfloat16).log_probs(narrow, weight, targets)
    assert torch.equal(found, head(torch.bfloat16).log_probs(narrow, weight.bfloat16(), targets))


def test_no_tokens_have_no_log_probs() -> None:
    hidden, weight, targets = inputs(torch.bfloat16, 0)
    assert head(torch.bfloat16).log_probs(hidden, weight, targets).shape == (0,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": torch.float64}, "dtype is float64 with fused_head; expected float32, bfloat16, float16"),
        ({"temperature": 0.7, "dtype": torch.bfloat16}, "temperature is 0.7 with fused_head in bfloat16; expected a"),
        ({"logit_scale": 0.3, "dtype": torch.float16}, "logit_scale is 0.3 with fused_head in float16; expected a"),
        ({"softcap": 30.0, "temperature": 0.5}, "temperature is 0.5 with fused_head and a soft cap of 30.0; expected"),
        ({"has_bias": True}, "fused_head is true, and the model's head has a bias; expected false"),
    ],
)
def test_what_the_kernel_does_not_compute_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        head(**settings)


def test_a_cpu_is_refused(qwen2: Path) -> None:
    with pytest.raises(ConfigError, match="fused_head is true on device 'cpu'; expected false, or a CUDA device"):
        PackedModel.from_pretrained(qwen2, fused_head=True)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", None)
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(2, 2, bias=False))
    on_cuda = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(MissingExtraError, match=r"fused_head is true, and .* pip install 'gcore-trainer\[fused\]'"):
        FusedHead.of(model, on_cuda, dtype=torch.bfloat16)
    model = SimpleNamespace(get_output_embeddings=lambda: torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="the model's head has a bias"):
        FusedHead.of(model, on_cuda, dtype=torch.bfloat16)


def test_predictions_use_the_kernel_and_scores_do_not(qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = PackedModel.from_pretrained(qwen2)
    expected = packed.log_probs([SAMPLES])
    calls: list[int] = []

    def counted(**given: Any) -> torch.Tensor:
        calls.append(len(given["e"]))
        return plain_kernel(**given)

    monkeypatch.setattr(fused_head, "fused_kernel", lambda: counted)
    monkeypatch.setattr(FusedHead, "of", lambda _model, _placed, **settings: FusedHead(**settings))
    fused = PackedModel.from_pretrained(qwen2, fused_head=True)
    found = fused.log_probs([SAMPLES])
    assert calls == [sum(s.response_ids.size for s in SAMPLES)]
    for own, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(torch.from_numpy(own), torch.from_numpy(wanted), rtol=1e-5, atol=1e-5)
    scores = fused.score(SAMPLES)
    assert scores.log_probs.requires_grad
    assert torch.equal(scores.entropies, packed.score(SAMPLES).entropies)
    assert len(calls) == 1
