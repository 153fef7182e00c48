"""A rank's part of a packed row: attention over it, and the scores of the tokens that it predicts.

Logits are made a bounded number at a time. Shapes: T tokens of the rank, n of the row's N response tokens, D hidden
size, V vocabulary (of this rank, where it is divided), C tokens of a chunk; in attention S segments of a bucket, Lq/Lk
padded queries/keys, H query heads, K key-value heads, D head dimension.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

from gcore_trainer.context_parallel.groups import ContextParallel, DividedRow, sum_over_ranks
from gcore_trainer.errors import BatchError
from gcore_trainer.objectives.policy import TokenScores
from gcore_trainer.packing.block_attention import AttentionKind, Scoring, block_attention
from gcore_trainer.packing.router_replay import routing_of_row
from gcore_trainer.packing.vision import RowImages, Vision
from gcore_trainer.sample import MicroBatch, PackedBatch, Tile, pack

_DeviceTile = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Places of queries [S, Lq] and keys [S, Lk] in the row, and a mask [S or 1, 1, Lq, Lk], 0 or -inf; None: causal."""
MAX_LOGITS = 1 << 24
"""Most logits of a chunk: 64 MB in float32."""


class PackedPlan:
    """The attention of a `PackedBatch`, made once a micro-batch, used by every layer.

    Args:
        cp: the ranks that divide the row; None: this process holds all of it.
    """

    def __init__(
        self, batch: PackedBatch, *, device: torch.device, dtype: torch.dtype, cp: ContextParallel | None = None
    ) -> None:
        self.num_calls = 0
        """Attention layers served so far."""
        self.batch = batch
        self._unpack_index = torch.from_numpy(batch.unpack_index).to(device)
        self._device = device
        self._dtype = dtype
        self._divided = None if cp is None else DividedRow(batch, cp)
        self._tiles: dict[int | None, list[list[_DeviceTile]]] = {}

    def attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Compute the attention output [1, T, H, D] of the T tokens that this process holds."""
        self.num_calls += 1
        if self._divided is not None:
            return self._divided.attend(query_1HTD, key_1KTD, value_1KTD, kind, self._attend)
        return self._attend(query_1HTD, key_1KTD, value_1KTD, kind)

    def _attend(
        self, query_1HTD: torch.Tensor, key_1KTD: torch.Tensor, value_1KTD: torch.Tensor, kind: AttentionKind
    ) -> torch.Tensor:
        """Compute the attention output [1, T, H, D] of all tokens of the row, with these heads."""
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_1HTD, key_1KTD, value_1KTD))
        outputs: list[torch.Tensor] = []
        if (window := kind.sliding_window) not in self._tiles:
            self._tiles[window] = [
                [self._on_device(tile) for tile in bucket.tiles(window)] for bucket in self.batch.buckets
            ]
        for tiles in self._tiles[window]:
            rows: list[torch.Tensor] = []
            for query_index_SQ, key_index_SK, mask in tiles:
                q_SHQD, k_SKLD, v_SKLD = (
                    x.index_select(0, index.ravel()).unflatten(0, index.shape).transpose(1, 2)
                    for x, index in ((q_THD, query_index_SQ), (k_TKD, key_index_SK), (v_TKD, key_index_SK))
                )
                rows.append(_attention(q_SHQD, k_SKLD, v_SKLD, kind, mask).transpose(1, 2))
            outputs.append(torch.cat(rows, dim=1).flatten(0, 1))
        return torch.cat(outputs).index_select(0, self._unpack_index)[None]

    def _on_device(self, tile: Tile) -> _DeviceTile:
        query_index_SQ, key_index_SK = (torch.from_numpy(x).to(self._device) for x in tile[:2])
        if tile.is_hidden is None:
            return query_index_SQ, key_index_SK, None
        hidden = torch.from_numpy(tile.is_hidden).to(self._device)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)
        return query_index_SQ, key_index_SK, mask


def _attention(
    q_SHQD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLD: torch.Tensor, kind: AttentionKind, mask: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention [S, H, Q, D]: torch's own, unless scores have soft caps or there are sinks."""
    scale = q_SHQD.shape[-1] ** -0.5 if kind.scale is None else kind.scale
    if kind.softcap is not None or kind.sinks is not None:
        scoring = Scoring(scale=scale, is_causal=mask is None, softcap=kind.softcap, mask=mask)
        return block_attention(q_SHQD, k_SKLD, v_SKLD, scoring, sinks_H=kind.sinks)
    enable_gqa = q_SHQD.shape[1] != k_SKLD.shape[1]
    return scaled_dot_product_attention(
        q_SHQD, k_SKLD, v_SKLD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=enable_gqa
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A rank's T tokens of a packed row, and the n of its N response tokens that they predict."""

    # Megatron-Core's layers get a row where they expect their own packing parameters, and look at these two: other than
    # with "thd", they rotate by position and leave queries, keys and values [T, 1, heads, D].
    qkv_format: ClassVar[str] = "packed"
    cp_group: ClassVar[Any] = None

    samples: MicroBatch
    batch: PackedBatch
    """The whole row, on all ranks that divide it."""
    input_ids: torch.Tensor
    """[1, T]."""
    positions: torch.Tensor
    """[1, T]."""
    plan: PackedPlan
    source_index: torch.Tensor
    """[n] which of the T tokens predicts each response token."""
    target_ids: torch.Tensor
    """[n]."""
    cp: ContextParallel | None
    """The ranks that divide the row; None: this one has all of it."""
    places: NDArray[np.int64]
    """[T] where each of the T stands in the whole row."""
    target_index: NDArray[np.int64]
    """[n] which of the N response tokens each is; N itself is none of them."""
    routing: torch.Tensor | None = None
    """[T, L, K] the experts that each token passes through, where routers do not choose (see `router_replay`)."""
    images: RowImages | None = None
    """None: there are none."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole row."""
        return self.batch.input_ids.size

    def of_all_ranks(self, values_n: torch.Tensor) -> torch.Tensor:
        """Collect [N] of all response tokens from the [n] of each rank, in float32 at least (see `sum_over_ranks`)."""
        values_n = values_n.to(_wide(values_n.dtype))
        if self.cp is None:
            return values_n
        index = torch.from_numpy(self.target_index).to(values_n.device)
        values_N = values_n.new_zeros(self.batch.target_ids.size + 1).index_put((index,), values_n)[:-1]
        return sum_over_ranks(values_N, self.cp.ulysses, self.cp.ring)

    def of_samples(self, routing_TLK: torch.Tensor) -> list[NDArray[np.int16]]:
        """Collect [P + R - 1, L, K] of each sample's tokens from the [T, L, K] of each rank."""
        whole = routing_TLK.new_zeros((self.num_tokens, *routing_TLK.shape[1:]))
        whole[torch.from_numpy(self.places).to(whole.device)] = routing_TLK
        if self.cp is not None:
            whole = sum_over_ranks(whole, self.cp.ulysses, self.cp.ring)
        found = whole.cpu().numpy().astype(np.int16)
        return [found[places] for places in self.batch.input_places(self.samples)]


def make_rows(
    micro_batches: Sequence[MicroBatch],
    *,
    device: torch.device,
    dtype: torch.dtype,
    share_prefix: bool,
    replay_routing: bool,
    cp: ContextParallel | None = None,
    vision: Vision | None = None,
    multiple_of: int = 1,
    equal_lengths: bool = False,
) -> list[Row]:
    """Make a row of each micro-batch; all ranks that work on them pass the same.

    Args:
        dtype: of the model's activations.
        share_prefix: compute equal prompts of a micro-batch once, where the row need not be cut within sequences.
        replay_routing: impose the experts that samples bring: the policy's, not those of a critic.
        multiple_of: of the number of each rank's tokens.
        equal_lengths: pad all to the longest.
    """
    row_multiple, segment_multiple = (1, 1) if cp is None else cp.padding

    def packed(longest: int) -> list[PackedBatch]:
        row_length, shares = math.lcm(longest, multiple_of * row_multiple), share_prefix and segment_multiple == 1
        multiples = {"multiple_of": row_length, "segment_multiple_of": segment_multiple}
        return [pack(samples, share_prefix=shares, **multiples) for samples in micro_batches]

    batches = packed(1)
    if equal_lengths:
        batches = packed(max(batch.input_ids.size for batch in batches))
    rows: list[Row] = []
    for samples, batch in zip(micro_batches, batches, strict=True):
        places = np.arange(batch.input_ids.size) if cp is None else cp.places(batch.segment_lengths)
        here = np.full(batch.input_ids.size, -1)
        here[places] = np.arange(places.size)
        source_N = here[batch.predict_index[batch.target_place]]
        target_index, source_index = np.flatnonzero(source_N >= 0), source_N[source_N >= 0]
        target_ids = batch.target_ids[target_index]
        if not target_index.size:
            # All ranks of a row score something, for their collectives are the same.
            target_index = np.array([source_N.size])
            source_index = target_ids = np.zeros(1, np.int64)
        if vision is None and any(sample.images is not None for sample in samples):
            raise BatchError(
                "a sample has images: this backend or model sees none, the torch backend does with a Qwen-VL model"
            )
        routing = None
        if replay_routing and any(sample.routed_experts is not None for sample in samples):
            routing = torch.from_numpy(routing_of_row(samples, batch)[places]).to(device)
        rows.append(
            Row(
                samples=samples,
                batch=batch,
                input_ids=torch.from_numpy(batch.input_ids[places])[None].to(device),
                positions=torch.from_numpy(batch.positions[places])[None].to(device),
                plan=PackedPlan(batch, device=device, dtype=dtype, cp=cp),
                source_index=torch.from_numpy(source_index).to(device),
                target_ids=torch.from_numpy(target_ids).to(device),
                cp=cp,
                places=places,
                target_index=target_index,
                routing=routing,
                images=None if vision is None else vision.row_images(samples, batch),
            )
        )
    return rows


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The part of the vocabulary whose rows of the head this rank of a tensor-parallel group holds."""

    group: dist.ProcessGroup
    start: int
    """First token of the part."""
    vocab_size: int
    """Size of the whole vocabulary; rows from here on are padding."""


def token_scores(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    entropy_grad: bool = False,
    vocab: VocabShard | None = None,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Score the targets under softmax(cap(logit_scale * (hidden @ weight^T + bias)) / temperature).

    Logits are made a chunk of tokens at a time and made again in the backward pass, so that none outlive their chunk:
    memory is that of ``max_logits`` of them, and of the head's gradient.

    Args:
        hidden_ND: the same on all ranks of ``vocab.group``.
        weight_VD: this rank's rows.
        targets_N: int64 tokens of the whole vocabulary.
        softcap: cap(x) is softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118, section 2); None: x.
        entropy_grad: make the entropies differentiable too.
        vocab: what part of the vocabulary this rank has; None: all of it.
    """
    chunk = max(1, max_logits // weight_VD.shape[0])
    head = _Head(temperature=temperature, scale=logit_scale, softcap=softcap, vocab=vocab, chunk=chunk)
    log_probs_N, entropies_N = _TokenScores.apply(hidden_ND, weight_VD, bias_V, targets_N, head, entropy_grad)
    return TokenScores(log_probs=log_probs_N, entropies=entropies_N if entropy_grad else entropies_N.detach())


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The operations that give the logits of this rank's part of the vocabulary, a chunk of tokens at a time."""

    temperature: float
    scale: float
    softcap: float | None
    vocab: VocabShard | None
    chunk: int

    def logits(self, hidden_CD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
        """Compute the tempered logits [C, V]; -inf for padding of the vocabulary."""
        logits_CV = hidden_CD @ weight_VD.T
        logits_CV = logits_CV.to(_wide(logits_CV.dtype))
        if bias_V is not None:
            logits_CV = logits_CV + bias_V
        if self.scale != 1.0:
            logits_CV = logits_CV * self.scale
        if self.softcap is not None:
            logits_CV = (logits_CV / self.softcap).tanh() * self.softcap
        if self.temperature != 1.0:
            logits_CV = logits_CV / self.temperature
        if self.vocab is not None:
            logits_CV[:, max(0, self.vocab.vocab_size - self.vocab.start) :] = -torch.inf
        return logits_CV

    def slope(self, logits_CV: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of the logits with respect to the matrix product; 0 where padding is -inf."""
        if self.softcap is None:
            return self.scale / self.temperature
        capped_CV = logits_CV * (self.temperature / self.softcap)
        return (1 - capped_CV.clamp(min=-1).square()) * (self.scale / self.temperature)

    def places(self, targets_C: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whether each target is in this rank's part, [C], and its column there."""
        column = targets_C - (self.vocab.start if self.vocab else 0)
        return (column >= 0) & (column < num_rows), column

    def scores(self, logits_CV: torch.Tensor, targets_C: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute log-probs, entropies and log-sum-exp of a chunk, [C] each."""
        peak_C = self._reduced(logits_CV.amax(-1), dist.ReduceOp.MAX)
        exp_CV = (logits_CV - peak_C[:, None]).exp_()
        is_here, place = self.places(targets_C, logits_CV.shape[1])
        target_C = torch.zeros_like(peak_C)
        target_C[is_here] = logits_CV[is_here, place[is_here]]
        # 0 times -inf is not 0.
        dot_C = (exp_CV * logits_CV.clamp_(min=torch.finfo(logits_CV.dtype).min)).sum(-1)
        sums_3C = self._reduced(torch.stack([exp_CV.sum(-1), dot_C, target_C]), dist.ReduceOp.SUM)
        log_sum_C = peak_C + sums_3C[0].log()
        return sums_3C[2] - log_sum_C, log_sum_C - sums_3C[1] / sums_3C[0], log_sum_C

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self.vocab is not None:
            dist.all_reduce(values, op=op, group=self.vocab.group)
        return values


class _TokenScores(torch.autograd.Function):
    """d log p(t) / d logit = onehot(t) - p;  d entropy / d logit = -p (log p + entropy)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        head: _Head,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts: list[tuple[torch.Tensor, ...]] = []
        for begin in range(0, max(1, targets_N.shape[0]), head.chunk):
            rows = slice(begin, begin + head.chunk)
            parts.append(head.scores(head.logits(hidden_ND[rows], weight_VD, bias_V), targets_N[rows]))
        log_probs_N, entropies_N, log_sums_N = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N)
        ctx.settings = head, entropy_grad
        return log_probs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_log_probs_N, grad_entropies_N = grads
        hidden_ND, weight_VD, bias_V, targets_N, entropies_N, log_sums_N = ctx.saved_tensors
        head, entropy_grad = ctx.settings
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Sums over many chunks: not in half precision. With adapters the head is frozen.
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=_wide(bias_V.dtype)) if needs_bias else None
        for begin in range(0, targets_N.shape[0], head.chunk):
            rows = slice(begin, begin + head.chunk)
            logits_CV = head.logits(hidden_ND[rows], weight_VD, bias_V)
            log_probs_CV = logits_CV - log_sums_N[rows, None]
            grad_CV = -log_probs_CV.exp() * grad_log_probs_N[rows, None]
            if entropy_grad:
                finite_CV = log_probs_CV.clamp(min=torch.finfo(log_probs_CV.dtype).min)
                pull_CV = finite_CV + entropies_N[rows, None]
                grad_CV -= log_probs_CV.exp() * pull_CV * grad_entropies_N[rows, None]
            is_here, place = head.places(targets_N[rows], weight_VD.shape[0])
            grad_CV[is_here, place[is_here]] += grad_log_probs_N[rows][is_here]
            grad_CV *= head.slope(logits_CV)
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(0)
            narrow_CV = grad_CV.to(weight_VD.dtype)
            grad_hidden_ND[rows] = narrow_CV @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD += narrow_CV.T @ hidden_ND[rows]
        if head.vocab is not None:
            dist.all_reduce(grad_hidden_ND, group=head.vocab.group)
        of_head: Any = ((grad_weight_VD, weight_VD), (grad_bias_V, bias_V))
        return grad_hidden_ND, *(None if g is None else g.to(x.dtype) for g, x in of_head), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
