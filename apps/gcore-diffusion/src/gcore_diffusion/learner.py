"""The models in training: the policy, and the reference where the algorithm has one."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from gcore_ckpt import Checkpointer
from gcore_controller import Collectives, DeviceTimers, rank_name
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.sampling import has_reference_pass, kernel_of
from gcore_rollout import DigestedWeights, Engine, ImageRequest, ImageSample, all_digests, check_weights, suited
from gcore_runs.errors import UserError
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
    OptimizerConfig,
    ParallelConfig,
    RewardGradientObjective,
    TorchParallel,
    step_means,
)

State = dict[str, Any]


class Learner:
    """The models in this process: whole or, where torch.distributed runs on several ranks, this rank's part.

    All ranks make the same calls, but `reference_means`, each with images of its own.

    Args:
        config: the run's.
        model: the pipeline's folder.
        checkpoints: where checkpoints are.
        reward: differentiable, of latents and prompts, where the algorithm goes through it.

    Raises:
        UserError: the algorithm cannot train such a model.
    """

    roles = ("actor",)

    def __init__(self, config: DiffusionConfig, model: Path, checkpoints: Path, *, reward: Any = None) -> None:
        self._config = config
        options: dict[str, Any] = {
            "device": config.device,
            "compute_dtype": getattr(torch, config.actor.dtype),
            "gradient_checkpointing": config.actor.enable_gradient_checkpointing,
        }
        denoiser = Denoiser.from_pretrained(model, lora=config.actor.lora, **options)
        objective = _objective(config, model, reward)
        self._kernel = suited(kernel_of(config), _scheduler(model))
        self._reference = None
        if objective.needs_reference or has_reference_pass(config):
            self._reference = Denoiser.from_pretrained(model, **options)
            self._reference.model.requires_grad_(False)
        nft = config.actor.nft
        is_shared = dist.is_initialized() and dist.get_world_size() > 1
        self._trainer = DiffusionTrainer(
            denoiser,
            optimizer=_scheduled(config.actor.optim, config),
            objective=objective,
            reference=self._reference if objective.needs_reference else None,
            ema_decay=config.actor.ema_decay or None,
            old_decay=(nft.old_decay, nft.old_decay_max),
            parallel=TorchParallel.join(ParallelConfig(), device_type=torch.device(config.device).type)
            if is_shared
            else None,
        )
        self._checkpointer = Checkpointer(checkpoints, keep=config.trainer.max_ckpt_to_keep)

    @property
    def num_updates(self) -> int:
        """Updates so far."""
        return self._trainer.step

    def replicas(self, role: str) -> tuple[int, int]:
        """See `RankLearner.replicas`."""
        del role
        return self._trainer.data_parallel_rank, self._trainer.data_parallel_size

    def reference_means(self, micro_batches: Sequence[DiffusionMicroBatch]) -> list[list[NDArray[np.float32]]]:
        """See `step_means`, of the reference; each rank has all of it, so that it may be asked alone."""
        assert self._reference is not None
        return step_means(self._reference, micro_batches, self._kernel)

    def train_step(self, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """One update; see `DiffusionTrainer.train_step`."""
        return self._trainer.train_step(micro_batches)

    def export_weights(self, *, averaged: bool = False) -> DigestedWeights:
        """The weights that sample, or their average."""
        dtypes = [torch.float32, getattr(torch, self._config.rollout.dtype)]
        return DigestedWeights(self._trainer.export_weights(averaged=averaged), dtypes=dtypes)

    def save_pretrained(self, path: Path) -> None:
        """Write the denoiser's folder, averaged if there is an average."""
        self._trainer.save_pretrained(path, averaged=bool(self._config.actor.ema_decay))

    def save(self, step: int, rest: State) -> None:
        """Checkpoint the policy, and ``rest`` beside it; returns when it is copied."""
        self._checkpointer.save(step, {**rest, "trainer": self._trainer.state()})

    def load(self) -> State:
        """Take over the latest checkpoint; gives the ``rest`` that was saved in it."""
        own = self._trainer.state()
        loaded = self._checkpointer.load({"step": None, "controllers": None, "trainer": own})
        # Tensors were filled where they are.
        numbers = {name: value for name, value in loaded["trainer"].items() if not isinstance(value, dict)}
        self._trainer.load_state({**self._trainer.state(), **numbers})
        return {name: loaded[name] for name in ("step", "controllers")}

    def close(self) -> None:
        """Wait for checkpoints to be written."""
        self._checkpointer.close()


class LearnerPart(Protocol):
    """What a controller's program asks of the models in training, wherever they run.

    Every controller makes the same calls in the same order, but `reference_means`, each with images of its own.
    """

    @property
    def num_replicas(self) -> int:
        """A number of micro-batches that this divides loads the ranks evenly."""
        ...

    async def reference_means(self, samples: DiffusionMicroBatch) -> list[NDArray[np.float32]]:
        """Of each image [K, ...], at its recorded steps."""
        ...

    async def train_step(self, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """An update on all controllers' images together; no metrics where there are none."""
        ...

    async def update_policy(
        self, policy: "Engine[ImageRequest, ImageSample]", *, version: int, averaged: bool = False
    ) -> None:
        """Give every controller's ``policy`` the present weights, or their average, at least as this version."""
        ...

    async def check_policy(self, policy: "Engine[ImageRequest, ImageSample]") -> None:
        """Compare every tensor of every controller's ``policy`` with the present weights.

        Raises:
            WrongWeightsError: an engine has others.
        """
        ...


class SharedLearner:
    """The part of a controller in a learner that all controllers of this process share; see `LearnerPart`."""

    def __init__(self, learner: Learner, group: Collectives, devices: DeviceTimers) -> None:
        self._learner = learner
        self._group = group
        self._devices = devices

    @property
    def num_replicas(self) -> int:
        return 1

    async def reference_means(self, samples: DiffusionMicroBatch) -> list[NDArray[np.float32]]:
        """See `LearnerPart.reference_means`."""
        with self._devices.stage("prepare", rank_name(0)):
            (means,) = await asyncio.to_thread(self._learner.reference_means, [samples])
        return means

    async def train_step(self, micro_batches: Sequence[DiffusionMicroBatch]) -> dict[str, float]:
        """See `LearnerPart.train_step`."""
        everyones = await self._group.all_gather(micro_batches)
        metrics: dict[str, float] = {}
        batches = [batch for part in everyones for batch in part if batch]
        if self._group.rank == 0 and batches:
            with self._devices.stage("train", rank_name(0)):
                metrics = await asyncio.to_thread(self._learner.train_step, batches)
        return await self._group.broadcast(metrics)

    async def update_policy(
        self, policy: "Engine[ImageRequest, ImageSample]", *, version: int, averaged: bool = False
    ) -> None:
        """See `LearnerPart.update_policy`."""
        if self._group.rank == 0:
            with self._devices.stage("sync", rank_name(0)):
                await policy.update_weights(self._learner.export_weights(averaged=averaged), version=version)
        await self._group.barrier()

    async def check_policy(self, policy: "Engine[ImageRequest, ImageSample]") -> None:
        """See `LearnerPart.check_policy`."""
        if self._group.rank == 0:
            await check_weights(policy, all_digests(self._learner.export_weights()))
        await self._group.barrier()


def noise_process(model: Path) -> NoiseProcess:
    """What the model was trained on."""
    scheduler = _scheduler(model)
    if hasattr(scheduler, "alphas_cumprod"):
        return DDPMProcess(
            alphas_cumprod=scheduler.alphas_cumprod.tolist(), prediction_type=scheduler.config.prediction_type
        )
    return FlowProcess(num_train_timesteps=scheduler.config.num_train_timesteps)


def _scheduler(model: Path) -> Any:
    import diffusers

    _, kind = json.loads((model / "model_index.json").read_text())["scheduler"]
    return getattr(diffusers, kind).from_pretrained(model, subfolder="scheduler")


def _objective(config: DiffusionConfig, model: Path, reward: Any) -> DiffusionObjective:
    name = config.algorithm.name
    if name == "nft":
        process = noise_process(model)
        if not isinstance(process, FlowProcess):
            raise UserError("algorithm.name is 'nft': a flow-matching model is needed, this one is of DDPM's kind")
        return NFTObjective(replace(config.actor.nft, adv_clip_max=config.algorithm.adv_clip_max), process)
    if name == "dpo":
        return DiffusionDPOObjective(config.actor.dpo, noise_process(model))
    if name == "reward_gradient":
        if reward is None:
            raise UserError(
                f"reward.kind is {config.reward.kind!r} and algorithm.name is 'reward_gradient': a differentiable "
                "one is needed, a function PATH.py:function of (latents [B, ...] torch, prompts) that returns [B] torch"
            )
        return RewardGradientObjective(suited(kernel_of(config), _scheduler(model)), reward)
    return DenoisingPolicyObjective(config.policy_loss, suited(kernel_of(config), _scheduler(model)))


def _scheduled(optimizer: OptimizerConfig, config: DiffusionConfig) -> OptimizerConfig:
    """With the number of updates of the whole run, where it is not given."""
    if optimizer.total_training_steps:
        return optimizer
    return replace(optimizer, total_training_steps=config.trainer.total_training_steps * config.actor.num_updates)
