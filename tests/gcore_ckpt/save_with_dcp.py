"""Run by `test_dcp.py`: two ranks of a gloo group save a sharded state with torch.distributed.checkpoint."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

SIZE = 2


def save(folder: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE
    )
    mesh = init_device_mesh("cpu", (SIZE,))
    state = {
        "model": {
            "rows": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.arange(12).view(4, 3), mesh, [Shard(1)]),
            "one": distribute_tensor(torch.ones(1, 2, dtype=torch.bfloat16), mesh, [Shard(0)]),
            "copies": distribute_tensor(torch.full((3,), 2.5), mesh, [Replicate()]),
        },
        "step": 12,
    }
    save_with_dcp(state, checkpoint_id=folder / "dcp")
    dist.destroy_process_group()


if __name__ == "__main__":
    pids: list[int] = []
    for number in range(SIZE):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                save(Path(sys.argv[1]), number)
                code = 0
            finally:
                os._exit(code)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))
