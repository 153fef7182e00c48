"""Blocks of a denoiser compiled by torch.compile."""

import os
import shutil
from typing import Any

import torch

from gcore_rollout.errors import RolloutError

_MOST_GRAPHS = 64
"""Graphs of a block's code; of more, torch.compile gives up without an error."""


def compile_blocks(denoiser: torch.nn.Module) -> None:
    """Compile the blocks of a model of diffusers, with batch and lengths as variables, at their first calls.

    Raises:
        RolloutError: the model is on CPU, and there is no C++ compiler, which Inductor needs.
    """
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if next(denoiser.parameters()).device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise RolloutError("compile is True; expected a C++ compiler on CPU, such as g++")
    dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    for part in denoiser.children():
        if isinstance(part, torch.nn.ModuleList):
            for block in part:
                block.forward = torch.compile(block.forward, dynamic=True)
