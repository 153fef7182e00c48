"""The process that one contender runs in: the command line holds a spec, the figures go to a file."""

import json
import logging
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

from gcore_bench.ckpt.figures import Figures, Spec


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    output = Path(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        result: dict[str, object] = asdict(_run(spec))
    except Exception as error:
        traceback.print_exc()
        output.write_text(json.dumps({"failure": f"{type(error).__name__}: {error}"}))
        raise SystemExit(1) from None
    output.write_text(json.dumps(result))


def _run(spec: Spec) -> Figures:
    import torch

    torch.set_num_threads(spec.threads)
    match spec.part:
        case "ranks":
            from gcore_bench.ckpt import ranks as part
        case "loop":
            from gcore_bench.ckpt import loop as part
        case _:
            from gcore_bench.ckpt import single as part
    return part.run(spec)


if __name__ == "__main__":
    main()
