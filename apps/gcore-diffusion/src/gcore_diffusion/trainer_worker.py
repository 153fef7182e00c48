"""The models in training on one rank: the policy, and the reference where the algorithm has one."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_controller import InProcessTrainerGroup, LocalTrainerGroup, SharedTrainerGroup
from gcore_diffusion.config import FORWARD, DiffusionConfig
from gcore_diffusion.sampling.image_sampling import has_reference_pass, kernel_of
from gcore_diffusion.sampling.services import reward_gradient
from gcore_rollout import Kernel, adapt_kernel, weight_variant
from gcore_runs import BaseTrainerWorker, UserError, keep_free_memory
from gcore_trainer import (
    DDPMProcess,
    Denoiser,
    DenoisingPolicyObjective,
    DiffusionMicroBatch,
    DiffusionObjective,
    DiffusionTrainer,
    FlowProcess,
    ForwardObjective,
    ParallelConfig,
    RewardGradientObjective,
    TorchParallel,
    pipeline_component,
    should_replicate,
)


class DiffusionTrainerWorker(BaseTrainerWorker[DiffusionMicroBatch]):
    """The image models in training, whole or this rank's shards; `UserError` if the algorithm cannot train them."""

    def __init__(self, config: DiffusionConfig, model: Path, checkpoints: Path) -> None:
        super().__init__(config, model, checkpoints)
        if config.device == "cpu":
            keep_free_memory()
        self._is_averaged = bool(config.actor.ema_decay)
        self._has_adapters = config.actor.lora is not None
        self._component, class_name = pipeline_component(model, config.actor.component)
        self.engine_dtype = config.rollout.dtype
        load = partial(
            Denoiser.from_pretrained,
            component=config.actor.component,
            device=config.device,
            sharded=True,
            compute_dtype=getattr(torch, config.actor.dtype),
        )
        denoiser = load(
            model,
            variant=weight_variant(model / self._component),
            lora=config.actor.lora,
            gradient_checkpointing=config.actor.enable_gradient_checkpointing,
        )
        scheduler = _scheduler(model)
        self._kernel = adapt_kernel(kernel_of(config), scheduler)
        objective = _objective(config, scheduler, self._kernel)
        num_updates = config.trainer.total_training_steps * config.actor.num_updates
        optim = config.actor.optim.build(total_training_steps=num_updates)
        parallel = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            size = config.trainer.fsdp_size
            if size == "auto":
                size = int(should_replicate(denoiser.model.parameters()))
            device_type = torch.device(config.device).type
            parallel = TorchParallel.join(ParallelConfig(fsdp_size=size), device_type=device_type)
        reference = None
        if config.algorithm.name == "opd":
            teacher = Path(config.algorithm.options["teacher"])
            if class_name not in pipeline_component(teacher, config.actor.component):
                raise UserError(
                    f"algorithm.options.teacher is {str(teacher)!r}; expected a pipeline with a {class_name}"
                )
            variant = weight_variant(teacher / self._component)
            reference = load(teacher, variant=variant).initial()
        elif objective.needs_reference or has_reference_pass(config):
            reference = denoiser.initial()
        self._trainer = DiffusionTrainer(
            denoiser,
            optimizer=optim,
            objective=objective,
            reference=reference,
            ema_decay=config.actor.ema_decay or None,
            parallel=parallel,
        )
        if config.actor.compile:
            self._trainer.compile()
        self.trainers = {"actor": self._trainer}

    @property
    def models(self) -> dict[str, DiffusionTrainer]:
        return {"actor": self._trainer, "reference": self._trainer}

    def score(
        self, role: str, micro_batches: Sequence[DiffusionMicroBatch], *, with_routing: bool
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.float32]]]]:
        """Return means and log-probabilities of the reference or the actor at the recorded steps of each image."""
        assert not with_routing
        return self._trainer.score_steps(
            micro_batches, self._kernel, by_reference=role == "reference"
        )

    def save_pretrained(self, path: Path) -> None:
        """Write the denoiser's folder of a pipeline into the folder, and ``lora`` with the adapters, if there are any.

        Both are averaged if there is an average.
        """
        self.wake()
        self._trainer.save_pretrained(path / self._component, averaged=self._is_averaged)
        if self._has_adapters:
            self._trainer.save_lora(path / "lora", self._component, averaged=self._is_averaged)


def start_trainer(
    config: DiffusionConfig, model: Path, checkpoints: Path
) -> SharedTrainerGroup[DiffusionMicroBatch]:
    """Load the models in training, in this process or on ranks in local processes."""
    if config.trainer.num_processes == 1:
        return InProcessTrainerGroup(
            DiffusionTrainerWorker(config, model, checkpoints), in_thread=True
        )
    return LocalTrainerGroup(
        DiffusionTrainerWorker.spec(config, model, checkpoints), cost_of=num_passes
    )


def num_passes(micro_batch: DiffusionMicroBatch) -> float:
    """Return the work of a micro-batch: the passes through the denoiser."""
    return sum(max(1, sample.num_steps) for sample in micro_batch)


def _noise_process(scheduler: Any) -> FlowProcess | DDPMProcess:
    """Return the noise process that the model was trained on."""
    if hasattr(scheduler, "alphas_cumprod"):
        return DDPMProcess(
            alphas_cumprod=scheduler.alphas_cumprod.tolist(),
            prediction_type=scheduler.config.prediction_type,
        )
    return FlowProcess(num_train_timesteps=scheduler.config.num_train_timesteps)


def _scheduler(model: Path) -> Any:
    import diffusers

    _, class_name = json.loads((model / "model_index.json").read_text())["scheduler"]
    return getattr(diffusers, class_name).from_pretrained(model, subfolder="scheduler")


def _objective(config: DiffusionConfig, scheduler: Any, kernel: Kernel) -> DiffusionObjective:
    name = config.algorithm.name
    options = config.algorithm.options
    if name in FORWARD:
        process = _noise_process(scheduler)
        if name == "nft" and not isinstance(process, FlowProcess):
            raise UserError(
                "algorithm.name is 'nft' and the model is of DDPM's kind; expected a flow-matching model"
            )
        return ForwardObjective(
            name,
            process,
            adv_clip_max=config.algorithm.adv_clip_max,
            group_size=config.rollout.n,
            **options,
        )
    if name == "reward_gradient":
        reward = reward_gradient(config)
        if reward is None:
            raise UserError(
                f"reward.kind is {config.reward.kind!r} and algorithm.name is 'reward_gradient'; expected a "
                "differentiable function PATH.py:function of (latents [B, ...] torch, prompts) that returns [B] torch"
            )
        return RewardGradientObjective(kernel, reward)
    return DenoisingPolicyObjective(config.actor.loss, kernel, config.algorithm.loss, **options)
