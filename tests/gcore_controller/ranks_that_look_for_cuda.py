"""A program of `test_local_cuda.py`: the fork server of its training rank imports this file, which looks for CUDA."""

import json
import os
import sys
from typing import NoReturn

import torch

from gcore_controller import LocalTrainerGroup, RankError, TrainerSpec

CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
CHECK_BEFORE_IMPORT = os.environ.get(CHECK)
IS_AVAILABLE = torch.cuda.is_available() if __name__ != "__main__" else False


def enter(rank: int) -> None:
    del rank


def report(device: str) -> NoReturn:
    """Tell what a rank finds, as an error."""
    server = sys.modules["ranks_that_look_for_cuda"]
    found = {
        "check before import": server.CHECK_BEFORE_IMPORT,
        "server has CUDA": server.IS_AVAILABLE,
        "initialized": torch.cuda.is_initialized(),
        "is in bad fork": torch.cuda._is_in_bad_fork(),  # pyright: ignore[reportPrivateUsage] - what users would meet
        "devices": torch.cuda.device_count(),
        "device": device,
    }
    raise RankError(json.dumps(found))


if __name__ == "__main__":
    from ranks_that_look_for_cuda import enter as enter_process, report as make_worker

    spec = TrainerSpec(
        make_worker=make_worker,
        num_ranks=1,
        device="cpu",
        num_threads=1,
        enter_process=enter_process,
        preload=["ranks_that_look_for_cuda"],
    )
    try:
        LocalTrainerGroup[list[int]](spec, cost_of=lambda _: 1.0)
    except RankError as error:
        print(json.dumps({"rank": json.loads(str(error)), "here": os.environ.get(CHECK)}))
