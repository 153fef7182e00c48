"""Errors of training ranks: those of collectives that miss a rank, and those of code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectLostError
from torch.distributed import DistBackendError, DistNetworkError

from gcore_controller import ClusterError, RankCodeError, RankError, TrainerSpec
from gcore_controller.trainer_group import join_ranks, rank_failure

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:38475"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError(
            "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
        ),
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
        RuntimeError(
            "The size of tensor a (3) must match the size of tensor b (4) at non-singleton dimension 0"
        ),
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
@pytest.mark.parametrize(
    ("number", "how"),
    [
        ("SIGKILL", "was killed by SIGKILL"),
        ("SIGSTOP", "gave no sign of life for 2 s: it was stopped, or is stuck"),
    ],
)
def test_a_loss_is_named_by_every_later_call(number: str, how: str) -> None:
    """Of local ranks: the caller that met it may have carried on."""
    program = Path(__file__).with_name("ranks_that_are_killed.py")
    done = subprocess.run(
        [sys.executable, program, number], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == [f"training rank 0 (process {found['pid']}) {how}"] * 4


def test_a_network_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any rank waits for another one; callers get the error as it is."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")

    def make_worker(device: str) -> Any:
        raise AssertionError(f"no rank meets the others on {device}")

    spec = TrainerSpec(
        make_worker=make_worker,
        num_ranks=2,
        device="cpu",
        num_threads=1,
        enter_process=lambda _: None,
    )
    with pytest.raises(
        ClusterError, match=r"GLOO_SOCKET_IFNAME is 'eth77'; expected an interface of .+: lo"
    ) as info:
        join_ranks(spec, 0, None, "cpu")
    assert rank_failure(info.value, "training rank 0 failed", ()) is info.value
