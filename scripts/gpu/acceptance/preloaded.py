"""What the parts import, all of it: the process that they are forked from imports this once."""

import pytest
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from acceptance import checkpoint, gpu_tests, grpo, multi, rollout, training

__all__ = [
    "checkpoint",
    "gpu_tests",
    "grpo",
    "modeling_qwen2",
    "modeling_qwen3",
    "modeling_qwen3_moe",
    "multi",
    "pytest",
    "rollout",
    "training",
]
