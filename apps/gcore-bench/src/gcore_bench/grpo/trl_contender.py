"""TRL: GRPOTrainer as published, with transformers or vLLM generation, timed by overriding its own methods."""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gcore_bench.grpo.measure import StepClock, StepFigures, TimedReward
from gcore_bench.grpo.settings import load_train_prompts, train_config
from gcore_bench.grpo.workload import PROMPT_LENGTH, Workload
from gcore_llm.rewards import reward_function
from gcore_llm.roles import build_tokenizer


def run(workload: Workload, model: Path, *, use_vllm: bool, steps: int, threads: int, seed: int) -> list[StepFigures]:
    """Make ``steps`` steps and return the figures of each."""
    torch.set_num_threads(threads)
    config = train_config(workload, seed=seed)
    tokenizer = build_tokenizer(model)
    prompts = load_train_prompts(config, tokenizer).train
    reward = TimedReward(reward_function(config))

    def score_all(completions: list[str], prompt_index: list[int], **_: Any) -> list[float | None]:
        chosen = [prompts[i] for i in prompt_index]
        return [reward(p.text, c, p.row) for p, c in zip(chosen, completions, strict=True)]

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _TimedTrainer(
            model=policy,
            reward_funcs=score_all,
            args=_trl_config(workload, scratch, use_vllm=use_vllm, steps=steps, seed=seed),
            train_dataset=Dataset.from_list([{"prompt": p.text, "prompt_index": i} for i, p in enumerate(prompts)]),
            processing_class=tokenizer,
        )
        if use_vllm:
            # Imported here, so that the other contender's process holds no vLLM.
            from gcore_bench.grpo.trl_weight_sync import make_sync_correct

            make_sync_correct(trainer.vllm_generation)
        recorder = _Recorder(trainer, reward)
        trainer.add_callback(recorder)
        trainer.train()
    return recorder.steps


def _trl_config(workload: Workload, scratch: str, *, use_vllm: bool, steps: int, seed: int) -> GRPOConfig:
    vllm: dict[str, Any] = {}
    if use_vllm:
        vllm = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_max_model_length": PROMPT_LENGTH + workload.max_response_length,
            # Saves TRL a forward pass over the batch, which no other contender makes.
            "vllm_importance_sampling_correction": False,
        }
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=workload.samples_per_step // workload.trl_micro_batches,
        steps_per_generation=workload.trl_micro_batches,
        gradient_accumulation_steps=workload.trl_micro_batches,
        num_generations=workload.n,
        max_completion_length=workload.max_response_length,
        temperature=1.0,
        learning_rate=workload.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=workload.max_grad_norm,
        max_steps=steps,
        beta=0.0,
        seed=seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **vllm,
    )


class _TimedTrainer(GRPOTrainer):
    """Notes how long the parts of a step take."""

    gen_s = 0.0
    prepare_s = 0.0
    """Everything that comes before the forward passes: generation, rewards, advantages."""
    train_start_s: float | None = None
    lengths: tuple[int, ...] = ()

    def _generate(self, prompts: list[Any]) -> Any:
        start_s = time.perf_counter()
        output: Any = super()._generate(prompts)
        self.gen_s = time.perf_counter() - start_s
        self.lengths = tuple(len(ids) for ids in output[1])
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        start_s = time.perf_counter()
        inputs: Any = super()._prepare_inputs(generation_batch)
        self.prepare_s += time.perf_counter() - start_s
        return inputs

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.train_start_s is None:
            self.train_start_s = time.perf_counter()
        return super().training_step(*args, **kwargs)


class _Recorder(TrainerCallback):
    """Collects the figures of every step."""

    def __init__(self, trainer: _TimedTrainer, reward: TimedReward) -> None:
        self.steps: list[StepFigures] = []
        self._trainer = trainer
        self._reward = reward
        self._clock = StepClock()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.lap()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called when the optimizer has stepped."""
        wall_s, cpu_s = self._clock.lap()
        reward_s, score = self._reward.drain()
        trainer = self._trainer
        assert trainer.train_start_s is not None
        self.steps.append(
            StepFigures.of(
                trainer.lengths,
                wall_s=wall_s,
                cpu_s=cpu_s,
                gen_s=trainer.gen_s,
                reward_s=reward_s,
                train_s=time.perf_counter() - trainer.train_start_s - trainer.prepare_s,
                score=score,
            )
        )
        trainer.train_start_s = None
        trainer.prepare_s = 0.0
