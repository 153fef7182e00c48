"""The bench of the trainer: one quick real run of all parts, and the batches, the arithmetic and the tables."""

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Run, summarise
from gcore_bench.trainer.bench import check_agreement
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.report import aims, part_table
from gcore_bench.trainer.workload import (
    context_layouts,
    deals,
    make_samples,
    memory_lengths,
    step_batches,
    token_rows,
)

QUICK = {
    "prompts": 3,
    "n": 2,
    "median_length": 12,
    "max_response_length": 48,
    "max_prompt_length": 24,
    "max_tokens": 128,
    "padded_micro_batches": 2,
    "hidden_size": 32,
    "vocab_size": 256,
}
RUN = {
    **QUICK,
    "rounds": 1,
    "steps": 1,
    "vocab_sizes": [8000],
    "logits_mb": 128,
    "lengths": [128],
    "shared_lengths": [576, 1152],
    "max_lognormal_length": 1152,
}


@pytest.mark.parametrize("way", ["trl", "verl", "gcore-padded", "gcore-packed", "gcore-masks", "gcore-shared"])
def test_every_sample_is_in_one_micro_batch(way: str) -> None:
    options = TrainerOptions(max_tokens=700)
    batches = step_batches(options, make_samples(options), way)
    assert len(batches) > 1
    assert sorted(i for batch in batches for i in batch) == list(range(32))


def test_micro_batches_stay_within_the_budget() -> None:
    options = TrainerOptions()
    samples = make_samples(options)
    for max_tokens in (480, 700, 2048):
        tight = replace(options, max_tokens=max_tokens)
        for batch in step_batches(tight, samples, "gcore-packed"):
            assert sum(samples[i].prompt_ids.size + samples[i].response_ids.size for i in batch) <= max_tokens
        for batch in step_batches(tight, samples, "gcore-shared"):
            prompts = {i // options.n: samples[i].prompt_ids.size for i in batch}
            assert sum(prompts.values()) + sum(samples[i].response_ids.size for i in batch) <= max_tokens


def test_lengths_have_a_long_tail() -> None:
    lengths = np.array([s.response_ids.size for s in make_samples(TrainerOptions(prompts=200, sigma=1.0))])
    assert np.median(lengths) == pytest.approx(48, rel=0.1)
    assert lengths.mean() > 1.4 * np.median(lengths)
    assert lengths.max() == 384


def test_a_group_shares_its_prompt_and_its_advantages_sum_to_nothing() -> None:
    samples = make_samples(TrainerOptions())
    for k in range(0, len(samples), 4):
        group = samples[k : k + 4]
        assert len({s.prompt_ids.tobytes() for s in group}) == 1
        assert sum(float(s.advantages[0]) for s in group if s.advantages is not None) == pytest.approx(0, abs=1e-5)


def test_simulated_work_is_dealt_out_more_evenly_than_in_order() -> None:
    options = TrainerOptions()
    found = deals(options, make_samples(options))
    assert all(sorted(i for r in d.batches for b in r for i in b) == list(range(32)) for d in found.values())
    assert sum(map(sum, found["balanced"].costs)) == pytest.approx(sum(map(sum, found["round-robin"].costs)))
    imbalance = {name: deal.imbalance for name, deal in found.items()}
    assert 1 <= imbalance["balanced"]["ranks"] < 1.1
    assert imbalance["balanced"]["ranks"] < imbalance["round-robin"]["ranks"]
    assert all(own["ranks"] <= own["passes"] + 1e-9 for own in imbalance.values())


def test_packing_and_sharing_leave_the_needed_tokens() -> None:
    options = TrainerOptions()
    rows = token_rows(options, make_samples(options))
    computed = [row["computed"] for row in rows.values()]
    assert computed == sorted(computed, reverse=True)
    assert rows["trl"]["real_fraction"] < rows["gcore-padded"]["real_fraction"] < 1
    assert rows["gcore-packed"]["real_fraction"] == 1
    assert rows["gcore-packed"]["needed_fraction"] < 1
    assert rows["gcore-shared"]["needed_fraction"] == 1


def test_contenders_of_long_sequences() -> None:
    assert context_layouts([1, 4]) == {"alone": (1, 1), "ulysses-4": (4, 4), "ring-4": (4, 1)}


def test_seconds_are_medians_and_peaks_the_highest() -> None:
    rows = [{"trl": {"step_s": s, "peak_bytes": 2**20 * s}} for s in (1.0, 5.0, 2.0)]
    runs = [Run(part="step", contender="trl", round=i, load=i, rows=row) for i, row in enumerate(rows)]
    summary = summarise("step", runs)
    assert summary.rows == {"trl": {"step_s": 2.0, "peak_bytes": 5 * 2**20}}
    assert summary.load == 1.0


def test_contenders_that_compute_something_else_are_found() -> None:
    rows = {"a": {"loss": 0.5, "tokens": 8.0}, "b": {"loss": 0.50009, "tokens": 8.0}, "c": {"loss": 0.6, "tokens": 9.0}}
    check_agreement("context", rows)
    with pytest.raises(BenchError, match=r"part context: loss is 0\.5 for a, but 0\.51 for b"):
        check_agreement("context", rows | {"b": {"loss": 0.51, "tokens": 8.0}})
    with pytest.raises(BenchError, match="but nan for b"):
        check_agreement("step", {"a": {"grad_norm": 1.0}, "b": {"grad_norm": float("nan")}})


def test_the_table_shows_ratios_to_gcore() -> None:
    common = {"computed_tokens": 9.0, "loss": 0.25, "grad_norm": 1.0}
    rows = {
        "trl": {"step_s": 6.0, "cpu_s": 6.0, "peak_bytes": 4.0 * 2**20, **common},
        "gcore-shared": {"step_s": 2.0, "cpu_s": 1.0, "peak_bytes": 2.0 * 2**20, **common},
    }
    runs = [Run(part="step", contender=n, round=1, load=1.0, rows={n: row}) for n, row in rows.items()]
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(part_table(summarise("step", runs), TrainerOptions(), {}))
    lines = [[cell.strip() for cell in line.split("│")] for line in captured.get().splitlines()]
    cells = {line[1]: line[2:-1] for line in lines if len(line) > 2}
    assert cells["trl"] == ["6.000", "3.00x", "6.000", "6.00x", "4", "2.00x", "9", "0.25000", "1.0000"]


def test_aims_of_attention_without_masks() -> None:
    """Each figure is printed with its aim, and a mask that is too large with its size and the limit."""
    measured = {
        "8 x 2,048 tiles": (1.0, 200.0),
        "8 x 4,096 tiles": (4.0, 420.0),
        "8 x 8,192 tiles": (9.0, 1260.0),
        "lognormal to 8 x 4,096 tiles": (2.0, 210.0),
        "8 x 2,048 masks": (1.5, 300.0),
        "8 x 4,096 masks": (3.0, 900.0),
        "lognormal to 8 x 4,096 masks": (2.5, 390.0),
    }
    options = TrainerOptions(shared_lengths=(2048, 4096, 8192))
    tokens = {name: float(sum(lengths)) for name, lengths in memory_lengths(options).items()}
    rows = {
        name: {"step_s": s, "cpu_s": s, "peak_bytes": peak, "tokens": tokens[name.rpartition(" ")[0]]}
        for name, (s, peak) in measured.items()
    }
    *lines, left_out = aims(
        summarise("memory", [Run(part="memory", contender="", round=1, load=0, rows=rows)]), options
    )
    results = [line.rpartition(": ")[2] for line in lines]
    assert results == ["2.10 (met)", "3.00 (not met)", "1.50 (met)", "0.75 (not met)", "1.25 (not met)"]
    assert left_out.startswith(
        "left out: masks at 8 x 8,192, of which one takes 2.2 GB; expected at most --max-mask-gb"
    )

    step = {name: {"step_s": s} for name, s in (("gcore-masks", 2.0), ("gcore-shared", 2.0))}
    runs = [Run(part="step", contender=name, round=1, load=0.0, rows={name: row}) for name, row in step.items()]
    [line] = aims(summarise("step", runs), options)
    assert line.endswith("at least 0.95 times as fast: 1.00 (met)")
    assert aims(summarise("step", runs[:1]), options) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"n": 1}, "n is 1; expected at least 2"),
        ({"parts": ()}, "parts is empty"),
        ({"hidden_size": 100}, "hidden_size is 100; expected a multiple of 32"),
        ({"max_tokens": 100}, "max_tokens is 100; expected at least 480, the longest sample"),
        ({"context_sizes": (3,)}, "context_sizes holds 3; expected 1, 2, 4 or 8"),
        (
            {"parts": ("mfu",)},
            "parts holds mfu; expected step, tokens, balance, log-probs, context, memory on device cpu",
        ),
        ({"device": "cuda"}, "parts holds step; expected log-probs, mfu on device cuda"),
        ({"padded_micro_batches": 33}, "padded_micro_batches is 33; expected at most 32"),
        ({"lengths": (8,)}, "lengths holds 8; expected at least 32"),
        ({"logits_mb": 0.0}, "logits_mb is 0.0; expected a number above 0"),
        ({"max_mask_gb": 0.0}, "max_mask_gb is 0.0; expected a number above 0"),
        ({"sigma": -1.0}, "sigma is -1.0"),
        ({"json": Path("/nowhere/x.json")}, "json is '/nowhere/x.json'; expected a file in an existing folder"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        TrainerOptions(**options)


def as_arguments(options: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


@pytest.mark.slow
def test_bench_measures_the_trainer(tmp_path: Path) -> None:
    arguments = as_arguments({**RUN, "context_sizes": [1, 2], "json": tmp_path / "figures.json"})
    command = [sys.executable, "-m", "gcore_bench", "trainer", *arguments]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ranks share the machine's cores" in done.stdout

    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert figures["options"]["prompts"] == 3
    parts = {part["part"]: part for part in figures["parts"]}
    assert list(parts) == ["step", "tokens", "balance", "log-probs", "context", "memory"]
    rows: dict[str, dict[str, dict[str, float]]] = {name: part["summary"]["rows"] for name, part in parts.items()}
    for part in ("step", "balance", "log-probs", "context"):
        assert all(row["step_s"] > 0 and row["cpu_s"] > 0 for row in rows[part].values())

    step, balance = rows["step"], rows["balance"]
    assert list(step) == ["trl", "verl", "gcore-padded", "gcore-packed", "gcore-masks", "gcore-shared"]
    assert len({round(row["loss"], 3) for row in (*step.values(), *balance.values())}) == 1
    for row in (*step.values(), *balance.values()):
        assert row["loss"] == pytest.approx(step["trl"]["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(step["trl"]["grad_norm"], rel=1e-4)
    for way, row in rows["tokens"].items():
        assert row["computed"] == step[way]["computed_tokens"]
    assert rows["tokens"]["gcore-shared"]["needed_fraction"] == 1

    assert set(balance) == {"round-robin", "balanced"}
    chunked, naive = (rows["log-probs"][f"8,000 {name}"] for name in ("chunked", "naive"))
    assert chunked["log_probs"] == pytest.approx(naive["log_probs"], abs=1e-4)
    assert 0 < chunked["peak_bytes"] < 0.9 * naive["peak_bytes"]
    assert naive["peak_bytes"] > 1.5 * naive["logits_bytes"]

    assert list(rows["context"]) == ["128 alone", "128 ulysses-2", "128 ring-2"]
    alone = rows["context"]["128 alone"]
    for row in rows["context"].values():
        assert row["loss"] == pytest.approx(alone["loss"], abs=1e-4)
        assert row["total_cpu_s"] >= row["cpu_s"]

    memory = rows["memory"]
    for workload in ("8 x 576", "8 x 1,152", "lognormal to 8 x 1,152"):
        tiles, masks = (memory[f"{workload} {name}"] for name in ("tiles", "masks"))
        assert tiles["loss"] == pytest.approx(masks["loss"], abs=1e-4)
    tiles, masks = (memory[f"8 x 1,152 {name}"] for name in ("tiles", "masks"))
    assert tiles["peak_bytes"] < masks["peak_bytes"]
