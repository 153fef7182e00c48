"""The world that the processes of one contender make up."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from gcore_bench.trainer.figures import Spec


@contextmanager
def joined_world(spec: Spec) -> Generator[None]:
    """gloo ranks that meet in a file of the folder."""
    store = Path(spec.folder) / f"store-{spec.contender}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=spec.rank, world_size=spec.world_size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
