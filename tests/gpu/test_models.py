"""Packed models against transformers; shared prompts against unshared ones; bfloat16 against float32."""

from pathlib import Path

import pytest
import torch
from gpu_cases import MODELS, SAMPLES, gradients, load_packed, plain_log_probs


@pytest.mark.parametrize("name", MODELS)
def test_log_probs_are_those_of_transformers(
    device: str, folders: dict[str, Path], name: str
) -> None:
    expected = plain_log_probs(folders[name], SAMPLES)
    [exact] = load_packed(folders[name], device).log_probs([SAMPLES])
    for a, e in zip(exact, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(a), e, rtol=1e-4, atol=1e-4)
    [rounded] = load_packed(folders[name], device, torch.bfloat16).log_probs([SAMPLES])
    differences = torch.cat(
        [(torch.from_numpy(a) - e).abs() for a, e in zip(rounded, expected, strict=True)]
    )
    # A router near a tie may choose another expert.
    assert differences.mean() < 0.02
    assert differences.quantile(0.95) < 0.1


@pytest.mark.parametrize("name", MODELS)
def test_shared_prompts_give_the_same_scores_and_gradients(
    device: str, folders: dict[str, Path], name: str
) -> None:
    shared, unshared = (
        load_packed(folders[name], device, share_prefix=share) for share in (True, False)
    )
    [a], [b] = shared.log_probs([SAMPLES]), unshared.log_probs([SAMPLES])
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(torch.from_numpy(x), torch.from_numpy(y), rtol=1e-4, atol=1e-4)
    mine, other = gradients(shared, SAMPLES), gradients(unshared, SAMPLES)
    assert (mine - other).norm() <= 1e-4 * other.norm()
    assert shared.num_computed_tokens < unshared.num_computed_tokens


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "window"])
def test_gradients_in_bfloat16_point_the_same_way(
    device: str, folders: dict[str, Path], name: str
) -> None:
    exact = gradients(load_packed(folders[name], "cpu"), SAMPLES)
    rounded = gradients(load_packed(folders[name], device, torch.bfloat16), SAMPLES)
    assert torch.cosine_similarity(exact, rounded, dim=0) > 0.999


def test_recomputed_layers_give_the_same_gradients(device: str, folders: dict[str, Path]) -> None:
    path = folders["qwen2"]
    kept, recomputed = (load_packed(path, device, gradient_checkpointing=c) for c in (False, True))
    a, b = gradients(kept, SAMPLES), gradients(recomputed, SAMPLES)
    assert (a - b).norm() <= 1e-5 * a.norm()
