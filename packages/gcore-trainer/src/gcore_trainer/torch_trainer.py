"""The torch backend: packed micro-batches, AdamW, one process."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import LossAggMode, OptimizerConfig, PolicyLossConfig
from gcore_trainer.errors import BatchError, NonFiniteGradientError, StateError
from gcore_trainer.losses import aggregation_weights, kl_penalty
from gcore_trainer.packed_model import PackedModel, TokenScores
from gcore_trainer.policy_losses import policy_loss
from gcore_trainer.types import MicroBatch, Sample

_Loss = Callable[[TokenScores, MicroBatch, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""(scores, samples, weights [N]) to this micro-batch's share of the loss and of each metric."""


class TorchTrainer:
    """Trains a `PackedModel` by policy gradient or by supervision.

    Args:
        packed: the policy; its parameters are updated in place.
        optimizer: see `OptimizerConfig`.
        policy_loss: see `PolicyLossConfig`.
    """

    def __init__(self, packed: PackedModel, *, optimizer: OptimizerConfig, policy_loss: PolicyLossConfig) -> None:
        self._packed = packed
        self._config = optimizer
        self._policy = policy_loss
        self._parameters: dict[str, torch.nn.Parameter] = dict(packed.model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._step = 0
        self._nonfinite_steps = 0
        # Dropout would make every ratio to the sampling policy noise.
        packed.model.eval()

    @property
    def step(self) -> int:
        """Steps taken so far, those skipped for their gradient included."""
        return self._step

    def train_step(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """One policy-gradient update on all samples; the result does not depend on how they are split.

        Samples whose gradient is exactly zero are left out of the passes: those with no token in their mask and,
        without KL and entropy terms, those whose advantages are all zero. They count in the loss's denominators, not
        in the means of ``actor/ppo_kl``, ``actor/entropy`` and the clip fractions.

        Returns:
            metrics under verl's names (``actor/pg_loss``, ``actor/grad_norm``, ...).

        Raises:
            BatchError: advantages (or, with a KL term, reference log-probs) are missing, or only some samples have
                old or rollout log-probs.
            NonFiniteGradientError: too many skipped steps in a row.
        """
        samples = _flat(micro_batches)
        if any(s.advantages is None for s in samples):
            raise BatchError("advantages is None: the policy loss needs them for every sample")
        if self._policy.kl_loss_coef and any(s.ref_log_probs is None for s in samples):
            raise BatchError(f"ref_log_probs is None: kl_loss_coef={self._policy.kl_loss_coef} needs them")
        for field in ("old_log_probs", "rollout_log_probs"):
            if len({getattr(s, field) is None for s in samples}) > 1:
                raise BatchError(f"{field} is None for some samples of the step: all of them or none must carry it")
        skip = _has_no_advantage if not (self._policy.kl_loss_coef or self._policy.entropy_coeff) else None
        metrics = self._update(
            micro_batches,
            self._policy_share,
            self._policy.loss_agg_mode,
            skip=skip,
            entropy_grad=self._policy.entropy_coeff > 0,
        )
        return {"actor/pg_loss": 0.0, **metrics}

    def sft_step(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """One supervised update: the mean negative log-likelihood of response tokens, at the model's temperature.

        Returns:
            ``sft/loss``, ``actor/grad_norm``, ``actor/lr``, ``actor/nonfinite_steps`` and ``perf/computed_tokens``.

        Raises:
            NonFiniteGradientError: too many skipped steps in a row.
        """
        return {"sft/loss": 0.0, **self._update(micro_batches, _sft_share, "token-mean")}

    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities [R] of each sample's response under the present policy."""
        return self._packed.log_probs(micro_batches)

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and tensors (not copies), one at a time; a tied head is left out."""
        for name, parameter in self._parameters.items():
            yield name, parameter.detach()

    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that ``AutoModelForCausalLM.from_pretrained`` loads."""
        self._packed.model.save_pretrained(path)

    def state(self) -> dict[str, Any]:
        """Everything a resumed trainer needs, as live tensors under Hugging Face names and plain numbers."""
        moments = self._optimizer.state
        return {
            "step": self._step,
            "nonfinite_steps": self._nonfinite_steps,
            "rng": torch.get_rng_state(),
            "model": {name: p.detach() for name, p in self._parameters.items()},
            "exp_avg": {name: moments[p]["exp_avg"] for name, p in self._parameters.items() if p in moments},
            "exp_avg_sq": {name: moments[p]["exp_avg_sq"] for name, p in self._parameters.items() if p in moments},
            "optimizer_step": max((int(s["step"]) for s in moments.values()), default=0),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave.

        Raises:
            StateError: names or shapes differ; nothing was changed.
        """
        if difference := sorted(state.keys() ^ self.state().keys()):
            raise StateError(f"state does not match this trainer's: names on one side only: {difference}")
        has_moments = state["optimizer_step"] > 0
        for group in ("model", "exp_avg", "exp_avg_sq") if has_moments else ("model",):
            self._check_state(group, state[group])
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state["model"][name])
        self._optimizer.state.clear()
        if has_moments:
            for name, parameter in self._parameters.items():
                self._optimizer.state[parameter] = {
                    # The fused kernel reads the count on the parameter's device.
                    "step": torch.tensor(float(state["optimizer_step"]), dtype=torch.float32, device=parameter.device),
                    "exp_avg": state["exp_avg"][name].to(parameter, copy=True),
                    "exp_avg_sq": state["exp_avg_sq"][name].to(parameter, copy=True),
                }
        self._step = state["step"]
        self._nonfinite_steps = state["nonfinite_steps"]
        torch.set_rng_state(state["rng"])

    def _check_state(self, group: str, tensors: dict[str, torch.Tensor]) -> None:
        if difference := sorted(tensors.keys() ^ self._parameters.keys()):
            raise StateError(f"{group} does not match the model: names on one side only: {difference[:3]}")
        for name, tensor in tensors.items():
            if tensor.shape != self._parameters[name].shape:
                raise StateError(
                    f"{group}[{name!r}] has shape {tuple(tensor.shape)}: the model has "
                    f"{tuple(self._parameters[name].shape)}"
                )

    def _update(
        self,
        micro_batches: list[MicroBatch],
        share: _Loss,
        loss_agg_mode: LossAggMode,
        *,
        skip: Callable[[Sample], bool] | None = None,
        entropy_grad: bool = False,
    ) -> dict[str, float]:
        samples = _flat(micro_batches)
        if not samples:
            raise BatchError("micro_batches holds no sample: at least one is needed")
        weights = aggregation_weights(
            [_mask(s) for s in samples], loss_agg_mode, max_response_length=self._policy.max_response_length
        )
        self._optimizer.zero_grad(set_to_none=False)
        sums: dict[str, torch.Tensor] = {}
        computed_tokens = 0
        cursor = 0
        for micro_batch in micro_batches:
            here = weights[cursor : cursor + len(micro_batch)]
            cursor += len(micro_batch)
            kept = [(s, w) for s, w in zip(micro_batch, here, strict=True) if w.any() and (skip is None or not skip(s))]
            if not kept:
                continue
            kept_samples = [s for s, _ in kept]
            scores = self._packed.score(kept_samples, entropy_grad=entropy_grad)
            weight_N = torch.from_numpy(np.concatenate([w for _, w in kept])).to(scores.log_probs.device)
            loss, metrics = share(scores, kept_samples, weight_N)
            torch.autograd.backward(loss)
            computed_tokens += scores.num_computed_tokens
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value.double()
        return {
            **_normalised({name: value.item() for name, value in sums.items()}),
            **self._apply_gradient(),
            "perf/computed_tokens": computed_tokens,
        }

    def _apply_gradient(self) -> dict[str, float]:
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._config.grad_clip).item()
        warmup = self._config.lr_warmup_steps
        lr = self._config.lr * min(1.0, (self._step + 1) / warmup) if warmup else self._config.lr
        if np.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self._nonfinite_steps = 0
        else:
            self._nonfinite_steps += 1
            if self._nonfinite_steps >= self._config.max_nonfinite_steps:
                raise NonFiniteGradientError(
                    f"the gradient norm was {grad_norm} in {self._nonfinite_steps} steps in a row "
                    f"(max_nonfinite_steps={self._config.max_nonfinite_steps}): try a lower lr"
                )
        self._step += 1
        return {"actor/grad_norm": grad_norm, "actor/lr": lr, "actor/nonfinite_steps": float(self._nonfinite_steps)}

    def _policy_share(
        self, scores: TokenScores, samples: MicroBatch, weight_N: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        config = self._policy
        device = weight_N.device
        current = scores.log_probs.detach()
        old = _joined([s.old_log_probs for s in samples], like=current)
        old = current if old is None else old
        advantages = _joined([s.advantages for s in samples], like=current)
        assert advantages is not None
        mask = torch.from_numpy(np.concatenate([_mask(s) for s in samples])).to(device)
        lengths = [s.response_ids.size for s in samples]
        policy = policy_loss(config, scores.log_probs, old, advantages, mask=mask, lengths=lengths)
        pg_loss = (weight_N * policy.loss).sum()
        loss = pg_loss
        count = mask.float()
        sums = {
            "actor/pg_loss": pg_loss.detach(),
            "mean:actor/ppo_kl": (count * (old - current)).sum(),
            "mean:actor/pg_clipfrac": (mask & policy.clipped).sum(),
            "mean:actor/pg_clipfrac_lower": (mask & policy.clipped_lower).sum(),
            "mean:actor/entropy": (count * scores.entropies.detach()).sum(),
            "count": count.sum(),
        }
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (weight_N * scores.entropies).sum()
        if config.kl_loss_coef:
            reference = _joined([s.ref_log_probs for s in samples], like=current)
            assert reference is not None
            kl_loss = (weight_N * kl_penalty(scores.log_probs, reference, config.kl_loss_type)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        rollout = _joined([s.rollout_log_probs for s in samples], like=current)
        if rollout is not None:
            difference = (current.exp() - rollout.exp()).abs()
            sums["mean:training/rollout_probs_diff_mean"] = (count * difference).sum()
        return loss, sums


def _sft_share(
    scores: TokenScores, samples: MicroBatch, weight_N: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    del samples
    loss = -(weight_N * scores.log_probs).sum()
    return loss, {"sft/loss": loss.detach()}


def _normalised(sums: dict[str, float]) -> dict[str, float]:
    """Turn ``mean:`` sums over tokens into means; the rest are shares of a whole and stay sums."""
    count = max(sums.pop("count", 1.0), 1.0)
    return {
        name.removeprefix("mean:"): value / count if name.startswith("mean:") else value for name, value in sums.items()
    }


def _flat(micro_batches: list[MicroBatch]) -> list[Sample]:
    return [sample for micro_batch in micro_batches for sample in micro_batch]


def _mask(sample: Sample) -> NDArray[np.bool_]:
    return np.ones(sample.response_ids.size, np.bool_) if sample.response_mask is None else sample.response_mask


def _has_no_advantage(sample: Sample) -> bool:
    return sample.advantages is not None and not sample.advantages.any()


def _joined(arrays: list[NDArray[np.float32] | None], *, like: torch.Tensor) -> torch.Tensor | None:
    """The samples' arrays end to end, shape [N]; None where they have none."""
    present = [a for a in arrays if a is not None]
    return torch.from_numpy(np.concatenate(present)).to(like) if present else None
