"""Part 9: how long saving a checkpoint stops training, against torch.distributed.checkpoint with pinned memory."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from acceptance.trial import Trial
from gcore_ckpt import Checkpointer, SaveHandle

_SIZE_BYTES = 18e9
_NUM_TENSORS = 96
_NUM_SAVES, _NUM_DCP_SAVES = 3, 2
_DISK_COPIES = 3
"""Steps on the disk at a time, with one to spare."""
_SAVE_S = 15.0
"""Seconds that writing one checkpoint may take."""

State = dict[str, torch.Tensor]


def stalls(trial: Trial) -> None:
    """Measure the time from a save's call until the weights may change, first and later, for both libraries."""
    folder = trial.work / "checkpoints"
    folder.mkdir()
    size_bytes = 4e6 if trial.is_small else _fitting(trial, folder)
    state = _state(trial, size_bytes)
    trial.figure("checkpoint", sum(t.nbytes for t in state.values()) / 1e9, "GB")
    if size_bytes < _SIZE_BYTES and not trial.is_small:
        trial.note(
            "Smaller than 18 GB, by the capacity and the rate of the disk and the memory of the host."
        )
    for name, measure, aim in (
        ("gcore-ckpt", _gcore, {"at_most": 0.5}),
        ("DCP, pinned memory", _dcp, {}),
    ):
        with trial.attempt(name):
            seconds, written = measure(trial, folder, state)
            trial.figure(f"{name}: first stall", seconds[0], "s")
            trial.figure(f"{name}: later stalls, median", float(np.median(seconds[1:])), "s", **aim)
            trial.figure(f"{name}: until it is written, last", written, "s")
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fitting(trial: Trial, folder: Path) -> float:
    """Return the bytes that fit on the disk, in the host's memory and on the device, and are written in time."""
    disk = shutil.disk_usage(folder).free / _DISK_COPIES
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 3
    device = torch.cuda.mem_get_info()[0] * 0.8 if trial.device.startswith("cuda") else host
    probe = folder / "probe"
    block = np.ones(512 << 20, np.uint8)

    def write() -> None:
        with probe.open("wb") as file:
            file.write(block.data)
            os.fsync(file.fileno())

    rate = block.nbytes / trial.measure_seconds(write)
    probe.unlink()
    trial.figure("rate of the disk", rate / 1e9, "GB per second")
    return min(_SIZE_BYTES, disk, host, device, rate * _SAVE_S)


def _state(trial: Trial, size_bytes: float) -> State:
    num_values = int(size_bytes / 4 / _NUM_TENSORS)
    return {f"tensor {i}": torch.rand(num_values, device=trial.device) for i in range(_NUM_TENSORS)}


def _change(state: State) -> None:
    for tensor in state.values():
        tensor.add_(1.0)


def _gcore(trial: Trial, folder: Path, state: State) -> tuple[list[float], float]:
    seconds: list[float] = []
    written = 0.0
    with Checkpointer(folder / "gcore", keep=1, process_group=None) as checkpointer:
        for step in range(_NUM_SAVES):
            _change(state)
            saves: list[SaveHandle] = []

            def save(at: int = step, saves: list[SaveHandle] = saves) -> None:
                saves.append(checkpointer.save(at, state))

            seconds.append(trial.measure_seconds(save))
            written = seconds[-1] + trial.measure_seconds(saves[0].wait)
    return seconds, written


def _dcp(trial: Trial, folder: Path, state: State) -> tuple[list[float], float]:
    """Save by `async_save` with its own asynchronous stager; on a CPU, which has no pinned memory, by the plain one."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import async_save

    on_cuda = trial.device.startswith("cuda")
    options = StagingOptions(
        use_pinned_memory=on_cuda,
        use_shared_memory=False,
        use_async_staging=on_cuda,
        use_non_blocking_copy=on_cuda,
    )
    is_reusable = _is_reusable(
        DefaultStager(replace(options, use_async_staging=False, use_non_blocking_copy=False))
    )
    if not is_reusable:
        trial.note(
            "DCP's stager serves one save in this version of torch: each takes its pinned memory again."
        )
    stager = DefaultStager(options)
    seconds: list[float] = []
    written = 0.0
    try:
        for step in range(_NUM_DCP_SAVES):
            _change(state)
            if step and not is_reusable:
                stager.close()
                stager = DefaultStager(options)
            waits: list[Callable[[], object]] = []

            def save(
                at: int = step, waits: list[Callable[[], object]] = waits, own: Any = stager
            ) -> None:
                path = folder / f"dcp-{at}"
                saved: Any = async_save(state, checkpoint_id=path, async_stager=own, no_dist=True)
                if staged := getattr(saved, "staging_completion", None):
                    # The weights may change only now.
                    staged.result()
                waits.append((saved.upload_completion if staged else saved).result)

            seconds.append(trial.measure_seconds(save))
            written = seconds[-1] + trial.measure_seconds(waits[0])
            shutil.rmtree(folder / f"dcp-{step - 1}", ignore_errors=True)
    finally:
        stager.close()
    return seconds, written


def _is_reusable(stager: Any) -> bool:
    """Use a stager up, and return whether it serves a second save; that of torch 2.11 closes itself in its first."""
    try:
        for _ in range(2):
            stager.stage({"value": torch.zeros(1)})
    except KeyError:
        return False
    finally:
        stager.close()
    return True
