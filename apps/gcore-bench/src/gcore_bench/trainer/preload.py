"""Modules that every contender's process needs; the server that they are forked from imports them once."""

import torch
import torch._dynamo
import torch.distributed.fsdp
import transformers.models.auto.modeling_auto
import transformers.models.qwen2.modeling_qwen2

import gcore_trainer.torch.packed_model
import gcore_trainer.trainer

PRELOADED = (
    torch._dynamo,
    torch.distributed.fsdp,
    transformers.models.auto.modeling_auto,
    transformers.models.qwen2.modeling_qwen2,
    gcore_trainer.torch.packed_model,
    gcore_trainer.trainer,
)
