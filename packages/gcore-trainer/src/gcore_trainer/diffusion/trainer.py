"""The torch backend of diffusion models: in one process, or sharded over many or whole on each."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from diffusers.models.modeling_utils import no_init_weights
from safetensors.torch import save_file

from gcore_trainer.config import BELOW_ONE, OptimizerConfig
from gcore_trainer.diffusion.conditions import num_calls
from gcore_trainer.diffusion.denoiser import Denoiser
from gcore_trainer.diffusion.lora_file import FILE_NAME
from gcore_trainer.diffusion.objectives import (
    DiffusionObjective,
    Models,
    TransitionKernel,
    drawn_at,
)
from gcore_trainer.diffusion.sample import DiffusionMicroBatch, StepScores, stack_fields
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.lora import B_OF, TRAINED, LoRAWeights
from gcore_trainer.objectives.objective import add_sums
from gcore_trainer.torch.optimizer import make_adamw
from gcore_trainer.torch.parallel import TorchParallel, sum_gradients
from gcore_trainer.trainer import BaseTrainer, Replicas


class MovingAverage:
    """Exponential moving average of parameters, in float32, sharded as they are.

    Args:
        decay: fraction that the average keeps of itself at an update. Early on it is less: (1 + n) / (10 + n) after n
            updates, as in TensorFlow's and diffusers' averages.

    Raises:
        ConfigError: a decay out of its bounds.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> average = MovingAverage({"weight": weight}, decay=0.9)
        >>> _ = weight.data.fill_(1.0)
        >>> average.update(num_updates=0)
        >>> average.tensors["weight"]
        tensor([0.9000, 0.9000])
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        BELOW_ONE.require("ema_decay", decay)
        self._parameters = dict(parameters)
        self._decay = decay
        self.tensors: dict[str, torch.Tensor] = {
            n: p.detach().clone() for n, p in self._parameters.items()
        }

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Include the parameters after a number of updates."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.detach(), 1 - decay)


class DiffusionTrainer(BaseTrainer):
    """Trains a `Denoiser`.

    Args:
        denoiser: the policy; its parameters are updated in place.
        reference: the initial policy, where the objective asks it in training or its scores are needed; it may share
            the policy's weights, see `Denoiser.initial`.
        ema_decay: decay of an average of the weights, which `export_weights` gives on request; None: there is none.
        parallel: the ranks among which images are divided, and parameters unless its ``fsdp_size`` is 1; None: this
            process is alone.

    Raises:
        ConfigError: the objective needs a model that is not given.

    Example:
        >>> from diffusers import SD3Transformer2DModel
        >>> model = SD3Transformer2DModel(
        ...     sample_size=8, num_layers=1, num_attention_heads=1, attention_head_dim=8, joint_attention_dim=8,
        ...     caption_projection_dim=8, pooled_projection_dim=8, in_channels=4, out_channels=4, pos_embed_max_size=8
        ... )
        >>> trainer = DiffusionTrainer(
        ...     Denoiser(model), optimizer=OptimizerConfig(lr=1e-4), objective=ForwardObjective("nft"), ema_decay=0.99
        ... )
        >>> sorted(trainer.state())[:1]
        ['ema']
    """

    def __init__(
        self,
        denoiser: Denoiser,
        *,
        optimizer: OptimizerConfig,
        objective: DiffusionObjective,
        reference: Denoiser | None = None,
        ema_decay: float | None = None,
        parallel: TorchParallel | None = None,
    ) -> None:
        if objective.needs_reference and reference is None:
            raise ConfigError(
                f"reference is None: {type(objective).__name__} asks the initial policy"
            )
        old = denoiser.copy() if objective.needs_old else None
        self._models = Models(policy=denoiser, old=old, reference=reference)
        group = None
        self._world_size = 1
        self._is_sharded = False
        self._is_first = True
        if parallel is not None:
            group = parallel.replicas
            self._world_size = parallel.world_size
            self._is_sharded = parallel.num_shards > 1
            self._is_first = parallel.mesh.get_rank() == 0
        for model in self._all_models():
            if parallel is not None and self._is_sharded:
                model.shard(parallel.mesh)
            model.load_weights()
        parameters = denoiser.trained_parameters()
        if not parameters:
            raise ConfigError("the model has no parameters to train")
        self._adamw = make_adamw(parameters, optimizer, offload=False)
        super().__init__(
            config=optimizer, optimizer=self._adamw, objective=objective, replicas=Replicas(group)
        )
        self._ema = None if ema_decay is None else MovingAverage(parameters, ema_decay)
        self._module = denoiser.model
        self._exports_states = True

    def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the device's memory of all models, averages, gradients and optimizer states until `wake`.

        Values move to (pinned) host memory; gradients are 0 afterwards. See `Sleeper`. With ``keep_weights`` nothing
        moves: averages, which are exported, are of the states.
        """
        super().sleep(keep_weights=keep_weights)
        if not keep_weights:
            for model in self._all_models()[1:]:
                model.sleep()

    def wake(self, *, states: bool = False) -> None:
        """Undo `sleep`, if this trainer is asleep; ``states`` wake in any case."""
        super().wake(states=states)
        for model in self._all_models()[1:]:
            model.wake()

    def state(self) -> dict[str, Any]:
        self.wake()
        return super().state()

    def compile(self, *, backend: str | None = None) -> None:
        """Compile the blocks of all models; see `Denoiser.compile`."""
        for model in self._all_models():
            model.compile(backend=backend)

    def _all_models(self) -> list[Denoiser]:
        """Return the policy, and then the other models that have weights of their own."""
        policy = self._models.policy
        models = [policy]
        further = (self._models.old, self._models.reference)
        models += [
            model for model in further if model is not None and model.model is not policy.model
        ]
        return models

    def _stored_tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        groups = super()._stored_tensors()
        if self._ema is not None:
            groups["ema"] = dict(self._ema.tensors)
        return groups

    def train_step(self, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """Make one update on all images of all replicas; the result does not depend on how they are split.

        Args:
            micro_batches: this replica's, one at least; another may have more of them.

        Returns:
            the metrics of the objective and of the update, the same on all ranks.

        Raises:
            BatchError: the images lack what the objective needs, hold numbers that are not finite, or there are none.
            TrainerError: too many skipped steps in a row, or the trainer is asleep.
        """
        self._check_awake()

        def check_batches() -> tuple[int, int, int, set[int]]:
            samples = list(chain.from_iterable(micro_batches))
            if not samples:
                raise BatchError(
                    "micro_batches holds no image; expected at least one on every replica"
                )
            self._objective.check(samples)
            for i, batch in enumerate(micro_batches):
                for j, sample in enumerate(batch):
                    sample.check_finite(f"micro_batches[{i}][{j}]", *self._objective.reads)
            calls = {num_calls(batch) for batch in micro_batches}
            return (
                self._objective.weight(samples),
                self._objective.num_passes(samples),
                len(micro_batches),
                calls,
            )

        weight = 0
        num_batches = len(micro_batches)
        passes: set[int] = set()
        calls: set[int] = set()
        for (
            replica_weight,
            replica_passes,
            replica_batches,
            replica_calls,
        ) in self._replicas.gather_or_raise(check_batches):
            weight += replica_weight
            passes.add(replica_passes)
            calls |= replica_calls
            if self._is_sharded:
                num_batches = max(num_batches, replica_batches)
        if len(passes) != 1:
            raise BatchError(
                f"replicas make {sorted(passes)} passes over an image; expected one number"
            )
        (num_passes,) = passes
        if self._is_sharded:
            _require_one(calls)
        sums = self._backward(micro_batches, num_batches, num_passes, weight * num_passes)
        metrics = self._update(sums)
        if self._ema is not None:
            self._ema.update(self.step)
        growth, bound = self._objective.old_decay
        for name, tensor in self._averages().get("old", {}).items():
            tensor.lerp_(self._adamw.parameters[name].detach(), 1 - min(growth * self.step, bound))
        return metrics

    def score_steps(
        self,
        micro_batches: Sequence[DiffusionMicroBatch],
        kernel: TransitionKernel,
        *,
        by_reference: bool = False,
    ) -> list[list[StepScores]]:
        """Compute the policy's or the reference's Gaussians at the recorded steps; see the function `score_steps`.

        They are in the numerics of `train_step`: as ``old_log_probs`` and ``old_means`` of the same micro-batches, the
        policy's make the ratios of the first update 1, whatever the sampler's data type is.

        Raises:
            TrainerError: the trainer is asleep.
        """
        self._check_awake()
        model = self._models.reference if by_reference else self._models.policy
        assert model is not None
        return score_steps(
            model, micro_batches, kernel, self._replicas if self._is_sharded else None
        )

    def _backward(
        self,
        micro_batches: Sequence[DiffusionMicroBatch],
        num_batches: int,
        num_passes: int,
        total: int,
    ) -> dict[str, float]:
        self._adamw.zero_grad()
        sums: dict[str, torch.Tensor] = {}
        # FSDP averages over ranks; the parts of the loss are to be added.
        scale = self._world_size if self._is_sharded else 1
        for i in range(num_batches):
            # A divided model's collectives need all ranks: one that has no more micro-batches computes for nothing.
            is_real = i < len(micro_batches)
            batch = micro_batches[i] if is_real else micro_batches[0]
            factor = scale if is_real else 0.0
            for index in range(num_passes):
                loss, parts = self._objective.partial_loss(index, self._models, batch, total)
                torch.autograd.backward(loss * factor)
                if is_real:
                    add_sums(sums, parts)
        if self._world_size > 1 and not self._is_sharded:
            sum_gradients(self._adamw.parameters.values())
        return {name: value.item() for name, value in sums.items()}

    def export_weights(self, *, averaged: bool = False) -> Iterable[tuple[str, torch.Tensor]]:
        """Return diffusers' names and full tensors of the policy that samples; see `Trainer.export_weights`.

        Raises:
            ConfigError: there is no such average.
        """
        if averaged and self._ema is None:
            raise ConfigError("ema_decay is None: there is no average of the weights")
        name = "old" if self._objective.samples_by_old else ""
        return self._models.policy.weights(self._averages().get("ema" if averaged else name))

    def save_pretrained(self, path: str | Path, *, averaged: bool = False) -> None:
        """Write the model's folder, which diffusers loads; all ranks call it, one writes."""
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.export_weights(averaged=averaged):
            if self._is_first:
                weights[name] = tensor.cpu()
        if self._is_first:
            policy = self._models.policy.model
            with no_init_weights():
                model = type(policy).from_config(copy.deepcopy(dict(policy.config)))
            model.load_state_dict(model.state_dict() | weights, assign=True)
            model.save_pretrained(path)
        # On the host: NCCL would end a wait that takes minutes.
        self._replicas.gather(None)

    def save_lora(self, path: str | Path, component: str, *, averaged: bool = False) -> None:
        """Write a folder with the adapters, which ``pipeline.load_lora_weights`` of diffusers reads.

        All ranks call it, one writes. The scale is in B: the file needs no other settings.

        Args:
            component: name of the model in the pipeline, transformer or unet.

        Raises:
            ConfigError: there are no adapters.
        """
        weights = self.export_weights(averaged=averaged)
        if not isinstance(weights, LoRAWeights):
            raise ConfigError("lora is None: the model has no adapters to save")
        scale = weights.config.scaling
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights.adapters().items():
            if name.endswith(B_OF):
                tensor = tensor * scale
            plain_name = name.replace(f".{TRAINED}.", ".")
            tensors[f"{component}.{plain_name}"] = tensor.cpu().contiguous()
        if self._is_first:
            Path(path).mkdir(parents=True, exist_ok=True)
            save_file(tensors, Path(path) / FILE_NAME, {"format": "pt"})

    def _averages(self) -> dict[str, dict[str, torch.Tensor]]:
        groups: dict[str, dict[str, torch.Tensor]] = {}
        if self._ema is not None:
            groups["ema"] = dict(self._ema.tensors)
        if self._models.old is not None:
            old = self._models.old.parameters()
            groups["old"] = {name: old[name].detach() for name in self._adamw.parameters}
        return groups


def _require_one(calls: set[int]) -> None:
    """Raise `BatchError` for unequal numbers of calls, which the collectives of a sharded model cannot make."""
    if len(calls) != 1:
        raise BatchError(
            f"micro-batches need {sorted(calls)} calls of the model, one for each shape of conditions; expected one "
            "number where ranks share a model: give prompts one length, or a micro-batch one prompt"
        )


@torch.no_grad()
def score_steps(
    denoiser: Denoiser,
    micro_batches: Sequence[DiffusionMicroBatch],
    kernel: TransitionKernel,
    replicas: Replicas | None = None,
) -> list[list[StepScores]]:
    """Compute the Gaussians at the recorded steps of each image: a reference's, for the KL term, or a policy's.

    ``replicas`` are those among which a sharded model is divided; all of them call this, one may have no micro-batch.
    """
    replicas = replicas or Replicas()
    counts: list[int] = []
    calls: set[int] = set()
    for count, replica_calls in replicas.gather(
        (len(micro_batches), {num_calls(batch) for batch in micro_batches})
    ):
        counts.append(count)
        calls |= replica_calls
    if replicas.size > 1 and any(counts):
        _require_one(calls)
    stand_in: DiffusionMicroBatch = micro_batches[0] if micro_batches else []
    if 0 in counts:
        # A sharded model's collectives need all ranks: one without images computes with another's for nothing.
        stand_in = next(filter(None, replicas.gather(stand_in[:1])), [])
    scores: list[list[StepScores]] = []
    for i in range(max(counts)):
        samples = micro_batches[i] if i < len(micro_batches) else stand_in
        means: list[torch.Tensor] = []
        log_probs: list[torch.Tensor] = []
        for step in range(samples[0].num_steps):
            drawn, _ = drawn_at(denoiser, kernel, samples, step)
            [following] = stack_fields(samples, denoiser.device, "next_latents", step=step)
            log_prob = drawn.std.flatten() * torch.nan
            if (drawn.std > 0).all():
                log_prob = drawn.log_prob(following)
            means.append(drawn.mean.cpu())
            log_probs.append(log_prob.cpu())
        if i < len(micro_batches):
            by_image = zip(
                torch.stack(means, dim=1).numpy(),
                torch.stack(log_probs, dim=1).numpy(),
                strict=True,
            )
            scores.append(list(by_image))
    return scores
