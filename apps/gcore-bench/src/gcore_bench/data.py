"""`gcore-bench data`: the start of a run on large data sets, each contender in a process of its own."""

import json
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gcore_bench.harness.processes import Spec, run_child, settle, status_bytes, timed
from gcore_bench.harness.report import BenchOptions, BenchSession, Figures, Row, verdict
from gcore_runs import Count, NonNegative

PartName = Literal["prompts", "index"]

_CONTENDERS = {
    "prompts": ("gcore, first start", "gcore, later starts", "gcore, in memory", "verl's way"),
    "index": ("gcore", "RandomSampler"),
}
_TOKENIZING = ("gcore, in memory", "verl's way")
"""Contenders that tokenize every prompt, and get fewer rows."""
_WORDS = "Natalia sold clips to 48 of her friends in April and half as many"
_WRITTEN_ROWS = 10_000
_BATCH_SIZE = 512
_MAX_LENGTH = 1024
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
class DataOptions(BenchOptions):
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


def run(options: DataOptions, session: BenchSession) -> None:
    """Measure and print the parts of ``options``."""
    for part in options.parts:
        rounds = session.start_rounds(part)
        for turn in rounds.turns(_CONTENDERS[part]):
            num_rows = options.index_rows
            if part == "prompts":
                num_rows = options.peer_rows if turn.contender in _TOKENIZING else options.rows
            file = _write_file(part, num_rows, session.folder, options.seed)
            spec = Spec(
                work="gcore_bench.data:measure",
                part=part,
                contender=turn.contender,
                folder=session.folder,
                options=(file, options.seed + turn.round),
            )
            figures, _ = run_child(spec)
            figures["rows"] = num_rows
            figures["row_us"] = figures["cpu_s"] / num_rows * 1e6
            figures["row_bytes"] = figures["own_bytes"] / num_rows
            turn.done(figures, "{wall_s:.2f} s")
        rows = rounds.summarise()
        title = "start on a JSONL file of prompts"
        if part == "index":
            title = "shuffled index of an Arrow file"
        lines = [_check_aim(part, rows), _NOTE]
        session.report(title, _COLUMNS, rows, rounds.runs, lines=lines)


def _check_aim(part: str, rows: Mapping[str, Row]) -> str:
    """Return whether gcore's starts take less than the time and memory that are aimed at."""
    metric = "own_bytes" if part == "index" else "peak_bytes"
    words = "of its own" if part == "index" else "resident"
    is_met = True
    for name, row in rows.items():
        if name.startswith("gcore") and name not in _TOKENIZING:
            is_met = is_met and row["wall_s"] < 10 and row[metric] < 2**30
    return f"aim: started in 10 s in under 1 GiB {words}: {verdict(is_met)}"


def _write_file(part: str, num_rows: int, folder: Path, seed: int) -> Path:
    """Return the file of so many rows of a part, which is written if it is not there yet."""
    suffix = "arrow" if part == "index" else "jsonl"
    file = folder / f"{num_rows}.{suffix}"
    if not file.exists():
        write = write_index if part == "index" else write_prompts
        write(file, num_rows, seed)
    return file


def write_prompts(file: Path, num_rows: int, seed: int) -> None:
    """Write a JSONL file of questions like those of GSM8K, with answers."""
    rng = random.Random(seed)
    with file.open("w") as lines:
        for number in range(num_rows):
            question = f"{number}: {' '.join(rng.choices(_WORDS.split(), k=45))}?"
            lines.write(
                json.dumps({"prompt": question, "answer": f"x = {number}\n#### {number}"}) + "\n"
            )


def write_index(file: Path, num_rows: int, _seed: int) -> None:
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
    with timed() as figures:
        rows_in_use = start()
    settle()
    figures["own_bytes"] = float(status_bytes("RssAnon") - before_bytes)
    del rows_in_use
    figures["peak_bytes"] = float(status_bytes("VmHWM"))
    return figures


def _prepare_gcore(spec: Spec) -> Callable[[], Any]:
    from gcore_controller import PromptLoader
    from gcore_llm.prompts import load_files
    from gcore_llm.sections import DataConfig
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_runs import inputs

    os.environ["XDG_CACHE_HOME"] = f"{spec.folder}/cache"
    if spec.contender == "gcore, in memory":
        inputs.LARGE_BYTES = 2**60
    file, seed = spec.options
    data = DataConfig(train_files=(str(file),), max_prompt_length=_MAX_LENGTH)
    tokenizer = tiny_tokenizer()

    def start() -> Any:
        prompts = load_files(data, tokenizer, seed=seed)
        loader = PromptLoader(prompts.train, seed=seed)
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
        file = str(spec.options[0])
        rows = datasets.load_dataset(
            "json",
            data_files=file,
            split="train",
            cache_dir=cache,
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

    file, seed = spec.options

    def start_gcore() -> Any:
        loader = PromptLoader(ArrowRows([file]), seed=seed)
        return loader, loader.take(_BATCH_SIZE)

    def start_torch() -> Any:
        rows = ArrowRows([file])
        order = iter(RandomSampler(range(len(rows))))
        return rows, order, [rows[index] for index in islice(order, _BATCH_SIZE)]

    return start_gcore if spec.contender == "gcore" else start_torch
