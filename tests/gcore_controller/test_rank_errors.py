"""Errors of training ranks: those of collectives that miss a rank, and those of code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import ObjectLostError
from torch.distributed import DistBackendError, DistNetworkError

from gcore_controller import RankCodeError, RankError
from gcore_controller.trainer_group import rank_failure

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:38475"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"),
        RuntimeError("ncclCommAbort was called, because another rank is gone"),
        DistBackendError("remote process exited or there was a network error"),
        DistNetworkError("The client socket has timed out after 300s"),
        ConnectionResetError(104, "Connection reset by peer"),
        ObjectLostError("00ff", None, ""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_rank_that_misses_another_one_is_a_loss(error: Exception) -> None:
    found = rank_failure(error, "training rank 1 failed", ())
    assert type(found) is RankError
    assert str(found) == "training rank 1 failed"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"),
        ValueError("Connection closed by peer, says a loss"),
        ZeroDivisionError("division by zero"),
        OSError(28, "No space left on device"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_of_code_is_none(error: Exception) -> None:
    assert type(rank_failure(error, "training rank 1 failed", ())) is RankCodeError
    assert rank_failure(error, "training rank 1 failed", (type(error),)) is error


@pytest.mark.slow
def test_a_loss_is_named_by_every_later_call() -> None:
    """Of local ranks: the caller that met it may have carried on."""
    program = Path(__file__).with_name("ranks_that_are_killed.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == [f"training rank 0 (process {found['pid']}) was killed by SIGKILL"] * 4
