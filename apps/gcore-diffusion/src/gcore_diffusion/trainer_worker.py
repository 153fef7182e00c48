"""The models in training on one rank: the policy, and the reference where the algorithm has one."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_ckpt import Checkpointer
from gcore_controller import TrainerSpec
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.sampling.image_sampling import has_reference_pass, kernel_of
from gcore_diffusion.sampling.rewards import reward_gradient
from gcore_rollout import DigestedWeights, Kernel, suited
from gcore_runs import UserError, rank_spec
from gcore_trainer import (
    DDPMProcess,
    Denoiser,
    DenoisingPolicyObjective,
    DiffusionDPOObjective,
    DiffusionMicroBatch,
    DiffusionObjective,
    DiffusionTrainer,
    FlowProcess,
    NFTObjective,
    NoiseProcess,
    ParallelConfig,
    RewardGradientObjective,
    TorchParallel,
    step_means,
)

State = dict[str, Any]


class DiffusionTrainerWorker:
    """A `gcore_controller.TrainerWorker` of image models: whole, or on several ranks this rank's shards of them.

    The reference is whole on every rank, so that one rank alone can score with it.

    Args:
        config: the run's.
        model: the pipeline's folder.
        checkpoints: folder of the checkpoints.

    Raises:
        UserError: the algorithm cannot train such a model.
    """

    roles = ("actor", "reference")

    def __init__(self, config: DiffusionConfig, model: Path, checkpoints: Path) -> None:
        self._config = config
        options: dict[str, Any] = {
            "device": config.device,
            "compute_dtype": getattr(torch, config.actor.dtype),
            "gradient_checkpointing": config.actor.enable_gradient_checkpointing,
        }
        denoiser = Denoiser.from_pretrained(model, lora=config.actor.lora, **options)
        scheduler = _scheduler(model)
        self._kernel = suited(kernel_of(config), scheduler)
        objective = _objective(config, scheduler, self._kernel)
        self._reference = None
        if objective.needs_reference or has_reference_pass(config):
            self._reference = Denoiser.from_pretrained(model, **options)
            self._reference.model.requires_grad_(False)
        nft, optim = config.actor.nft, config.actor.optim
        if not optim.total_training_steps:
            num_updates = config.trainer.total_training_steps * config.actor.num_updates
            optim = replace(optim, total_training_steps=num_updates)
        parallel = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            parallel = TorchParallel.join(ParallelConfig(), device_type=torch.device(config.device).type)
        self._trainer = DiffusionTrainer(
            denoiser,
            optimizer=optim,
            objective=objective,
            reference=self._reference if objective.needs_reference else None,
            ema_decay=config.actor.ema_decay or None,
            old_decay=(nft.old_decay, nft.old_decay_max),
            parallel=parallel,
        )
        self._checkpointer = Checkpointer(checkpoints, keep=config.trainer.max_ckpt_to_keep)

    @property
    def num_updates(self) -> int:
        return self._trainer.step

    def replica(self, role: str) -> tuple[int, int]:
        del role
        return self._trainer.data_parallel_rank, self._trainer.data_parallel_size

    def score(
        self, role: str, micro_batches: Sequence[DiffusionMicroBatch], *, with_routing: bool
    ) -> list[list[NDArray[np.float32]]]:
        """Return the reference's means [K, ...] at the recorded steps of each image; see `step_means`."""
        assert role == "reference"
        assert self._reference is not None
        assert not with_routing
        return step_means(self._reference, micro_batches, self._kernel)

    def train_step(self, role: str, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """Update the policy once; see `DiffusionTrainer.train_step`."""
        assert role == "actor"
        return self._trainer.train_step(micro_batches)

    def export_weights(self, *, averaged: bool = False) -> DigestedWeights:
        """Return the weights of the policy that samples, or their average."""
        dtypes = [torch.float32, getattr(torch, self._config.rollout.dtype)]
        return DigestedWeights(self._trainer.export_weights(averaged=averaged), dtypes=dtypes)

    def save_pretrained(self, path: Path) -> None:
        """Write the folder of the denoiser, averaged if there is an average."""
        self._trainer.save_pretrained(path, averaged=bool(self._config.actor.ema_decay))

    def save(self, step: int, rest: State) -> None:
        self._checkpointer.save(step, {**rest, "trainer": self._trainer.state()})

    def load(self) -> State:
        own = self._trainer.state()
        loaded = self._checkpointer.load({"step": None, "controllers": None, "trainer": own})
        # Tensors were filled where they are.
        numbers = {name: value for name, value in loaded["trainer"].items() if not isinstance(value, dict)}
        self._trainer.load_state({**self._trainer.state(), **numbers})
        return {name: loaded[name] for name in ("step", "controllers")}

    def close(self) -> None:
        self._checkpointer.close()


def trainer_spec(config: DiffusionConfig, model: Path, checkpoints: Path) -> TrainerSpec:
    """Return how the ranks of a run's models are started; see `DiffusionTrainerWorker`."""
    checkpoints = checkpoints.absolute()
    return rank_spec(
        partial(_make_worker, config, model.absolute(), checkpoints),
        num_ranks=config.trainer.num_processes,
        device=config.device,
        num_threads=max(1, config.threads // config.trainer.num_processes),
        checkpoints=checkpoints,
    )


def _make_worker(config: DiffusionConfig, model: Path, checkpoints: Path, device: str) -> DiffusionTrainerWorker:
    torch.manual_seed(config.seed)
    return DiffusionTrainerWorker(replace(config, device=device), model, checkpoints)


def _noise_process(scheduler: Any) -> NoiseProcess:
    """Return the noise process that the model was trained on."""
    if hasattr(scheduler, "alphas_cumprod"):
        return DDPMProcess(
            alphas_cumprod=scheduler.alphas_cumprod.tolist(), prediction_type=scheduler.config.prediction_type
        )
    return FlowProcess(num_train_timesteps=scheduler.config.num_train_timesteps)


def _scheduler(model: Path) -> Any:
    import diffusers

    _, kind = json.loads((model / "model_index.json").read_text())["scheduler"]
    return getattr(diffusers, kind).from_pretrained(model, subfolder="scheduler")


def _objective(config: DiffusionConfig, scheduler: Any, kernel: Kernel) -> DiffusionObjective:
    name = config.algorithm.name
    if name == "nft":
        process = _noise_process(scheduler)
        if not isinstance(process, FlowProcess):
            raise UserError("algorithm.name is 'nft' and the model is of DDPM's kind; expected a flow-matching model")
        return NFTObjective(replace(config.actor.nft, adv_clip_max=config.algorithm.adv_clip_max), process)
    if name == "dpo":
        return DiffusionDPOObjective(config.actor.dpo, _noise_process(scheduler))
    if name == "reward_gradient":
        reward = reward_gradient(config)
        if reward is None:
            raise UserError(
                f"reward.kind is {config.reward.kind!r} and algorithm.name is 'reward_gradient'; expected a "
                "differentiable function PATH.py:function of (latents [B, ...] torch, prompts) that returns [B] torch"
            )
        return RewardGradientObjective(kernel, reward)
    return DenoisingPolicyObjective(config.policy_loss, kernel)
