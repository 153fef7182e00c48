"""What every contender's process would import, each for itself; their server imports it once."""

import torch
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.models.qwen2.modeling_qwen2

import gcore_trainer.torch.trainer

PRELOADED = (
    torch._dynamo,
    torch.distributed.fsdp,
    transformers.models.auto.modeling_auto,
    transformers.models.qwen2.modeling_qwen2,
    gcore_trainer.torch.trainer,
)
