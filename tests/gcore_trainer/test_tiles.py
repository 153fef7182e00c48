"""Tiles are all that tokens see, once; and the kernels of CUDA get and give the right shapes."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_oracles import Group, groups, make_samples

from gcore_trainer.packing.block_attention import AttentionKind, has_varlen_kernel
from gcore_trainer.packing.layout import pack
from gcore_trainer.packing.row import ShortRow
from gcore_trainer.packing.tiles import (
    RowAttention,
    RowCalls,
    Tile,
    causal_tiles,
    earlier_tiles,
    row_tiles,
    scoring_of,
)

windows = st.one_of(st.none(), st.integers(1, 60))


def seen(tiles: list[Tile], num_tokens: int) -> np.ndarray:
    """How many times each query [T] meets each key [T]."""
    times = np.zeros((num_tokens, num_tokens), np.int64)
    for queries, keys, kind in tiles:
        offset = np.arange(len(keys)) - np.arange(len(queries))[:, None]
        assert kind == "all" or len(queries) == len(keys)
        is_seen = {"all": np.ones_like(offset), "until": offset <= 0, "from": offset >= 0}[kind]
        times[queries.start : queries.stop, keys.start : keys.stop] += is_seen
    return times


@settings(max_examples=100)
@given(lengths=groups, share_prefix=st.booleans(), window=windows, num_forks=st.integers(0, 6))
def test_a_row_is_cut_exactly(
    lengths: list[Group], share_prefix: bool, window: int | None, num_forks: int
) -> None:
    batch = pack(make_samples(lengths, seed=0, num_forks=num_forks), share_prefix=share_prefix)
    num_tokens = batch.input_ids.size
    expected = np.zeros((num_tokens, num_tokens), np.int64)
    for segment in batch.segments:
        keys = segment.sequence
        queries = keys[segment.context_length :]
        places, own = batch.positions[keys], batch.positions[queries, None]
        expected[queries[:, None], keys] = (places <= own) & (
            places > own - (window or num_tokens + own)
        )
    tiles = row_tiles(batch.segments, window)
    assert (seen(tiles, num_tokens) == expected).all()
    # Every query sees a key of the first call that it is in: its own.
    first = np.concatenate(
        [np.arange(t.queries.start, t.queries.stop) for t in tiles if t.seen == "until"]
    )
    assert (np.sort(first) == np.arange(num_tokens)).all()


@given(
    num_queries=st.integers(1, 30),
    num_keys=st.integers(1, 30),
    gap=st.integers(0, 30),
    window=windows,
)
def test_earlier_keys_are_cut_exactly(
    num_queries: int, num_keys: int, gap: int, window: int | None
) -> None:
    queries, keys = range(num_keys, num_keys + num_queries), range(num_keys)
    tiles = list(earlier_tiles(queries, keys, num_keys + gap, window))
    distance = num_keys + gap + np.arange(num_queries)[:, None] - np.arange(num_keys)
    expected = distance < (window or 1000)
    assert (seen(tiles, num_queries + num_keys)[num_keys:, :num_keys] == expected).all()


def test_work_under_a_window_is_that_of_the_window() -> None:
    window, length = 128, 1 << 15
    tiles = causal_tiles(range(length), window)
    scores = sum(len(t.queries) * len(t.keys) / (1 if t.seen == "all" else 2) for t in tiles)
    assert scores < length * window
    samples = make_samples([Group(4096, [40] * 64)], seed=0)
    calls = RowCalls(pack(samples).segments, device=torch.device("cpu")).of(1024, is_varlen=False)
    # The prompt's last tokens, which all branches see, are keys of one tile and not of one for each branch.
    assert sum(call.keys.num_segments * call.keys.length for call in calls) < 4 * 4096 + 3 * 64 * 40


@settings(max_examples=30)
@given(lengths=groups, share_prefix=st.booleans(), num_forks=st.integers(0, 6))
def test_short_rows_under_a_mask_are_those_of_tiles(
    lengths: list[Group], share_prefix: bool, num_forks: int
) -> None:
    samples = make_samples(lengths, seed=0, num_forks=num_forks)
    segments = pack(samples, share_prefix=share_prefix).segments
    num_tokens, cpu = sum(s.length for s in segments), torch.device("cpu")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(num_tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    masked = ShortRow(segments, device=cpu).attend(q, k, v, None)
    tiled = RowCalls(segments, device=cpu).attend(q, k, v, AttentionKind())
    torch.testing.assert_close(masked, tiled)
    weights = torch.randn_like(masked)
    expected = torch.autograd.grad((tiled * weights).sum(), (q, k, v))
    for found, gradient in zip(
        torch.autograd.grad((masked * weights).sum(), (q, k, v)), expected, strict=True
    ):
        torch.testing.assert_close(found, gradient)


class Kernels(TorchDispatchMode):
    """Every operation, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Context:
    """Keeps what autograd would."""

    def __init__(self, *needs_input_grad: bool) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@pytest.mark.parametrize("window", [None, 8, 64], ids=str)
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "softcap"),
    [
        (torch.bfloat16, 64, None),
        (torch.float16, 128, None),
        (torch.bfloat16, 12, None),
        (torch.float32, 64, None),
        (torch.bfloat16, 64, 30.0),
    ],
    ids=["bf16", "fp16", "odd", "fp32", "softcap"],
)
def test_what_cuda_kernels_are_given_and_give(
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None,
    share_prefix: bool,
    has_sinks: bool,
    window: int | None,
) -> None:
    """Arguments and shapes are checked without a device, and nothing is read from one."""
    samples = make_samples(
        [Group(100, [30, 1, 40, 70]), Group(20, [9]), Group(5, [12, 13])], seed=0
    )
    batch = pack(samples, share_prefix=share_prefix)
    num_tokens = batch.input_ids.size
    with FakeTensorMode():
        q, k = (
            torch.empty((num_tokens, heads, head_dim), dtype=dtype, device="cuda")
            for heads in (4, 2)
        )
        sinks = torch.empty(4, dtype=dtype, device="cuda") if has_sinks else None
        kind = AttentionKind(sliding_window=window, softcap=softcap, sinks=sinks)
        is_varlen = has_varlen_kernel(q, k, softcap)
        calls = RowCalls(batch.segments, device=torch.device("cuda")).of(
            window, is_varlen=is_varlen
        )
        context: Any = Context(True, True, True, has_sinks, False, False)
        with Kernels() as kernels:
            # Autograd itself would ask for the device.
            out = RowAttention.forward(context, q, k, k, sinks, calls, scoring_of(kind, head_dim))
            gradients = RowAttention.backward(context, torch.empty_like(out))
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert [g.shape for g in gradients[:3] if g is not None] == [q.shape, k.shape, k.shape]
    assert {g.dtype for g in gradients if g is not None} == {dtype}
    for _, args, _ in kernels.seen:
        assert all(x.device.type == "cuda" for x in args if isinstance(x, torch.Tensor) and x.dim())
    # Nothing waits for the device.
    names = [str(func) for func, _, _ in kernels.seen]
    assert not [
        n
        for n in names
        if any(x in n for x in ("_local_scalar", "nonzero", "masked_select", "_to_copy.cpu"))
    ]
    forward = [
        (a, kw)
        for func, a, kw in kernels.seen
        if func is torch.ops.aten._flash_attention_forward.default
    ]
    assert is_varlen == bool(forward)
    if not is_varlen:
        return
    # A call for each kind of tile; keys keep their two heads, and the first call has its own window.
    assert (
        len(forward)
        == len(calls)
        == (1 if not share_prefix else 2 if window is None else len(calls))
    )
    assert {args[1].shape[1] for args, _ in forward} == {2}
    assert forward[0][1].get("window_size_left") == (None if window is None else window - 1)
    assert all("window_size_left" not in kw for _, kw in forward[1:])
    assert sum("_flash_attention_backward" in name for name in names) == len(forward)
