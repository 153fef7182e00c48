"""Run by `rank_pool.py` with files of cases: per request line, `[folder, port, size]`, forks the ranks of a group.

It answers their pids. A rank joins the others by the store at the port, connects to the socket in the folder and runs
what it is sent: the name of a function of the cases and its arguments, pickled.
"""

import ctypes
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from rank import Rank
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def cases() -> list[ModuleType]:
    """The files of cases, imported before the first fork."""
    files = [Path(argument) for argument in sys.argv[1:]]
    sys.path[:0] = sorted({str(file.parent) for file in files})
    return [importlib.import_module(file.stem) for file in files]


CASES = cases()
PR_SET_PDEATHSIG = 1


def run_rank(folder: Path, port: int, number: int, size: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=number, world_size=size)
    rank = Rank.joined()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / "socket"))
        connection = Connection(client.detach())
    connection.send(number)
    while True:
        try:
            function, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:  # the test process is done
            return
        # Not Connection.send: it would share tensors instead of copying them.
        connection.send_bytes(pickle.dumps(outcome(_function(function), rank, arguments)))


def outcome(
    function: Callable[..., object], rank: Rank, arguments: tuple[object, ...]
) -> dict[str, Any]:
    try:
        return {"value": function(rank, *arguments)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def _function(name: str) -> Callable[..., object]:
    return next(getattr(module, name) for module in CASES if hasattr(module, name))


def serve() -> None:
    torch.set_num_threads(1)
    # Collections of the ranks leave out what they have imported, whose pages they would otherwise copy, too.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead children leave no zombies
    for line in sys.stdin:
        folder, port, size = json.loads(line)
        pids: list[int] = []
        for number in range(size):
            pid = os.fork()
            if pid == 0:
                # One that is stopped does not see that the test process is done.
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                os.dup2(2, 1)  # replies of the server are no place for what a rank prints
                try:
                    run_rank(Path(folder), port, number, size)
                finally:
                    os._exit(0)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    serve()
