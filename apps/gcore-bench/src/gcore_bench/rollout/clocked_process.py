"""Makes a clocked engine in its process; imports what that needs there only."""

from pathlib import Path
from typing import Literal

from gcore_rollout import Engine

Source = Literal["caller", "here", "file"]
"""The weights that the caller gives; tensors in the engine's own process; a file, read at each update."""


def make(model: Path, clock: Path, source: Source, file: Path, *, max_num_seqs: int) -> Engine:
    """See `clocked_engine.make_engine`."""
    from gcore_bench.rollout.clocked_engine import make_engine

    return make_engine(model, clock, source, file, max_num_seqs=max_num_seqs)
