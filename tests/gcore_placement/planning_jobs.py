"""Models, jobs and clusters for tests of the planner."""

from typing import Any

from gcore_placement import Cluster, Device, Job, Lengths, ModelShape

QWEN_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
QWEN_32B: dict[str, Any] = {
    **QWEN_7B,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}


def make_job(
    policy: dict[str, Any] = QWEN_7B, judge: dict[str, Any] | None = None, **changed: Any
) -> Job:
    """A job of 64 prompts with 8 responses of about 1500 tokens."""
    judged = {
        "judge": ModelShape.from_config(judge) if judge else None,
        "judge_lengths": Lengths.log_normal(median=400, sigma=0.6, longest=2048) if judge else None,
    }
    options: dict[str, Any] = {
        "prompt_lengths": Lengths.log_normal(median=256, sigma=0.5, longest=1024),
        "response_lengths": Lengths.log_normal(median=1500, sigma=0.8, longest=8192),
        "train_batch_size": 64,
        "n": 8,
        **judged,
        **changed,
    }
    return Job(policy=ModelShape.from_config(policy), **options)


def make_cluster(num_devices: int, device: str = "H100", **changed: Any) -> Cluster:
    return Cluster(num_devices=num_devices, device=Device.named(device), **changed)
