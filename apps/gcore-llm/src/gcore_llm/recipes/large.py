"""Recipes of the models that users start with, on 1 to 64 GPUs, with hyperparameters of published scripts.

`model` and data are names of local folders and files to bring: give others by `--model` and `--data.train-files`. Rows
have the columns `prompt` and `answer`.
"""

from collections.abc import Callable, Mapping

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.sections import ActorConfig, ActorOptimConfig, DataConfig, TrainerConfig
from gcore_trainer import OverlongConfig, ParallelConfig, PolicyLossConfig


def qwen2_5_0_5b_gsm8k() -> TrainConfig:
    """Qwen2.5-0.5B-Instruct on GSM8K, on one GPU: trainer and vLLM share it. Planned only; no GPU has run it.

    Hyperparameters: verl's examples/grpo_trainer/run_qwen2-7b.sh, with a quarter of its batch.
    """
    return _gsm8k_on_one_gpu("Qwen2.5-0.5B-Instruct")


def qwen2_5_1_5b_gsm8k() -> TrainConfig:
    """Qwen2.5-1.5B-Instruct on GSM8K, on one GPU, as `qwen2_5_0_5b_gsm8k`. Planned only; no GPU has run it."""
    return _gsm8k_on_one_gpu("Qwen2.5-1.5B-Instruct")


def qwen2_5_7b_gsm8k() -> TrainConfig:
    """Qwen2.5-7B-Instruct on GSM8K, on 8 GPUs: 8 ranks and 4 engines take turns. Planned only; no GPU has run it.

    Hyperparameters: verl's examples/grpo_trainer/run_qwen2-7b.sh.
    """
    return _in_turns(
        "Qwen2.5-7B-Instruct",
        num_gpus=8,
        devices_per_engine=2,
        n=5,
        data=_gsm8k(train_batch_size=1024, max_prompt_length=512, max_response_length=512),
        actor=ActorConfig(loss=_grpo(0.001), ppo_mini_batch_size=256),
        steps=105,
    )


def qwen3_32b_gsm8k() -> TrainConfig:
    """Qwen3-32B on GSM8K, on 64 GPUs: 64 ranks of FSDP2 and 16 engines take turns. Planned only; no GPU has run it.

    Hyperparameters: verl's examples/grpo_trainer/run_qwen3_32b_npu.sh, which runs on 32 NPUs.
    """
    return _in_turns(
        "Qwen3-32B",
        num_gpus=64,
        devices_per_engine=4,
        n=4,
        data=_gsm8k(train_batch_size=1024, max_prompt_length=2048, max_response_length=2048),
        actor=ActorConfig(loss=_grpo(0.001), ppo_mini_batch_size=64),
        steps=350,
    )


def qwen3_30b_a3b_gsm8k() -> TrainConfig:
    """Qwen3-30B-A3B on GSM8K, on 32 GPUs: 32 ranks of Megatron-Core, 8 engines by turns.

    Planned only; no GPU has run it. Hyperparameters, TP 4, PP 2 and EP 4: verl's
    examples/grpo_trainer/run_qwen3moe-30b_megatron.sh, in which ranks and engines share 32 GPUs, too.
    """
    parallel = ParallelConfig(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=4,
        sequence_parallel=True,
    )
    trainer = TrainerConfig(
        backend="megatron", num_processes=32, parallel=parallel, total_training_steps=1700
    )
    return TrainConfig(
        model="Qwen3-30B-A3B",
        runtime="ray",
        reward="math-verify",
        data=_gsm8k(train_batch_size=64, max_prompt_length=1024, max_response_length=2048),
        rollout=RolloutConfig(
            engine="vllm",
            n=5,
            num_processes=8,
            tensor_parallel_size=4,
            engine_options={"enable_expert_parallel": True},
            colocated=True,
        ),
        algorithm=AlgorithmConfig(filter_groups=False),
        actor=ActorConfig(loss=_grpo(0.001)),
        trainer=trainer,
    )


def qwen2_5_vl_7b_geo3k() -> TrainConfig:
    """Qwen2.5-VL-7B-Instruct on Geometry3K, on 8 GPUs: 8 ranks, 4 engines by turns. Planned only; no GPU has run it.

    Hyperparameters: verl's examples/grpo_trainer/run_qwen2_5_vl-7b.sh.
    """
    data = DataConfig(
        train_files=("data/geo3k/train.jsonl",),
        val_files=("data/geo3k/test.jsonl",),
        image_key="images",
        train_batch_size=512,
        max_prompt_length=1024,
        max_response_length=2048,
    )
    actor = ActorConfig(loss=_grpo(0.01), ppo_mini_batch_size=128)
    return _in_turns(
        "Qwen2.5-VL-7B-Instruct",
        num_gpus=8,
        devices_per_engine=2,
        n=5,
        data=data,
        actor=actor,
        steps=60,
    )


def qwen2_5_7b_dapo() -> TrainConfig:
    """Qwen2.5-7B on DAPO-Math-17k on 32 GPUs: 32 ranks and 8 engines take turns. Planned only; no GPU has run it.

    Hyperparameters: verl's recipe/dapo/test_dapo_7b_math.sh, which runs on 64 GPUs, and dynamic sampling as in DAPO (Yu
    et al. 2025, arXiv 2503.14476).
    """
    return _in_turns(
        "Qwen2.5-7B",
        num_gpus=32,
        devices_per_engine=4,
        n=16,
        data=DataConfig(
            train_files=("data/dapo-math-17k.jsonl",),
            train_batch_size=512,
            max_prompt_length=2048,
            max_response_length=8192,
        ),
        algorithm=AlgorithmConfig(max_num_gen_batches=10, overlong=OverlongConfig(buffer_len=4096)),
        actor=ActorConfig(
            optim=ActorOptimConfig(lr_warmup_steps=10, weight_decay=0.1),
            loss=PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=10.0),
            ppo_mini_batch_size=32,
            ppo_max_token_len=20_480,
        ),
        steps=200,
    )


LARGE: Mapping[str, Callable[[], TrainConfig]] = {
    recipe.__name__: recipe
    for recipe in (
        qwen2_5_0_5b_gsm8k,
        qwen2_5_1_5b_gsm8k,
        qwen2_5_7b_gsm8k,
        qwen3_32b_gsm8k,
        qwen3_30b_a3b_gsm8k,
        qwen2_5_vl_7b_geo3k,
        qwen2_5_7b_dapo,
    )
}
"""All recipes of this file, by name."""


def _gsm8k(
    *, train_batch_size: int, max_prompt_length: int, max_response_length: int
) -> DataConfig:
    return DataConfig(
        train_files=("data/gsm8k/train.jsonl",),
        val_files=("data/gsm8k/test.jsonl",),
        train_batch_size=train_batch_size,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
    )


def _grpo(kl_loss_coef: float) -> PolicyLossConfig:
    return PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.2, kl_loss_coef=kl_loss_coef)


def _gsm8k_on_one_gpu(model: str) -> TrainConfig:
    return TrainConfig(
        model=model,
        reward="math-verify",
        data=_gsm8k(train_batch_size=256, max_prompt_length=512, max_response_length=512),
        rollout=RolloutConfig(engine="vllm", n=5),
        algorithm=AlgorithmConfig(filter_groups=False),
        actor=ActorConfig(loss=_grpo(0.001), ppo_mini_batch_size=64),
        trainer=TrainerConfig(total_training_steps=435),
    )


def _in_turns(
    model: str,
    *,
    num_gpus: int,
    devices_per_engine: int,
    n: int,
    data: DataConfig,
    actor: ActorConfig,
    steps: int,
    algorithm: AlgorithmConfig | None = None,
) -> TrainConfig:
    """Return settings for a cluster whose GPUs have a rank of FSDP2 and a part of an engine each, by turns."""
    return TrainConfig(
        model=model,
        runtime="ray",
        controllers=max(1, num_gpus // 8),
        reward="math-verify",
        data=data,
        rollout=RolloutConfig(
            engine="vllm",
            n=n,
            num_processes=num_gpus // devices_per_engine,
            tensor_parallel_size=devices_per_engine,
            colocated=True,
        ),
        algorithm=algorithm or AlgorithmConfig(filter_groups=False),
        actor=actor,
        trainer=TrainerConfig(num_processes=num_gpus, total_training_steps=steps),
    )
