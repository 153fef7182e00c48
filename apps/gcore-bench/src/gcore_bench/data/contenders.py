"""Read a data set up to its first batch of prompts, in the process of a measurement."""

import os
import resource
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from gcore_bench.harness.measure import settle, status_bytes
from gcore_bench.harness.processes import Spec

_BATCH_SIZE = 512
_MAX_LENGTH = 1024


def run(spec: Spec) -> dict[str, float]:
    """Return the seconds and the memory of a contender, beyond those of its imports."""
    prepare = _CONTENDERS[spec.contender]
    start = prepare(spec)
    before_bytes = status_bytes("RssAnon")
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    kept = start()
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    settle()
    own_bytes = status_bytes("RssAnon") - before_bytes
    del kept
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "own_bytes": float(own_bytes),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
    }


def _gcore(spec: Spec, *, in_memory: bool = False) -> Callable[[], Any]:
    from gcore_controller import PromptLoader
    from gcore_llm.config import DataConfig
    from gcore_llm.prompts import load_files
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_runs import inputs

    os.environ["XDG_CACHE_HOME"] = f"{spec.folder}/cache"
    if in_memory:
        inputs.LARGE_BYTES = 2**60
    data, tokenizer = DataConfig(train_files=(spec.options["file"],), max_prompt_length=_MAX_LENGTH), tiny_tokenizer()

    def start() -> Any:
        prompts = load_files(data, tokenizer, seed=spec.options["seed"])
        loader = PromptLoader(prompts.train, seed=spec.options["seed"])
        return prompts, loader, loader.take(_BATCH_SIZE)

    return start


def _verl(spec: Spec) -> Callable[[], Any]:
    """As verl's RLHFDataset: `datasets` in its cache, and a filter that renders and tokenizes every prompt."""
    import datasets
    import torch

    from gcore_llm.tiny_model import tiny_tokenizer

    datasets.disable_progress_bars()
    tokenizer = tiny_tokenizer()

    def start() -> Any:
        rows = datasets.load_dataset(
            "json", data_files=spec.options["file"], split="train", cache_dir=f"{spec.folder}/datasets"
        )
        rows = rows.filter(lambda row: len(tokenizer(row["prompt"])["input_ids"]) <= _MAX_LENGTH)
        order = iter(torch.utils.data.RandomSampler(rows))
        return rows, order, [rows[i] for i in islice(order, _BATCH_SIZE)]

    return start


def _gcore_index(spec: Spec) -> Callable[[], Any]:
    from gcore_controller import PromptLoader
    from gcore_runs.data.tables import ArrowRows

    def start() -> Any:
        loader = PromptLoader(ArrowRows([Path(spec.options["file"])]), seed=spec.options["seed"])
        return loader, loader.take(_BATCH_SIZE)

    return start


def _torch_index(spec: Spec) -> Callable[[], Any]:
    """The same rows in the order of torch's RandomSampler, as verl and TRL have it."""
    import torch

    from gcore_runs.data.tables import ArrowRows

    def start() -> Any:
        rows = ArrowRows([Path(spec.options["file"])])
        order = iter(torch.utils.data.RandomSampler(range(len(rows))))
        return rows, order, [rows[i] for i in islice(order, _BATCH_SIZE)]

    return start


_CONTENDERS: dict[str, Callable[[Spec], Callable[[], Any]]] = {
    "gcore, first start": _gcore,
    "gcore, later starts": _gcore,
    "gcore, in memory": lambda spec: _gcore(spec, in_memory=True),
    "verl's way": _verl,
    "gcore": _gcore_index,
    "RandomSampler": _torch_index,
}
