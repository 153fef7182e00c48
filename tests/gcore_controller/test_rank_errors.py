"""Errors of training ranks: those of collectives that miss a rank, and those of code."""

import json
import pickle
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.exceptions import ObjectLostError
from torch.distributed import (
    DistBackendError,
    DistNetworkError,
    HashStore,  # pyright: ignore[reportPrivateImportUsage]
)
from torch.distributed.device_mesh import init_device_mesh

from gcore_controller import ClusterError, RankCodeError, RankError, TrainerSpec
from gcore_controller.errors import DeviceError
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
    found = rank_failure(error, 1, "training rank 1 failed", ())
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
    assert type(rank_failure(error, 1, "training rank 1 failed", ())) is RankCodeError
    assert rank_failure(error, 1, "training rank 1 failed", (type(error),)) is error


@pytest.mark.parametrize(
    "reason",
    [
        "uncorrectable ECC error encountered",
        "unspecified launch failure",
        "uncorrectable NVLink error detected during the execution",
    ],
)
def test_a_device_that_fails_is_a_loss_of_its_rank(reason: str) -> None:
    error = torch.AcceleratorError(f"CUDA error: {reason}\nFor debugging consider ...")
    found = rank_failure(error, 3, "training rank 3 failed", ())
    arrived = pickle.loads(pickle.dumps(found))
    assert isinstance(arrived, DeviceError)
    assert (str(arrived), arrived.rank) == ("training rank 3 failed", 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "first", "second", "limit_s"),
    [
        (
            "SIGKILL",
            "training rank 0 (process {pid}) was killed by SIGKILL; {log} ends with: begins",
            "",
            0.0,
        ),
        (
            "abort",
            "training rank 0 (process {pid}) was killed by SIGABRT; {log} ends with: [Rank 0] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE) | ",
            "",
            0.0,
        ),
        (
            "SIGSTOP",
            "training rank 0 (process {pid}) gave no sign of life for 2 s in score: it is stopped on {host}, "
            "by /proc/{pid}/stat; its log is {log}",
            "",
            2.0,
        ),
        (
            "hang",
            "training rank 0 (process {pid}) gave no answer to score within 10 s: its stacks are on {host} in {log}",
            "; training rank 1 (process ",
            10.0,
        ),
    ],
)
def test_a_loss_is_named_by_every_later_call(
    tmp_path: Path, what: str, first: str, second: str, limit_s: float
) -> None:
    """Of local ranks: the caller that met it may have carried on. One that hangs is alive, and another waits for it."""
    program = Path(__file__).with_name("ranks_that_are_killed.py")
    done = subprocess.run(
        [sys.executable, program, what, tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    error, *later = found["errors"]
    expected = first.format(
        pid=found["pid"], log=tmp_path / "rank-0.log", host=socket.gethostname()
    )
    assert error.startswith(expected)
    assert second in error
    assert later == [error] * 3
    # Looks at the ranks are a second apart, and stacks take two.
    assert limit_s <= found["seconds"][0] < limit_s + 60
    stacks = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    if what == "hang":
        assert "in wait_for_ever" in stacks[0]
    if limit_s:
        assert "in barrier" in stacks[1]
        assert "in score" in stacks[1]


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
    assert rank_failure(info.value, 0, "training rank 0 failed", ()) is info.value


class _Meshed:
    """A worker with a group of its own."""

    roles = ("actor",)

    def __init__(self, device: str) -> None:
        self.group: Any = dist.new_group([0])
        self.mesh = init_device_mesh(device, (1, 1), mesh_dim_names=("dp", "cp"))

    def replica(self, role: str) -> tuple[int, int]:
        assert role == "actor"
        return 0, 1


def test_a_collective_of_any_group_may_take_as_long_as_a_first_call() -> None:
    make_worker: Any = _Meshed
    spec = TrainerSpec(
        make_worker=make_worker,
        num_ranks=1,
        device="cpu",
        num_threads=2 * torch.get_num_threads() + 1,
        enter_process=lambda _: None,
        heartbeat_timeout_s=7.0,
    )
    try:
        num_threads = torch.get_num_threads()
        worker, _ = join_ranks(spec, 0, HashStore(), "cpu", num_here=2)
        assert torch.get_num_threads() == num_threads, "two ranks of a machine share its threads"
        assert isinstance(worker, _Meshed)
        groups: list[Any] = [dist.group.WORLD, worker.group, *worker.mesh.get_all_groups()]
        for group in groups:
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=350)
    finally:
        dist.destroy_process_group()
