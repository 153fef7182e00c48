"""verl: its log-probabilities and policy loss on rows without padding, in the order of its FSDP engine.

verl's own: `logprobs_from_logits` over the logits of the whole row, and the policy loss with its aggregation.
Not verl's: the engine around them, which needs ray, and flash-attention, which needs CUDA. The forward pass here is
transformers' on the row that the engine makes (tokens end to end, positions that start again, labels rolled by one).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from gcore_bench.trainer import varlen_attention
from gcore_bench.trainer.models import LOSS, adamw, update
from gcore_bench.trainer.step import StepResult
from gcore_bench.trainer.verl_import import import_verl
from gcore_trainer import Sample


class VerlStep:
    """Steps of a model under verl's loss."""

    def __init__(self, model: Path) -> None:
        self._verl = import_verl()
        self._config = self._verl.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            use_dynamic_bsz=True,
            clip_ratio_low=LOSS.clip_ratio_low,
            clip_ratio_high=LOSS.clip_ratio_high,
        )
        varlen_attention.register()
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=varlen_attention.NAME
        )
        self._optimizer = adamw(self._model)

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> StepResult:
        num_tokens = sum(samples[i].response_ids.size for batch in batches for i in batch)
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=num_tokens,
            global_batch_size=sum(len(b) for b in batches),
            loss_scale_factor=None,
        )
        loss, computed_tokens = 0.0, 0
        for batch in batches:
            chosen = [samples[i] for i in batch]
            log_probs_BR, row_length = self._log_probs(chosen)
            computed_tokens += row_length
            share, _ = self._verl.get_policy_loss_fn("vanilla")(
                old_log_prob=_padded([s.old_log_probs for s in chosen]),
                log_prob=log_probs_BR,
                advantages=_padded([s.advantages for s in chosen]),
                response_mask=_padded([s.mask for s in chosen]),
                loss_agg_mode=LOSS.loss_agg_mode,
                config=self._config,
            )
            share.backward()
            loss += share.item()
        return StepResult(
            loss=loss, grad_norm=update(self._model, self._optimizer), computed_tokens=float(computed_tokens)
        )

    def _log_probs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, int]:
        """[B, R] of the responses, and the tokens of the row."""
        rows = [torch.cat([torch.from_numpy(s.prompt_ids), torch.from_numpy(s.response_ids)]) for s in samples]
        input_ids_1T = torch.cat(rows)[None]
        output = self._model(
            input_ids=input_ids_1T,
            attention_mask=None,
            position_ids=torch.cat([torch.arange(row.numel()) for row in rows])[None],
            use_cache=False,
            sequence_lengths=[row.numel() for row in rows],
        )
        labels_T = torch.roll(input_ids_1T, shifts=-1, dims=1)[0]
        log_probs_T = self._verl.logprobs_from_logits(logits=output.logits[0], labels=labels_T)
        ends = torch.tensor([row.numel() for row in rows]).cumsum(0).tolist()
        # The token before a response's first predicts it; its last predicts nothing.
        parts = [log_probs_T[end - s.response_ids.size - 1 : end - 1] for end, s in zip(ends, samples, strict=True)]
        return pad_sequence(parts, batch_first=True), input_ids_1T.numel()


def _padded(arrays: Sequence[Any]) -> torch.Tensor:
    return pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True)
