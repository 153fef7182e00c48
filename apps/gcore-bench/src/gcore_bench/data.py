"""`gcore-bench data`: the start of a run on large data sets, each contender in a process of its own."""

import json
import os
import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from rich.console import Console

from gcore_bench.harness.processes import Spec, run_child, settle, status_bytes
from gcore_bench.harness.report import BenchSession, Figures, QuickOptions, Rounds, Row, verdict
from gcore_runs import Count, NonNegative

PartName = Literal["prompts", "index"]

_CONTENDERS = {
    "prompts": ("gcore, first start", "gcore, later starts", "gcore, in memory", "verl's way"),
    "index": ("gcore", "RandomSampler"),
}
_TOKENIZING = ("gcore, in memory", "verl's way")
"""Contenders that tokenize every prompt, and get fewer rows."""
_TITLES = {
    "prompts": "start on a JSONL file of prompts",
    "index": "shuffled index of an Arrow file",
}
_WORDS = [
    "Natalia",
    "sold",
    "clips",
    "to",
    "48",
    "of",
    "her",
    "friends",
    "in",
    "April",
    "and",
    "half",
    "as",
    "many",
]
_WRITTEN_ROWS = 10_000
_BATCH_SIZE = 512
_MAX_LENGTH = 1024
_AIM_S = 10.0
_AIM_BYTES = 2**30
_COLUMNS: dict[str, str] = {
    "rows": "rows ,.0f",
    "s": "wall_s .2f",
    "CPU s": "cpu_s .2f",
    "CPU µs a row": "row_us .2f",
    "own MiB": "own_bytes MB",
    "bytes a row": "row_bytes ,.1f",
    "resident MiB": "peak_bytes MB",
}
_NOTE = (
    "s: from the file to the first 512 prompts, without imports. own: memory of the process beyond that, without "
    "mapped files. resident: highest in all, with imports and mapped pages, which the kernel can drop."
)


@dataclass(frozen=True, kw_only=True)
class DataOptions(QuickOptions):
    """Measure the start of a run on many prompts, and the index of many more, against verl's way and lists."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """prompts: from a JSONL file to the first batch; index: a shuffled order of the rows of an Arrow file."""
    rounds: Count = 1
    """Number of rounds, in each of which everything is measured once, in turn."""
    rows: Count = 1_000_000
    """Rows of the part prompts, of about 280 bytes."""
    peer_rows: Count = 100_000
    """Rows of it for the contenders that tokenize every prompt, whose time and memory are proportional to them."""
    index_rows: Count = 100_000_000
    """Rows of the part index, which take 8 bytes each on disk."""
    seed: NonNegative = 0
    """Seed of the prompts and orders."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "rows": 40_000,
        "peer_rows": 300,
        "index_rows": 1_200_000,
    }


def run(options: DataOptions, console: Console) -> None:
    """Measure and print the parts of ``options``, and write their figures."""
    options = options.resize_if_quick()
    with BenchSession(options, console, notes=[_NOTE]) as session:
        for part in options.parts:
            rounds = Rounds(part, options.rounds, say=session.say)
            _write_files(part, options, session.folder)
            for turn in rounds.turns(_CONTENDERS[part]):
                num_rows = _count_rows(part, turn.contender, options)
                values = {
                    "file": str(_file_of(part, num_rows, session.folder)),
                    "seed": options.seed + turn.round,
                }
                spec = Spec(
                    work="gcore_bench.data:measure",
                    part=part,
                    contender=turn.contender,
                    folder=str(session.folder),
                    options=values,
                )
                figures, _ = run_child(spec)
                figures["rows"] = num_rows
                figures["row_us"] = figures["cpu_s"] / num_rows * 1e6
                figures["row_bytes"] = figures["own_bytes"] / num_rows
                turn.done({turn.contender: figures}, f"{figures['wall_s']:.2f} s")
            rows = rounds.summarise()
            session.report(
                _TITLES[part], _COLUMNS, rows, rounds.runs, lines=[_check_aim(part, rows)]
            )


def _check_aim(part: str, rows: Mapping[str, Row]) -> str:
    """Return whether gcore's starts take less than the time and memory that are aimed at."""
    metric = "own_bytes" if part == "index" else "peak_bytes"
    words = "of its own" if part == "index" else "resident"
    is_met = True
    for name, row in rows.items():
        if name.startswith("gcore") and name not in _TOKENIZING:
            is_met = is_met and row["wall_s"] < _AIM_S and row[metric] < _AIM_BYTES
    return f"aim: started in {_AIM_S:g} s in under 1 GiB {words}: {verdict(is_met)}"


def _count_rows(part: str, contender: str, options: DataOptions) -> int:
    """Return the number of rows that a contender reads."""
    if part == "index":
        return options.index_rows
    return options.peer_rows if contender in _TOKENIZING else options.rows


def _write_files(part: str, options: DataOptions, folder: Path) -> None:
    """Write the files of all contenders of a part."""
    for num_rows in {_count_rows(part, contender, options) for contender in _CONTENDERS[part]}:
        file = _file_of(part, num_rows, folder)
        if part == "index":
            write_index(file, num_rows)
        else:
            write_prompts(file, num_rows, options.seed)


def _file_of(part: str, num_rows: int, folder: Path) -> Path:
    return folder / (f"{num_rows}.arrow" if part == "index" else f"{num_rows}.jsonl")


def write_prompts(file: Path, num_rows: int, seed: int) -> None:
    """Write a JSONL file of questions like those of GSM8K, with answers."""
    rng = random.Random(seed)
    with file.open("w") as lines:
        for number in range(num_rows):
            question = f"{number}: {' '.join(rng.choices(_WORDS, k=45))}?"
            lines.write(
                json.dumps({"prompt": question, "answer": f"x = {number}\n#### {number}"}) + "\n"
            )


def write_index(file: Path, num_rows: int) -> None:
    """Write an Arrow file with a number for each row."""
    import pyarrow as pa
    import pyarrow.ipc

    schema = pa.schema({"prompt": pa.int64()})
    with pyarrow.ipc.new_file(str(file), schema) as writer:
        for first in range(0, num_rows, _WRITTEN_ROWS):
            numbers = np.arange(first, min(first + _WRITTEN_ROWS, num_rows))
            writer.write_batch(pa.record_batch([pa.array(numbers)], schema=schema))


def measure(spec: Spec) -> Figures:
    """Return the seconds and the memory of a contender, beyond those of its imports."""
    if spec.part == "index":
        start = _prepare_index(spec)
    elif spec.contender == "verl's way":
        start = _prepare_verl(spec)
    else:
        start = _prepare_gcore(spec)
    before_bytes = status_bytes("RssAnon")
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    rows_in_use = start()
    wall_s = time.perf_counter() - start_s
    cpu_s = time.process_time() - start_cpu_s
    settle()
    own_bytes = status_bytes("RssAnon") - before_bytes
    del rows_in_use
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "own_bytes": float(own_bytes),
        "peak_bytes": peak_bytes,
    }


def _prepare_gcore(spec: Spec) -> Callable[[], Any]:
    from gcore_controller import PromptLoader
    from gcore_llm.prompts import load_files
    from gcore_llm.sections import DataConfig
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_runs import inputs

    os.environ["XDG_CACHE_HOME"] = f"{spec.folder}/cache"
    if spec.contender == "gcore, in memory":
        inputs.LARGE_BYTES = 2**60
    data = DataConfig(train_files=(spec.options["file"],), max_prompt_length=_MAX_LENGTH)
    tokenizer = tiny_tokenizer()

    def start() -> Any:
        prompts = load_files(data, tokenizer, seed=spec.options["seed"])
        loader = PromptLoader(prompts.train, seed=spec.options["seed"])
        return prompts, loader, loader.take(_BATCH_SIZE)

    return start


def _prepare_verl(spec: Spec) -> Callable[[], Any]:
    """As verl's RLHFDataset: `datasets` in its cache, and a filter that renders and tokenizes every prompt."""
    import datasets
    from torch.utils.data import RandomSampler

    from gcore_llm.tiny_model import tiny_tokenizer

    datasets.disable_progress_bars()
    tokenizer = tiny_tokenizer()

    def start() -> Any:
        cache = f"{spec.folder}/datasets"
        rows = datasets.load_dataset(
            "json", data_files=spec.options["file"], split="train", cache_dir=cache
        )
        rows = rows.filter(lambda row: len(tokenizer(row["prompt"])["input_ids"]) <= _MAX_LENGTH)
        order = iter(RandomSampler(rows))
        return rows, order, [rows[index] for index in islice(order, _BATCH_SIZE)]

    return start


def _prepare_index(spec: Spec) -> Callable[[], Any]:
    """Rows in the order of gcore's loader, or of torch's RandomSampler, as verl and TRL have it."""
    from torch.utils.data import RandomSampler

    from gcore_controller import PromptLoader
    from gcore_runs.data.tables import ArrowRows

    file = Path(spec.options["file"])

    def start_gcore() -> Any:
        loader = PromptLoader(ArrowRows([file]), seed=spec.options["seed"])
        return loader, loader.take(_BATCH_SIZE)

    def start_torch() -> Any:
        rows = ArrowRows([file])
        order = iter(RandomSampler(range(len(rows))))
        return rows, order, [rows[index] for index in islice(order, _BATCH_SIZE)]

    return start_gcore if spec.contender == "gcore" else start_torch
