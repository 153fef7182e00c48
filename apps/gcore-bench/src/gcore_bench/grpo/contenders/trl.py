"""TRL: GRPOTrainer as published, with generation by transformers or vLLM, timed by overriding its methods."""

import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from gcore_bench.grpo.measure import Step, StepRecorder
from gcore_bench.grpo.setup import load_train_prompts, train_config
from gcore_bench.grpo.workload import PROMPT_LENGTH, Task
from gcore_llm.sampling import reward_function
from gcore_runs import build_tokenizer


def run(task: Task) -> list[Step]:
    """Make the steps of ``task`` and return the figures of each."""
    config = train_config(task)
    tokenizer = build_tokenizer(task.model)
    prompts = load_train_prompts(config, tokenizer).train
    recorder = StepRecorder(reward_function(config))

    def score_all(completions: list[str], prompt_index: list[int], **_: Any) -> list[float | None]:
        chosen = [prompts[i] for i in prompt_index]
        return [recorder.score(p.text, c, p.row) for p, c in zip(chosen, completions, strict=True)]

    policy: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _TimedTrainer(
            model=policy,
            reward_funcs=score_all,
            args=_trl_config(task, scratch),
            train_dataset=Dataset.from_list([{"prompt": p.text, "prompt_index": i} for i, p in enumerate(prompts)]),
            processing_class=tokenizer,
        )
        if task.uses_vllm:
            _correct_weight_sync(trainer.vllm_generation)
        trainer.add_callback(_Callback(trainer, recorder))
        trainer.train()
    return recorder.steps


def _trl_config(task: Task, scratch: str) -> GRPOConfig:
    workload, optim = task.workload, train_config(task).actor.optim
    vllm: dict[str, Any] = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": PROMPT_LENGTH + workload.max_response_length,
        # Spares TRL a forward pass over the batch, which no other contender makes.
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
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=optim.grad_clip,
        max_steps=task.steps,
        beta=0.0,
        seed=task.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        **(vllm if task.uses_vllm else {}),
    )


class _TimedTrainer(GRPOTrainer):
    """Measures how long the parts of a step take."""

    gen_s = 0.0
    prepare_s = 0.0
    """Seconds of all that precedes the forward passes: generation, rewards, advantages."""
    lengths: Sequence[int] = ()

    def _generate(self, prompts: list[Any]) -> Any:
        start_s = time.perf_counter()
        output: Any = super()._generate(prompts)
        self.gen_s = time.perf_counter() - start_s
        self.lengths = [len(ids) for ids in output[1]]
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        start_s = time.perf_counter()
        inputs: Any = super()._prepare_inputs(generation_batch)
        self.prepare_s += time.perf_counter() - start_s
        return inputs


class _Callback(TrainerCallback):
    """Notifies the recorder of every step."""

    def __init__(self, trainer: _TimedTrainer, recorder: StepRecorder) -> None:
        self._trainer = trainer
        self._recorder = recorder

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.prepare_s = 0.0
        self._start_s = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called when the optimizer has stepped."""
        trainer = self._trainer
        train_s = time.perf_counter() - self._start_s - trainer.prepare_s
        self._recorder.ended(trainer.lengths, gen_s=trainer.gen_s, train_s=train_s)


def _correct_weight_sync(generation: Any) -> None:
    """Let a `VLLMGeneration` reload weights through vLLM's own `reload_weights`, which packs them again.

    As published it calls ``load_weights`` on the model: on CPU vLLM has then replaced the parameters by copies that are
    packed for its matrix products, and which that function cannot load (AttributeError: no ``weight_loader``).
    """

    def sync_weights() -> None:
        weights = [(name, p.detach()) for name, p in generation.model.named_parameters() if name != "lm_head.weight"]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.apply_model(_repack_head)
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def _repack_head(model: torch.nn.Module) -> None:
    """Pack the weight of a tied head, which `reload_weights` leaves out."""
    # Imported here, so that the process of TRL without vLLM does not load it.
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
