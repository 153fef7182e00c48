"""Where training ranks compute on a machine with GPUs, with stand-ins for what they call of torch."""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from gcore_controller import TrainerSpec
from gcore_controller.runtimes import local
from gcore_controller.trainer_group import join_ranks

WORKER = SimpleNamespace(roles=["actor"], replica=lambda _: (0, 1))


class Ended(BaseException):
    """The process of a rank ends."""


def spec(device: str, make_worker: Callable[[str], Any] = lambda _: WORKER) -> TrainerSpec:
    return TrainerSpec(
        make_worker=make_worker,
        num_ranks=3,
        device=device,
        num_threads=1,
        enter_process=lambda _: None,
    )


@pytest.mark.parametrize(("rank", "device"), [(0, "cuda:0"), (1, "cuda:1"), (2, "cuda:0")])
def test_local_ranks_have_the_gpus_in_turn(
    rank: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def ended(code: int) -> None:
        assert code == 0
        raise Ended

    def joined(own: TrainerSpec, number: int, store: Any, place: str, *, num_here: int) -> Any:
        del store
        assert num_here == own.num_ranks
        calls.append(f"rank {number} joins on {place}")
        raise EOFError

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: calls.append(f"set {place}"))
    monkeypatch.setattr(local, "join_ranks", joined)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(os, "_exit", ended)
    connection = cast(Any, SimpleNamespace())
    with pytest.raises(Ended):
        local._run_rank(rank, spec("cuda"), tmp_path / "store", connection)  # pyright: ignore[reportPrivateUsage]  # the body of a process
    assert calls == [f"set {device}", f"rank {rank} joins on {device}"]


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cuda:1", {"backend": "cpu:gloo,cuda:nccl", "device_id": torch.device("cuda:1")}),
        ("cpu", {"backend": "gloo"}),
    ],
)
def test_ranks_exchange_tensors_where_they_are(
    device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And objects on the host, in groups of which torch ends a collective after half an hour, not ten minutes."""
    found: list[dict[str, Any]] = []

    def init(**given: Any) -> None:
        found.append(given)

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(os, "environ", {"TORCH_NCCL_TRACE_BUFFER_SIZE": "500"})
    places: list[str] = []
    worker, (replicas, log) = join_ranks(
        spec(device, lambda place: places.append(place) or WORKER), 2, "store", device
    )
    assert (worker, replicas, places) == (WORKER, {"actor": (0, 1)}, [device])
    # The collectives of NCCL are recorded, and written next to this process's log.
    recorded = {name.removeprefix("TORCH_NCCL_"): value for name, value in os.environ.items()}
    assert recorded.pop("TRACE_BUFFER_SIZE") == "500"
    if device == "cpu":
        assert not recorded
    else:
        pipe = f"{tempfile.gettempdir()}/gcore-{os.getpid()}-"
        assert recorded == {
            "DUMP_ON_TIMEOUT": "1",
            "DEBUG_INFO_TEMP_FILE": f"{Path(log).parent}/nccl_",
            "DEBUG_INFO_PIPE_FILE": pipe,
        }
    assert found == [{**options, "store": "store", "rank": 2, "world_size": 3}]
    backend: Any = dist.Backend(options["backend"])
    timeout = distributed_c10d._get_default_timeout(backend)  # pyright: ignore[reportPrivateUsage]
    assert timeout.total_seconds() == 1800
