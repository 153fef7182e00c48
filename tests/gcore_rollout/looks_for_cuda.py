"""A module for a fork server that looks for CUDA at import, as torch.utils.cpp_extension and diffusers do."""

import json
import os
from typing import NoReturn

import torch

from gcore_rollout import RolloutError

CHECK_BEFORE_IMPORT = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
IS_AVAILABLE = torch.cuda.is_available()


def report() -> NoReturn:
    """Tell what a child of the server finds, as an error."""
    found = {
        "check before import": CHECK_BEFORE_IMPORT,
        "server has CUDA": IS_AVAILABLE,
        "initialized": torch.cuda.is_initialized(),
        "is in bad fork": torch.cuda._is_in_bad_fork(),  # pyright: ignore[reportPrivateUsage] - what users would meet
        "devices": torch.cuda.device_count(),
    }
    raise RolloutError(json.dumps(found))
