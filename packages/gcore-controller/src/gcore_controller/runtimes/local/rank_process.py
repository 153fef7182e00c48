"""The process of one training rank: it answers messages from a pipe."""

import os
import signal
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gcore_controller.errors import RankError
from gcore_controller.trainer_group import Close, ExportWeights, TrainerSpec, TrainerWorker, answer


def run_rank(rank: int, spec: TrainerSpec, store: Path, connection: Connection) -> None:
    """Answer messages until the pipe is closed or `Close` arrives.

    Each answer is a pair of an error, or None, and a value. The first one holds the rank's replica in each role.

    Args:
        rank: of this process.
        spec: of the group.
        store: file through which the ranks find each other.
        connection: this rank's end of the pipe.
    """
    spec.enter_process(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the main process decides
    os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(spec.num_threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=spec.num_ranks)
        worker = spec.make_worker(str(device))
        connection.send((None, {role: worker.replica(role) for role in worker.roles}))
        while True:
            message = connection.recv()
            if isinstance(message, ExportWeights):
                _export(worker, message, connection if rank == 0 else None)
                connection.send((None, None))
            else:
                connection.send((None, answer(worker, message)))
            if isinstance(message, Close):
                return
    except (EOFError, BrokenPipeError):  # the main process is gone
        return
    except Exception as error:
        with suppress(OSError):
            connection.send((sendable(error, spec), None))
    finally:
        os._exit(0)  # process groups whose other ranks are gone would wait for them


def sendable(error: Exception, spec: TrainerSpec) -> Exception:
    """Return the error itself if callers expect its kind, and else a `RankError` with its traceback."""
    if isinstance(error, (RankError, *spec.expected_errors)):
        return error
    return RankError(f"a training rank failed:\n{''.join(traceback.format_exception(error))}")


def _export(worker: TrainerWorker[Any], message: ExportWeights, connection: Connection | None) -> None:
    """Send each tensor as a header (name, dtype, shape, digests) and its bytes, then None."""
    import torch

    weights = worker.export_weights(averaged=message.averaged)
    digests = getattr(weights, "digests", {})
    for name, tensor in weights:
        if connection is None:
            continue
        data = tensor.detach().cpu().contiguous()
        connection.send((None, (name, data.dtype, tuple(data.shape), digests.get(name))))
        if data.numel():
            connection.send_bytes(data.reshape(-1).view(torch.uint8).numpy().data)
    if connection is not None:
        connection.send((None, None))
