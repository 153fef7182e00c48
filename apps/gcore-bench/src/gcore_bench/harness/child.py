"""The process of one measurement: it does the work of a spec and writes what comes of it, as JSON, to a file."""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The work of one process."""

    work: str
    """Name of the module whose ``run(spec)`` does it."""
    part: str = ""
    contender: str
    folder: str
    """Scratch folder, which the ranks of a contender share."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    rank: int = 0
    world_size: int = 1
    threads: int = 1
    """Threads of torch."""


def main() -> None:
    """Do the work of the spec in ``argv[1]``; its result goes to the file ``argv[2]``."""
    _work(Spec(**json.loads(sys.argv[1])), Path(sys.argv[2]))


def forked_main(spec: Spec, output: Path, log: Path) -> None:
    """Do the same in a forked process, whose stdout and stderr go to ``log``."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    _work(spec, output)


@contextmanager
def joined_world(spec: Spec) -> Generator[None]:
    """Join the gloo group of all ranks of a contender, which meet in a file of their folder."""
    import torch.distributed as dist

    store = Path(spec.folder) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=spec.rank, world_size=spec.world_size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _work(spec: Spec, output: Path) -> None:
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        torch.set_num_threads(spec.threads)
        result = import_module(spec.work).run(spec)
    except Exception as error:
        traceback.print_exc()
        output.write_text(json.dumps({"failure": " ".join(f"{type(error).__name__}: {error}".split())}))
        # Destructors of process groups would wait for ranks that are still at work.
        os._exit(1)
    output.write_text(json.dumps({"result": result}))


if __name__ == "__main__":
    main()
