"""What the ranks do in `test_context_parallel.py`: all four call each function, in groups of a layout's size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank import Rank
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_oracles import SIZES, Group, make_samples
from transformers import AutoModelForCausalLM, Qwen2Config

from gcore_trainer.context_parallel.groups import (
    ContextParallel,
    make_context_parallel,
    sum_over_ranks,
)
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.layout import PackedBatch, pack
from gcore_trainer.packing.row import PackedPlan
from gcore_trainer.torch import packed_model as packed_attention


@dataclass(frozen=True)
class Layout:
    """How many ranks divide a row, and how."""

    ring_size: int = 1
    ulysses_size: int = 1

    def __str__(self) -> str:
        return f"ring{self.ring_size}-ulysses{self.ulysses_size}"


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """A packed row, random inputs of its attention and a random gradient of its output."""

    groups: list[Group]
    layout: Layout
    share_prefix: bool = False
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def batch(self) -> PackedBatch:
        return padded(self.groups, self.layout, share_prefix=self.share_prefix)

    def inputs(self) -> list[torch.Tensor]:
        """Queries, keys, values and gradient, all [1, heads, T, D]."""
        generator = torch.Generator().manual_seed(0)
        num_tokens = self.batch().input_ids.size
        return [
            torch.randn((1, heads, num_tokens, dim), dtype=torch.float64, generator=generator).to(
                self.dtype
            )
            for heads, dim in (
                (self.num_heads, self.head_dim),
                (self.num_kv_heads, self.head_dim),
                (self.num_kv_heads, self.value_dim),
                (self.num_heads, self.value_dim),
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a plan made of the tokens at `places`: output and gradients of queries, keys and values."""

    places: torch.Tensor
    tensors: list[torch.Tensor]
    grad_sinks: torch.Tensor
    """[H], this rank's part; 0 where there are none."""
    time_s: float


@dataclass
class Footprint(TorchDispatchMode):
    """How many elements the largest tensor made has, and how many scores attention computes."""

    largest: int = 0
    num_scores: float = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            query, key = args[:2]
            is_causal = len(args) > 4 and args[4]
            num_queries, num_keys = query.shape[2], key.shape[2]
            num_seen = num_queries * (num_queries + 1) / 2 if is_causal else num_queries * num_keys
            self.num_scores += num_seen * query.shape[0] * query.shape[1]
        return result


def padded(groups: list[Group], layout: Layout, *, share_prefix: bool = False) -> PackedBatch:
    row, segment = ContextParallel(
        ring_size=layout.ring_size, ulysses_size=layout.ulysses_size
    ).padding
    samples = make_samples(groups, seed=0)
    return pack(samples, share_prefix=share_prefix, multiple_of=row, segment_multiple_of=segment)


def attended_at_once(case: AttentionCase) -> Attended:
    batch = case.batch()
    plan = PackedPlan(batch, device=torch.device("cpu"))
    return _attended(case, plan, torch.arange(batch.input_ids.size))


def attended(rank: Rank, case: AttentionCase) -> Attended:
    return _attended(case, *_plan(case))


def footprint(rank: Rank, case: AttentionCase) -> tuple[int, int, float]:
    """Bytes kept for the backward pass, the largest tensor's elements, and the scores computed."""
    plan, places = _plan(case)
    saved: dict[int, int] = {}

    def pack_hook(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    q, k, v, grad = (x[:, :, places].clone() for x in case.inputs())
    with Footprint() as seen:
        with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda tensor: tensor):
            out = plan.attend(
                q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), AttentionKind()
            )
        out.backward(grad.transpose(1, 2))
    return sum(saved.values()), seen.largest, seen.num_scores


def attended_without(rank: Rank, case: AttentionCase, num_missing: int) -> None:
    """Calls a plan with fewer tokens than the rank has."""
    plan, places = _plan(case)
    q, k, v, _ = (x[:, :, places[num_missing:]] for x in case.inputs())
    plan.attend(q, k, v, AttentionKind())


def plan_of(
    rank: Rank, groups: list[Group], packed_for: Layout, share_prefix: bool, divided_by: Layout
) -> None:
    """Makes a plan for a row that was packed for another layout."""
    batch = padded(groups, packed_for, share_prefix=share_prefix)
    PackedPlan(batch, cp=_context(divided_by), device=torch.device("cpu"))


def place_in_groups(
    rank: Rank, cp_groups: list[list[int]], ulysses_size: int
) -> tuple[int, int, int, int, int]:
    cp = make_context_parallel(cp_groups, ulysses_size)
    return cp.size, cp.rank, *divmod(cp.rank, cp.ulysses_size), cp.padding[0]


def summed(rank: Rank, layout: Layout, weights: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The square of a sum of w^2, of which each rank computes some; and this rank's gradient."""
    cp = _context(layout)
    w = weights.clone().requires_grad_()
    values = torch.zeros_like(w).index_copy(
        0, torch.arange(cp.rank, w.numel(), cp.size), w[cp.rank :: cp.size] ** 2
    )
    total = sum_over_ranks(values, cp.ulysses, cp.ring)
    loss = total.sum() ** 2
    loss.backward()
    assert w.grad is not None
    return loss.item(), w.grad


def model_gradients_at_once(
    groups: list[Group], layout: Layout, share_prefix: bool
) -> dict[str, torch.Tensor]:
    """Of the mean log-probability of a tiny model's response tokens, and that, under the name of "loss"."""
    batch = padded(groups, layout, share_prefix=share_prefix)
    plan = PackedPlan(batch, device=torch.device("cpu"))
    return _model_gradients(batch, plan, torch.arange(batch.input_ids.size), lambda x: x)


def model_gradients(
    rank: Rank, groups: list[Group], layout: Layout, share_prefix: bool
) -> dict[str, torch.Tensor]:
    batch, cp = padded(groups, layout, share_prefix=share_prefix), _context(layout)
    plan = PackedPlan(batch, cp=cp, device=torch.device("cpu"))
    gradients = _model_gradients(
        batch,
        plan,
        torch.from_numpy(cp.places(batch.segment_lengths)),
        lambda x: sum_over_ranks(x, cp.ulysses, cp.ring),
    )
    loss = gradients.pop("loss")
    for group in (cp.ulysses, cp.ring):
        for gradient in gradients.values() if group is not None else ():
            dist.all_reduce(gradient, group=group)
    return gradients | {"loss": loss}


def _model_gradients(
    batch: PackedBatch,
    plan: PackedPlan,
    places: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    packed_attention.register()
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(
        Qwen2Config(**SIZES, initializer_range=0.2),
        attn_implementation=packed_attention.ATTENTION_NAME,
    ).double()
    _, *own_and_all = np.intersect1d(
        places.numpy(), batch.predict_index, assume_unique=True, return_indices=True
    )
    local_index, which = (torch.from_numpy(x) for x in own_and_all)
    output = model(
        input_ids=torch.from_numpy(batch.input_ids)[places][None],
        position_ids=torch.from_numpy(batch.positions)[places][None],
        use_cache=False,
        packed=plan,
    )
    log_probs_uV = output.logits[0, local_index].log_softmax(-1)
    is_local = torch.zeros(batch.predict_index.size, dtype=torch.bool)
    is_local[which] = True
    place_N = torch.from_numpy(batch.target_place)
    own = is_local[place_N]
    row_U = torch.zeros(batch.predict_index.size, dtype=torch.int64)
    row_U[which] = torch.arange(which.numel())
    own_values = log_probs_uV[row_U[place_N[own]], torch.from_numpy(batch.target_ids)[own]]
    values_N = total(
        torch.zeros(place_N.numel(), dtype=torch.float64).masked_scatter(own, own_values)
    )
    loss = values_N.exp().mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()} | {"loss": loss.detach()}


def _attended(case: AttentionCase, plan: PackedPlan, places: torch.Tensor) -> Attended:
    q, k, v, grad = (x[:, :, places].clone() for x in case.inputs())
    inputs = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.linspace(-1, 2, case.num_heads, dtype=case.dtype).requires_grad_()
    start = time.perf_counter()
    out = plan.attend(
        q,
        k,
        v,
        AttentionKind(
            scale=case.scale,
            sliding_window=case.sliding_window,
            softcap=case.softcap,
            sinks=sinks if case.has_sinks else None,
        ),
    )
    out.backward(grad.transpose(1, 2))
    time_s = time.perf_counter() - start
    assert plan.num_calls == 1
    gradients = [x.grad for x in inputs if x.grad is not None]
    grad_sinks = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad
    return Attended(
        places=places,
        tensors=[out.detach().transpose(1, 2), *gradients],
        grad_sinks=grad_sinks,
        time_s=time_s,
    )


def _plan(case: AttentionCase) -> tuple[PackedPlan, torch.Tensor]:
    batch, cp = case.batch(), _context(case.layout)
    plan = PackedPlan(batch, cp=cp, device=torch.device("cpu"))
    return plan, torch.from_numpy(cp.places(batch.segment_lengths))


@cache
def _context(layout: Layout) -> ContextParallel:
    size = layout.ring_size * layout.ulysses_size
    return make_context_parallel(
        [list(range(i, i + size)) for i in range(0, 4, size)], layout.ulysses_size
    )
