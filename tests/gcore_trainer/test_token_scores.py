"""`token_scores` against logits written out, whole and with the vocabulary divided among ranks."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from rank_pool import RankPool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gcore_trainer import token_scores
from gcore_trainer.packing.head import CPU_LOGITS, CUDA_LOGITS, Head, KeptTokens, chunk_rows

N, D, V = 23, 16, 37


def make_inputs(
    dtype: torch.dtype, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (
            torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        )

    targets = torch.randint(0, V, (N,), generator=generator)
    return random(N, D), random(V, D), random(V) if has_bias else None, targets


def make_kept(
    targets: torch.Tensor, vocab_size: int, *, seed: int
) -> tuple[KeptTokens, torch.Tensor]:
    """Sets of random sizes that hold the targets, in any order, and a mask [N, V] of what they leave out."""
    rng = np.random.default_rng(seed)
    sets: list[Any] = []
    is_left_out = torch.zeros(targets.numel(), vocab_size, dtype=torch.bool)
    for row, target in zip(is_left_out, targets.tolist(), strict=True):
        ids = rng.permutation(np.union1d(rng.permutation(vocab_size)[: rng.integers(9)], target))
        if rng.random() < 0.3:
            ids = ids[:0]
        row[:] = ids.size > 0
        row[ids.tolist()] = False
        sets.append(ids)
    counts = np.array([ids.size for ids in sets], np.int32)
    return (counts, np.concatenate(sets).astype(np.int32)), is_left_out


def written_out(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    is_left_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(hidden, weight, bias) * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if is_left_out is not None:
        logits = logits.masked_fill(is_left_out, -torch.inf)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def gradients(
    log_probs: torch.Tensor, entropies: torch.Tensor, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Of a sum in which every token and both scores have weights of their own."""
    weights = torch.arange(1, N + 1, dtype=log_probs.dtype) / N
    loss = (weights * log_probs).sum() + (weights.flip(0) * entropies).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("chunk_tokens", [1, 5, N, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "changes", [{}, {"logit_scale": 0.4}, {"softcap": 3.0}, {"logit_scale": 2.5, "softcap": 5.0}]
)
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
    torch.testing.assert_close(
        (scores.log_probs, scores.entropies), expected, rtol=1e-12, atol=1e-12
    )
    actual_grads = gradients(scores.log_probs, scores.entropies, inputs)
    for actual, wanted in zip(actual_grads, gradients(*expected, inputs), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-11, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(1, 11), st.integers(1, 12)),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    logit_scale=st.sampled_from([0.125, 1.0]),
    softcap=st.sampled_from([None, 2.0, 30.0]),
    entropy_grad=st.booleans(),
    bias=st.sampled_from(["none", "finite", "some -inf"]),
    is_truncated=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_head(
    sizes: tuple[int, int, int, int],
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    entropy_grad: bool,
    bias: str,
    is_truncated: bool,
    seed: int,
) -> None:
    """Any sizes and chunks, any upstream gradients, sets that tokens were drawn from, and a bias that forbids some."""
    (num_tokens, width, vocab_size, chunk), generator = sizes, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = (random(n, width).requires_grad_() for n in (num_tokens, vocab_size))
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    has_ban = bias == "some -inf" and softcap is None
    bias_V = None if bias == "none" else random(vocab_size)
    if bias_V is not None:
        bias_V[torch.rand(vocab_size, generator=generator) < (0.3 if has_ban else 0.0)] = -torch.inf
        bias_V[targets] = 0.5
    options: dict[str, Any] = {"logit_scale": logit_scale, "softcap": softcap}
    logits = torch.nn.functional.linear(hidden, weight, bias_V) * logit_scale
    logits = (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature
    if is_truncated:
        options["kept"], is_left_out = make_kept(targets, vocab_size, seed=seed)
        logits = logits.masked_fill(is_left_out, -torch.inf)
    log_softmax = logits.log_softmax(-1)
    # xlogy: a token that cannot be drawn adds nothing.
    entropies = -(log_softmax.exp() * log_softmax.clamp(min=-1e9)).sum(-1)
    expected = [log_softmax.gather(1, targets[:, None])[:, 0], entropies]
    options |= {"bias_V": bias_V, "temperature": temperature, "entropy_grad": entropy_grad}
    scores = token_scores(hidden, weight, targets, **options, max_logits=chunk * vocab_size)
    actual = [scores.log_probs, scores.entropies]
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    upstream = [random(num_tokens), random(num_tokens)]
    last = 2 if entropy_grad else 1
    grads = torch.autograd.grad(actual[:last], [hidden, weight], upstream[:last])
    wanted = torch.autograd.grad(expected[:last], [hidden, weight], upstream[:last])
    torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("num_tokens", "vocab_size"),
    [(0, 10), (1, 64), (16_384, 151_936), (65_536, 32_000), (7, 10**9)],
)
@pytest.mark.parametrize(("device", "limit"), [("cpu", CPU_LOGITS), ("cuda", CUDA_LOGITS)])
def test_rows_of_a_chunk(num_tokens: int, vocab_size: int, device: str, limit: int) -> None:
    rows = chunk_rows(num_tokens, vocab_size, device)
    assert rows == 1 or rows * vocab_size <= limit
    # No more chunks than the budget of logits asks for, but for rows that are multiples of 128.
    assert -(-num_tokens // rows) <= -(-num_tokens // max(1, limit // vocab_size - 127))


def test_a_gpu_gets_large_chunks_of_equal_size() -> None:
    assert chunk_rows(16_384, 151_936, "cuda") == 1664
    assert chunk_rows(16_384, 151_936, "cpu") == 110
    assert chunk_rows(2000, 151_936, "cuda") == 1024
    assert chunk_rows(2000, 8, "cuda") == 2048


def fake_addmm(
    given: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Check what the CUDA kernel of ``addmm.dtype_out`` does, which sums bfloat16 products in float32."""
    assert given.dtype in (out_dtype, a.dtype)
    assert (out.dtype, a.dtype, out_dtype) == (out_dtype, b.dtype, torch.float32)
    assert out.shape == given.shape == (a @ b).shape
    return out


class Recorder(TorchDispatchMode):
    """Names of the operations, with the types of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Fake tensors of torch 2.11 compute this one by the rule of the product without a type, which fails.
        run = fake_addmm if func is torch.ops.aten.addmm.dtype_out else func
        out = run(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.found.append((str(func), out.dtype))
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_on_a_gpu_nothing_waits_and_logits_are_float32(
    dtype: torch.dtype,
    master: bool,
    entropy_grad: bool,
    softcap: float | None,
    is_truncated: bool,
) -> None:
    """Fake CUDA tensors refuse what depends on values, such as boolean indices, and check each operation's types."""
    kept: KeptTokens | None = None
    if is_truncated:
        kept = np.array([0, 2] * 150, np.int32), np.arange(300, dtype=np.int32)
    with FakeTensorMode(), Recorder() as recorder:
        hidden = torch.empty(300, 64, device="cuda", dtype=dtype)
        weight = torch.empty(151_936, 64, device="cuda", dtype=torch.float32 if master else dtype)
        bias = torch.empty(151_936, device="cuda", dtype=weight.dtype)
        targets = torch.empty(300, device="cuda", dtype=torch.int64)
        scores = token_scores(
            hidden, weight, targets, bias_V=bias, temperature=0.9, softcap=softcap, kept=kept
        )
        assert scores.log_probs.dtype == scores.entropies.dtype == torch.float32
        head = Head(temperature=0.9, scale=1.0, softcap=softcap, vocab=None, chunk=128, kept=kept)
        rows, entropies = (
            torch.empty(300, device="cuda"),
            scores.entropies if entropy_grad else None,
        )
        grads = head.gradients(
            hidden, weight, bias, targets, rows, rows, entropies, rows, True, True
        )
    assert [grad.dtype for grad in grads if grad is not None] == [
        dtype,
        torch.float32,
        torch.float32,
    ]
    assert [grad.device.type for grad in grads if grad is not None] == ["cuda"] * 3
    used = {name for name, _ in recorder.found}
    # The products of half precision that add to float32, in place.
    if dtype == torch.bfloat16:
        assert {"aten.mm.dtype", "aten.addmm.dtype_out", "aten.mm.out"} <= used
        assert "aten.mm.default" not in used
    else:
        assert {"aten.mm.default", "aten.addmm_.default", "aten.mm.out"} <= used


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_float32_head_gets_a_gradient_that_was_never_rounded(entropy_grad: bool) -> None:
    """Where the products are in bfloat16, a master copy's gradient is their sum in float32."""
    hidden, weight, _, targets = make_inputs(torch.bfloat16, has_bias=False)
    wide = weight.detach().float().requires_grad_()
    options: dict[str, Any] = {"entropy_grad": entropy_grad, "max_logits": 5 * V}
    scores = [token_scores(hidden, own, targets, **options) for own in (weight, wide)]
    torch.testing.assert_close(scores[0].log_probs, scores[1].log_probs, rtol=0, atol=0)
    rounded, whole = (
        torch.autograd.grad(s.log_probs.sum(), w)[0]
        for s, w in zip(scores, (weight, wide), strict=True)
    )
    assert whole.dtype == torch.float32
    torch.testing.assert_close(rounded, whole.bfloat16(), rtol=0, atol=0)
    assert not torch.equal(whole, whole.bfloat16().float())


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
@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_vocabulary_divided_among_ranks(
    ranks: RankPool, softcap: float | None, is_truncated: bool
) -> None:
    """Four ranks of ten rows each: the last three rows are padding, and hold rubbish."""
    hidden, weight, _, targets = make_inputs(torch.float64, has_bias=False)
    kept: KeptTokens | None = None
    options: dict[str, Any] = {"softcap": softcap}
    if is_truncated:
        kept, options["is_left_out"] = make_kept(targets, V, seed=0)
    expected = written_out(hidden, weight, None, targets, 1.3, **options)
    grad_hidden, grad_weight = gradients(*expected, [hidden, weight])
    padded = torch.cat([weight.detach(), torch.full((3, D), 50.0, dtype=torch.float64)])
    parts = [padded[a:b] for a, b in pairwise([0, 10, 20, 30, 40])]
    arguments = hidden.detach(), parts, targets, V, 1.3, softcap, kept
    found = ranks.run("score_part_of_vocabulary", *arguments, size=4)
    for rank, (log_probs, entropies, own_hidden, own_weight) in enumerate(found):
        torch.testing.assert_close((log_probs, entropies), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(own_hidden, grad_hidden, rtol=1e-11, atol=1e-12)
        rows = min(10, V - 10 * rank)
        torch.testing.assert_close(
            own_weight[:rows], grad_weight[10 * rank :][:rows], rtol=1e-11, atol=1e-12
        )
        assert not own_weight[rows:].any()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; run by pytest -m gpu there"
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_on_a_cuda_device(dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
    """Three chunks of a vocabulary of 152k, against logits written out in float64 from the same inputs."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape: dict[str, Any] = {"device": "cuda", "generator": generator}
    hidden = torch.randn(384, 64, **shape).to(dtype).requires_grad_()
    weight = torch.randn(151_936, 64, **shape).to(dtype).requires_grad_()
    targets = torch.randint(0, 151_936, (384,), **shape)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scores = token_scores(
            hidden,
            weight,
            targets,
            temperature=0.8,
            softcap=softcap,
            entropy_grad=True,
            max_logits=128 * 151_936,
        )
        weights = torch.linspace(0, 1, 384, device="cuda")
        loss = (weights * scores.log_probs).sum() + (weights.flip(0) * scores.entropies).sum()
        actual = torch.autograd.grad(loss, [hidden, weight])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = wide[0] @ wide[1].T
    log_softmax = (
        (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / 0.8
    ).log_softmax(-1)
    expected = log_softmax.gather(1, targets[:, None])[:, 0]
    entropies = -(log_softmax.exp() * log_softmax).sum(-1)
    # The logits are never rounded, in either type.
    torch.testing.assert_close(scores.log_probs.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.entropies.double(), entropies, rtol=1e-4, atol=1e-4)
    wanted = torch.autograd.grad(
        (weights * expected).sum() + (weights.flip(0) * entropies).sum(), wide
    )
    for own, other in zip(actual, wanted, strict=True):
        assert (own.double() - other).norm() < tolerance * other.norm()
