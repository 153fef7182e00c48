"""The process that one rank of a contender runs in: the command line holds a spec, the figures go to a file."""

import json
import logging
import sys
import warnings
from pathlib import Path

from gcore_bench.trainer.figures import Spec


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Path(sys.argv[2]).write_text(json.dumps(_run(spec)))


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
        case _:
            from gcore_bench.trainer import setup as part
    return part.run(spec)


if __name__ == "__main__":
    main()
