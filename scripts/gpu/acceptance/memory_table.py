"""The table of docs/on-one-gpu.md by gcore-placement's memory law: ``python -m acceptance.memory_table`` prints it."""

from typing import Any

from gcore_placement import (
    Device,
    DeviceSetting,
    Job,
    Lengths,
    ModelShape,
    TrainingLayout,
    TrainingState,
    plan_device,
)

GPU_GB = (24, 48, 80, 141)
MODELS = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11_008, 36, 16, 2),
    "7B": (3584, 18_944, 28, 28, 4),
    "14B": (5120, 13_824, 48, 40, 8),
    "32B": (5120, 27_648, 64, 40, 8),
}
"""Hidden size, intermediate size, layers, heads and key-value heads of Qwen2.5."""
_TIED = ("0.5B", "1.5B", "3B")
_VOCAB_SIZES = {"7B": 152_064, "14B": 152_064, "32B": 152_064}
_PROMPT, _RESPONSE = 1024, 3072
"""Tokens of the longest prompt and response."""
_MAX_TOKENS = 16_384
_LORA_RANK = 16


def shape_of(size: str) -> ModelShape:
    """Return the shape of a size."""
    hidden, intermediate, layers, heads, kv_heads = MODELS[size]
    return ModelShape.from_config(
        {
            "model_type": "qwen2",
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": _VOCAB_SIZES.get(size, 151_936),
            "tie_word_embeddings": size in _TIED,
        }
    )


def table() -> str:
    """Return a row for each model: its bytes in training, and for each GPU the first settings with which it fits."""
    columns = "".join(f" {size} GB |" for size in GPU_GB)
    lines = [
        f"| model | trainer, GB | engine's weights, GB |{columns}",
        "|---|---|---|" + "---|" * len(GPU_GB),
    ]
    for size in MODELS:
        trainer, engine = _shares(size)
        cells = "".join(f" {_fitting(size, gb)} |" for gb in GPU_GB)
        lines.append(f"| {size} | {trainer:.1f} | {engine:.1f} |{cells}")
    return "\n".join(lines)


def _shares(size: str) -> tuple[float, float]:
    """Return the bytes of the trainer at its peak and of the engine's weights, in GB, with the defaults."""
    plan = _plan(size, GPU_GB[-1], {})
    return plan.share("trainer") / 1e9, plan.roles["policy engine"]["weights"] / 1e9


def _fitting(size: str, gb: float) -> str:
    shape: Any = shape_of(size)
    adapters = shape.adapter_parameters(_LORA_RANK)
    for words, state in (
        ("", {}),
        ("optimizer on the host", {"offload": "optimizer"}),
        ("LoRA", {"adapter_parameters": adapters}),
    ):
        plan = _plan(size, gb, state)
        if plan.fits:
            how = "by turns" if plan.takes_turns else "side by side"
            return ", ".join(filter(None, (words, how)))
    return "no"


def _plan(size: str, gb: float, state: dict[str, Any]) -> Any:
    job = Job(
        policy=shape_of(size),
        prompt_lengths=Lengths.recorded([_PROMPT]),
        response_lengths=Lengths.recorded([_RESPONSE]),
        train_batch_size=32,
        n=8,
    )
    layout = TrainingLayout(
        backend="torch",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=1,
        gradient_checkpointing=True,
        ppo_max_token_len=_MAX_TOKENS,
    )
    device = Device.of_memory(f"{gb} GB", gb * 1e9)
    setting = DeviceSetting(job=job, layout=layout, device=device, state=TrainingState(**state))
    return plan_device(setting)


if __name__ == "__main__":
    print(table())
