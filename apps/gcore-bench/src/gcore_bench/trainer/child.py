"""What a process does: one rank's part of one contender, its figures to a file, all it says to another."""

import json
import logging
import os
import traceback
import warnings
from pathlib import Path

from gcore_bench.trainer.figures import Spec


def main(spec: Spec, output: Path, log: Path) -> None:
    """End with exit code 1 where the work fails; the reason is then in ``output``."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        rows = _run(spec)
    except Exception as error:
        traceback.print_exc()
        output.write_text(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
        # Groups whose other ranks are still at work would wait for them.
        os._exit(1)
    output.write_text(json.dumps({"rows": rows}))


def _run(spec: Spec) -> dict[str, dict[str, float]]:
    import torch

    torch.set_num_threads(spec.options["threads"])
    match spec.part:
        case "step":
            from gcore_bench.trainer import step as part
        case "balance":
            from gcore_bench.trainer import balance as part
        case "log-probs":
            from gcore_bench.trainer import log_probs as part
        case "context":
            from gcore_bench.trainer import context as part
        case "mfu":
            from gcore_bench.trainer import mfu as part
        case "planner":
            from gcore_bench.placement.planner import work as part
        case _:
            from gcore_bench.trainer import setup as part
    return part.run(spec)
