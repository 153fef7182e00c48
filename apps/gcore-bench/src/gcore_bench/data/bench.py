"""`gcore-bench data`: the contenders of each part in turn, each in a process of its own."""

from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gcore_bench.data.options import DataOptions
from gcore_bench.data.workload import write_index, write_prompts
from gcore_bench.harness.processes import Spec, run_children
from gcore_bench.harness.report import Rounds, Session, figure, megabytes, rows_table, summarise, verdict

_PEERS = ("gcore, in memory", "verl's way")
_CONTENDERS = {
    "prompts": ("gcore, first start", "gcore, later starts", *_PEERS),
    "index": ("gcore", "RandomSampler"),
}
_COLUMNS = [
    ("rows", figure("rows", ",.0f")),
    ("s", figure("wall_s", ".2f")),
    ("CPU s", figure("cpu_s", ".2f")),
    ("CPU µs a row", figure("row_us", ".2f")),
    ("own MiB", megabytes("own_bytes")),
    ("bytes a row", figure("row_bytes", ",.1f")),
    ("resident MiB", megabytes()),
]
_AIM_S, _AIM_BYTES = 10.0, 2**30


def run(options: DataOptions, console: Console) -> None:
    """Measure and print the parts of ``options``, and write their figures."""
    options = options.sized()
    notes = (
        "s: from the file to the first 512 prompts, without imports. own: memory of the process beyond that, without "
        "mapped files. resident: highest in all, with imports and mapped pages, which the kernel can drop."
    )
    with Session(options, console, notes=(notes,)) as session:
        for part in dict.fromkeys(options.parts):
            rounds = Rounds(part, options.rounds, say=session.say)
            files = _files(part, options, session.folder)
            for turn in rounds.turns(_CONTENDERS[part]):
                num_rows, file = files[turn.contender]
                work = {"file": str(file), "seed": options.seed + turn.round}
                spec = Spec(
                    work="gcore_bench.data.contenders",
                    part=part,
                    contender=turn.contender,
                    folder=str(session.folder),
                    options=work,
                )
                (row,), _ = run_children(spec)
                row |= {"rows": num_rows, "row_us": row["cpu_s"] / num_rows * 1e6}
                row |= {"row_bytes": row["own_bytes"] / num_rows}
                turn.done({turn.contender: row}, f"{row['wall_s']:.2f} s")
            summary = summarise(part, rounds.runs)
            table = rows_table(_TITLES[part], summary.rows, _COLUMNS)
            own = [row for name, row in summary.rows.items() if name.startswith("gcore") and name not in _PEERS]
            size, words = ("own_bytes", "of its own") if part == "index" else ("peak_bytes", "resident")
            is_met = all(row["wall_s"] < _AIM_S and row[size] < _AIM_BYTES for row in own)
            lines = [f"aim: started in {_AIM_S:g} s in under 1 GiB {words}: {verdict(is_met)}"]
            session.add(part, tables=[table], lines=lines, summary=asdict(summary), runs=rounds.runs)


_TITLES = {"prompts": "start on a JSONL file of prompts", "index": "shuffled index of an Arrow file"}


def _files(part: str, options: DataOptions, folder: Path) -> dict[str, tuple[int, Path]]:
    """Write the files of a part; return each contender's, with the number of its rows."""
    if part == "index":
        write_index(folder / "index.arrow", options.index_rows)
        return dict.fromkeys(_CONTENDERS[part], (options.index_rows, folder / "index.arrow"))
    found: dict[int, Path] = {}
    for num_rows in (options.rows, options.peer_rows):
        found[num_rows] = folder / f"{num_rows}.jsonl"
        write_prompts(found[num_rows], num_rows, options.seed)
    sizes = {name: options.peer_rows if name in _PEERS else options.rows for name in _CONTENDERS[part]}
    return {name: (size, found[size]) for name, size in sizes.items()}
