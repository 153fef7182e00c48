"""The step under every contender; only the process of a contender imports its library."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AutoModelForCausalLM

from gcore_bench.harness.report import Figures
from gcore_runs import build_tokenizer
from gcore_trainer import (
    MicroBatch,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TokenScores,
    TorchParallel,
    TorchTrainer,
    token_scores,
)
from gcore_trainer.packing import row as packed_row

OPTIMIZER = OptimizerConfig(lr=1e-9, grad_clip=1.0)
"""The rate is so low that the weights stay the same, and every step computes the same loss."""
LOSS = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")

Batches = Sequence[Sequence[int]]
"""Indices of the samples of each micro-batch."""


def attend_under_masks() -> None:
    """Let this process compute rows of any length as short ones are: under dense masks, of about equal segments."""
    packed_row.NUM_SHORT = sys.maxsize


class GcoreStep:
    """`TorchTrainer` on ``gcore-padded`` or ``gcore-packed`` rows, or, ``gcore-shared``, with a group's prompt once.

    ``gcore-masks`` is ``gcore-shared`` with attention under dense masks.
    """

    def __init__(self, folder: Path, kind: str, *, parallel: TorchParallel | None = None) -> None:
        family = _PaddedModel if kind == "gcore-padded" else PackedModel
        if kind == "gcore-masks":
            attend_under_masks()
        packed = family.from_pretrained(folder / "model", share_prefix=kind in ("gcore-masks", "gcore-shared"))
        objective = PolicyObjective(LOSS)
        self._trainer = TorchTrainer(packed, optimizer=OPTIMIZER, objective=objective, parallel=parallel)

    def step(self, samples: Sequence[Sample], batches: Batches) -> Figures:
        """See `LossStep.step`."""
        metrics = self._trainer.train_step([[samples[i] for i in batch] for batch in batches])
        return {
            "loss": metrics["actor/pg_loss"],
            "grad_norm": metrics["actor/grad_norm"],
            "computed_tokens": metrics["perf/computed_tokens"],
        }


class _PaddedModel(PackedModel):
    """transformers' own forward pass over one sample a row, padded to the longest; head and loss are gcore's."""

    _is_padded = False

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # Only now: the load-time comparison with transformers needs the packed attention, and restores it.
        model.set_attn_implementation("sdpa")
        self._is_padded = True

    def score(
        self, samples: MicroBatch, *, entropy_grad: bool = False, routing: list[list[NDArray[np.int16]]] | None = None
    ) -> TokenScores:
        if not self._is_padded:
            return super().score(samples, entropy_grad=entropy_grad, routing=routing)
        rows = [np.concatenate([s.prompt_ids, s.response_ids[:-1]]) for s in samples]
        input_ids_BT, mask_BT = _padded(rows), _padded([np.ones_like(row) for row in rows])
        self.num_computed_tokens += input_ids_BT.numel()
        output = self.model.base_model(input_ids=input_ids_BT, attention_mask=mask_BT, use_cache=False)
        ends = ((s, s.num_inputs) for s in samples)
        parts = [row[n - s.response_ids.size : n] for row, (s, n) in zip(output[0], ends, strict=True)]
        target_ids = torch.cat([torch.from_numpy(s.response_ids) for s in samples])
        head: Any = self.model.get_output_embeddings()
        return token_scores(torch.cat(parts), head.weight, target_ids, entropy_grad=entropy_grad)


class LossStep(ABC):
    """Steps of a model under the loss of another library, with the optimizer that `TorchTrainer` would make."""

    def __init__(self, model: Any) -> None:
        self.model = model
        settings: dict[str, Any] = {name: getattr(OPTIMIZER, name) for name in ("lr", "betas", "eps", "weight_decay")}
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)

    def step(self, samples: Sequence[Sample], batches: Batches) -> Figures:
        """Add up the losses of the batches of samples, and update; return the figures that contenders must agree on.

        Computed tokens are those that passed through the model's layers, padding included.
        """
        loss, computed_tokens = 0.0, 0
        for partial_loss, num_tokens in self._partial_losses(samples, batches):
            partial_loss.backward()
            loss += partial_loss.item()
            computed_tokens += num_tokens
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self._optimizer.step()
        # gcore keeps gradients allocated, too: they are in the memory before every contender's step, and in no peak.
        self._optimizer.zero_grad(set_to_none=False)
        return {"loss": loss, "grad_norm": grad_norm.item(), "computed_tokens": float(computed_tokens)}

    @abstractmethod
    def _partial_losses(self, samples: Sequence[Sample], batches: Batches) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the part of the loss that each batch makes up, and the number of its computed tokens."""


class TrlStep(LossStep):
    """The loss of a real `GRPOTrainer` of TRL on batches padded the way it pads them."""

    def __init__(self, folder: Path) -> None:
        # Otherwise TRL imports vLLM, which takes ten seconds and is not used here.
        import_module("trl.import_utils").__dict__["is_vllm_available"] = lambda *_, **__: False
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        policy: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self._trainer: Any = GRPOTrainer(
            model=policy,
            reward_funcs=_no_reward,
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=1,
                num_generations=2,
                loss_type="dapo",
                epsilon=LOSS.clip_ratio_low,
                epsilon_high=LOSS.clip_ratio_high,
                beta=0.0,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1", "2"]}),
            # TRL requires one; this bench does not use it.
            processing_class=build_tokenizer(folder / "tokenizer"),
        )
        super().__init__(self._trainer.model)
        self.model.train()

    def _partial_losses(self, samples: Sequence[Sample], batches: Batches) -> Iterator[tuple[torch.Tensor, int]]:
        inputs = _trl_inputs(samples)
        # The loss of a micro-batch is scaled by the number of them in a generation batch.
        self._trainer.args.steps_per_generation = len(batches)
        self._trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            rows = torch.tensor(batch)
            part = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
            num_tokens = part["prompt_ids"].numel() + part["completion_ids"].numel()
            yield self._trainer._compute_loss(self.model, part), num_tokens


def _trl_inputs(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, to the longest of the whole generation batch."""
    prompts, completions = [s.prompt_ids for s in samples], [s.response_ids for s in samples]
    completion_mask = _padded([np.ones_like(c) for c in completions])
    return {
        "prompt_mask": _padded([np.ones_like(p) for p in prompts], side="left"),
        "completion_mask": completion_mask,
        "prompt_ids": _padded(prompts, side="left"),
        "completion_ids": _padded(completions),
        "advantages": torch.tensor([float(s.advantages[0]) for s in samples if s.advantages is not None]),
        "old_per_token_logps": _padded([s.old_log_probs for s in samples]),
        "num_items_in_batch": completion_mask.sum(),
    }


def _no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


class VerlStep(LossStep):
    """verl's log-probabilities of whole rows without padding, and its policy loss, in the order of its FSDP engine.

    Not verl's: the engine around them, which needs ray, and flash-attention, which needs CUDA. The forward pass here is
    transformers' on the row that the engine makes (concatenated tokens, positions that restart, labels rolled by one),
    with one call of torch's fused attention kernel for each sequence, which computes no more than the varlen kernel.
    """

    def __init__(self, folder: Path) -> None:
        # verl's functions need one name of ray but not ray itself, which this replaces in the process.
        sys.modules.setdefault("ray", ModuleType("ray")).__dict__.setdefault("ObjectRef", object)
        from verl.trainer.ppo.core_algos import get_policy_loss_fn
        from verl.utils.torch_functional import logprobs_from_logits
        from verl.workers.config.actor import ActorConfig

        self._policy_loss: Any = get_policy_loss_fn("vanilla")
        self._logprobs_from_logits: Any = logprobs_from_logits
        clip_ratios: dict[str, Any] = {name: getattr(LOSS, name) for name in ("clip_ratio_low", "clip_ratio_high")}
        self._config: Any = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **clip_ratios)
        AttentionInterface.register("bench_varlen", _attend)
        load = AutoModelForCausalLM.from_pretrained
        super().__init__(load(folder / "model", dtype=torch.float32, attn_implementation="bench_varlen"))

    def _partial_losses(self, samples: Sequence[Sample], batches: Batches) -> Iterator[tuple[torch.Tensor, int]]:
        self._config.global_batch_info.update(
            dp_size=1,
            batch_num_tokens=sum(samples[i].response_ids.size for batch in batches for i in batch),
            global_batch_size=sum(len(b) for b in batches),
            loss_scale_factor=None,
        )
        for batch in batches:
            chosen = [samples[i] for i in batch]
            log_probs_BR, row_length = self._log_probs(chosen)
            loss, _ = self._policy_loss(
                old_log_prob=_padded([s.old_log_probs for s in chosen]),
                log_prob=log_probs_BR,
                advantages=_padded([s.advantages for s in chosen]),
                response_mask=_padded([s.mask for s in chosen]),
                loss_agg_mode=LOSS.loss_agg_mode,
                config=self._config,
            )
            yield loss, row_length

    def _log_probs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, int]:
        """Return the log-probs of the responses, [B, R], and the number of tokens of the row."""
        rows = [torch.cat([torch.from_numpy(s.prompt_ids), torch.from_numpy(s.response_ids)]) for s in samples]
        input_ids_1T = torch.cat(rows)[None]
        lengths = [row.numel() for row in rows]
        output = self.model(
            input_ids=input_ids_1T,
            attention_mask=None,
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
            use_cache=False,
            sequence_lengths=lengths,
        )
        labels_T = torch.roll(input_ids_1T, shifts=-1, dims=1)[0]
        log_probs_T = self._logprobs_from_logits(logits=output.logits[0], labels=labels_T)
        # The last token of the prompt predicts the first of the response; the last of the response predicts nothing.
        pairs = zip(log_probs_T.split(lengths), samples, strict=True)
        return pad_sequence([row[s.prompt_ids.size - 1 : -1] for row, s in pairs], batch_first=True), sum(lengths)


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


def _padded(rows: Sequence[Any], *, side: str = "right") -> torch.Tensor:
    """Stack arrays of different lengths, with zeros after (or before) the shorter ones."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_side=side)
