"""verl: its log-probabilities and policy loss on rows without padding, in the order of its FSDP engine.

verl's own: `logprobs_from_logits` over the logits of the whole row, and the policy loss with its aggregation.
Not verl's: the engine around them, which needs ray, and flash-attention, which needs CUDA. The forward pass here is
transformers' on the row that the engine makes (concatenated tokens, positions that restart, labels rolled by one), with
one call of torch's fused attention kernel for each sequence, which computes no more than the varlen kernel.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from gcore_bench.harness.processes import Spec
from gcore_bench.trainer.updates import LOSS, LossStep, padded
from gcore_trainer import Sample

_ATTENTION = "bench_varlen"


class Stepper(LossStep):
    """Steps of a model under verl's loss."""

    def __init__(self, spec: Spec) -> None:
        self._verl = _import_verl()
        self._config = self._verl.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=LOSS.clip_ratio_low,
            clip_ratio_high=LOSS.clip_ratio_high,
        )
        AttentionInterface.register(_ATTENTION, _attend)
        load, model = AutoModelForCausalLM.from_pretrained, Path(spec.folder) / "model"
        super().__init__(load(model, dtype=torch.float32, attn_implementation=_ATTENTION))

    def partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=sum(samples[i].response_ids.size for batch in batches for i in batch),
            global_batch_size=sum(len(b) for b in batches),
            loss_scale_factor=None,
        )
        for batch in batches:
            chosen = [samples[i] for i in batch]
            log_probs_BR, row_length = self._log_probs(chosen)
            loss, _ = self._verl.get_policy_loss_fn("vanilla")(
                old_log_prob=padded([s.old_log_probs for s in chosen]),
                log_prob=log_probs_BR,
                advantages=padded([s.advantages for s in chosen]),
                response_mask=padded([s.mask for s in chosen]),
                loss_agg_mode=LOSS.loss_agg_mode,
                config=self._config,
            )
            yield loss, row_length

    def _log_probs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, int]:
        """Return the log-probs of the responses, [B, R], and the number of tokens of the row."""
        rows = [torch.cat([torch.from_numpy(s.prompt_ids), torch.from_numpy(s.response_ids)]) for s in samples]
        input_ids_1T = torch.cat(rows)[None]
        output = self.model(
            input_ids=input_ids_1T,
            attention_mask=None,
            position_ids=torch.cat([torch.arange(row.numel()) for row in rows])[None],
            use_cache=False,
            sequence_lengths=[row.numel() for row in rows],
        )
        labels_T = torch.roll(input_ids_1T, shifts=-1, dims=1)[0]
        log_probs_T = self._verl.logprobs_from_logits(logits=output.logits[0], labels=labels_T)
        ends = torch.tensor([row.numel() for row in rows]).cumsum(0).tolist()
        # The last token of the prompt predicts the first of the response; the last of the response predicts nothing.
        parts = [log_probs_T[end - s.response_ids.size - 1 : end - 1] for end, s in zip(ends, samples, strict=True)]
        return pad_sequence(parts, batch_first=True), input_ids_1T.numel()


def _import_verl() -> Any:
    """Import verl's functions, which need one name of ray but not ray itself. This replaces ray in the process."""
    if "ray" not in sys.modules:
        ray = ModuleType("ray")
        ray.__dict__["ObjectRef"] = object
        sys.modules["ray"] = ray
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config.actor import ActorConfig

    return SimpleNamespace(
        get_policy_loss_fn=get_policy_loss_fn, logprobs_from_logits=logprobs_from_logits, ActorConfig=ActorConfig
    )


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_lengths: list[int],
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of the row; inputs are [1, heads, T, D], the output is [1, T, heads, D]."""
    del module, attention_mask, others
    parts = zip(*(x.split(sequence_lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None
