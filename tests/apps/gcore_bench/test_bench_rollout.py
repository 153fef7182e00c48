"""The bench of rollouts: one quick real run of all parts, and its pieces on figures and engines made by hand."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Rounds, Run, paired_ratio, summarise
from gcore_bench.rollout import generation, sandbox_calls
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.report import aims, ratios, tables
from gcore_bench.rollout.sync import StepClock, Way, busy_figures
from gcore_bench.rollout.workload import (
    make_requests,
    max_length,
    num_tokens,
    sync_request,
    sync_shape,
    warmup_requests,
)
from gcore_rollout import Completion, Request, Sandbox, SandboxError

CONTENDERS = [
    *("vllm", "gcore-vllm", "gcore-vllm-process"),
    *("transformers", "gcore-hf", "gcore-hf-process", "gcore-hf-dynamic", "gcore-hf-static"),
]


def run(part: str, row: str, number: int, **figures: float) -> Run:
    return Run(part=part, contender=row, round=number, load=1.0, rows={row: figures})


def test_lengths_have_a_tail_and_fit_the_model() -> None:
    options = RolloutOptions(prompts=64)
    requests = make_requests(options)
    lengths = [r.sampling.max_tokens for r in requests]
    assert max(lengths) == options.max_response_length
    assert sorted(lengths)[32] < options.max_response_length / 3
    assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= max_length(options) for r in requests)
    assert num_tokens(options) == options.n * sum(lengths)
    assert requests == make_requests(options)
    assert all(r.sampling.max_tokens <= 4 for r in warmup_requests(options))


def test_the_weights_have_about_the_size_that_was_asked_for() -> None:
    for size_mb in (100, 256, 1000):
        shape = sync_shape(RolloutOptions(sync_mb=size_mb))
        size_bytes = 4 * (shape.num_hidden_layers * 12 * shape.hidden_size**2 + shape.vocab_size * shape.hidden_size)
        assert abs(size_bytes / 2**20 - size_mb) < 18
    assert sync_shape(RolloutOptions(sync_mb=1)).num_hidden_layers == 1


def test_clocks_of_one_file_are_one(tmp_path: Path) -> None:
    writer = StepClock(tmp_path / "clock")
    reader = StepClock(tmp_path / "clock")
    before_s = time.perf_counter()
    writer.note_pass()
    with writer.updating():
        pass
    writer.note_pass()
    first_s, second_s = reader.passes_s
    start_s, end_s = reader.update_s
    assert before_s <= first_s <= start_s <= end_s <= second_s <= time.perf_counter()
    reader.reset()
    assert writer.num_passes == 0


def test_the_decode_mode_that_is_chosen_has_an_aim() -> None:
    def runs(speed: float) -> list[Run]:
        rows = {"gcore-hf": speed, "gcore-hf-dynamic": 100.0}
        return [run("generation", name, number, tokens_per_s=of) for number in range(3) for name, of in rows.items()]

    for speed, verdict in ((98.0, "0.98 (met)"), (90.0, "0.90 (not met)")):
        [line] = aims("generation", runs(speed))
        assert line.endswith(f"at least 0.97 times as fast: {verdict}")
    assert aims("generation", runs(1.0)[:1]) == aims("sync", runs(1.0)) == []


def test_ratios_are_of_figures_of_the_same_round() -> None:
    runs = [
        *(run("generation", "vllm", i, tokens_per_s=speed, cpu_s=1.0) for i, speed in enumerate((1.0, 10.0, 100.0))),
        *(run("generation", "gcore-vllm", i, tokens_per_s=s, cpu_s=2.0) for i, s in enumerate((4.0, 20.0, 300.0))),
    ]
    assert paired_ratio(runs, "gcore-vllm", "vllm", "tokens_per_s") == 3.0
    assert paired_ratio(runs, "gcore-vllm", "transformers", "tokens_per_s") is None
    assert ratios("generation", runs) == {"gcore-vllm": {"tokens_per_s": 3.0, "cpu_s": 2.0}}
    assert ratios("generation", runs[3:]) == {"gcore-vllm": {}}
    modes = [
        run("generation", f"gcore-hf-{mode}", 1, tokens_per_s=s, cpu_s=3 - s)
        for mode, s in (("dynamic", 2.0), ("static", 1.0))
    ]
    assert ratios("generation", modes)["gcore-hf-static"] == {"tokens_per_s": 0.5, "cpu_s": 2.0}


def test_all_seconds_of_new_weights_are_compared_with_a_copy() -> None:
    runs = [
        run("sync", "memcpy", 1, wall_s=0.5, size_bytes=2.0**20),
        run(
            "sync",
            "process",
            1,
            **{"wall_s": 1.0, "before_copy_s": 0.25, "copy_s": 0.5, "busy_s": 2.0, "no_token_s": 0.75},
            **{"first_token_s": 3.0, "old_steps": 2.0, "step_s": 0.25},
        ),
    ]
    found = ratios("sync", runs)
    assert found["process"] == {"wall_s": 2.0, "busy_s": 4.0, "no_token_s": 1.5, "copy_s": 1.0}
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        for table in tables(summarise("sync", runs), found, RolloutOptions()):
            console.print(table)
    rows = [[cell.strip() for cell in line.split("│")] for line in captured.get().splitlines()]
    cells = [row[2:-1] for row in rows if len(row) > 2 and row[1] == "process"]
    assert cells == [
        ["1.000", "2.00x", "0.250", "0.500", "2.000", "4.00x", "0.750", "1.50x"],
        ["3.000", "2", "0.250"],
    ]


class FakeEngine:
    """Makes a token a millisecond, and may label the tokens of new weights a token late; or stops a token short."""

    pid = os.getpid()

    def __init__(self, clock: StepClock | None = None, *, labels_late: int = 0, missing: int = 0) -> None:
        self._clock = clock
        self._labels_late = labels_late
        self._missing = missing
        self._version = 0
        self._aborted = False

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self._aborted = False
        for request in requests:
            versions: list[int] = []
            while not self._aborted and len(versions) < request.sampling.max_tokens - self._missing:
                if self._clock is not None:
                    self._clock.note_pass()
                versions.append(self._version)
                await asyncio.sleep(0.001)
            versions = [0] * self._labels_late + versions[: len(versions) - self._labels_late]
            for index in request.sample_indices:
                yield Completion(
                    request_id=request.request_id,
                    index=index,
                    token_ids=np.zeros(len(versions), np.int64),
                    log_probs=np.zeros(len(versions), np.float32),
                    weight_versions=np.array(versions, np.int32),
                    finish_reason="abort",
                )

    async def update_weights(self, _: object, *, version: int) -> None:
        assert self._clock is not None
        with self._clock.updating():
            time.sleep(0.3)
            self._version = version

    async def abort(self) -> None:
        self._aborted = True

    async def close(self) -> None:
        self._aborted = True


@pytest.mark.slow
async def test_the_time_without_a_token_is_that_of_the_copy(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock")
    engine = FakeEngine(clock)
    way = Way(engine=cast(Any, engine), clocks=[clock], weights=tuple)
    row = await busy_figures(way, 1, sync_request(RolloutOptions()))
    assert row["first_token_s"] >= row["busy_s"] >= 0.3
    # The time without a token begins with the last one before the call, a step or, on a busy machine, more before.
    assert 0.2 < row["no_token_s"] < row["first_token_s"] + 0.1
    assert row["old_steps"] == 0


async def test_tokens_with_the_wrong_version_are_found(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock")
    engine = FakeEngine(clock, labels_late=1)
    way = Way(engine=cast(Any, engine), clocks=[clock], weights=tuple)
    with pytest.raises(BenchError, match="carry version 1 first, but by their times"):
        await busy_figures(way, 1, sync_request(RolloutOptions()))


@pytest.mark.parametrize("missing", [0, 1])
async def test_a_contender_makes_the_tokens_that_were_asked_for(
    tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(*_: object) -> FakeEngine:
        return FakeEngine(missing=missing)

    monkeypatch.setattr(generation, "start_engine", start)
    options = RolloutOptions(contenders=("gcore-hf-process",), rounds=2, median_length=4, max_response_length=8)
    said: list[str] = []
    rounds = Rounds("generation", options.rounds, say=said.append)
    if missing:
        with pytest.raises(BenchError, match=f"the samples have {num_tokens(options)}"):
            await generation.measure(options, tmp_path, rounds)
    else:
        await generation.measure(options, tmp_path, rounds)
        assert [r.round for r in rounds.runs] == [1, 2]
        assert len(said) == 2


async def test_an_isolation_that_the_machine_does_not_give_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*, isolation: str, max_concurrency: int) -> Sandbox:
        if isolation == "namespaces":
            raise SandboxError("not on this machine")
        return Sandbox(isolation="limits", max_concurrency=max_concurrency)

    monkeypatch.setattr(sandbox_calls, "Sandbox", make)
    said: list[str] = []
    rounds = Rounds("sandbox", 1, say=said.append)
    await sandbox_calls.measure(RolloutOptions(calls=1), tmp_path, rounds)
    assert [r.contender for r in rounds.runs] == ["bare", "limits"]
    assert said[0] == "sandbox: not on this machine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"calls": 0}, "calls is 0; expected at least 1"),
        ({"parts": ()}, "parts is empty"),
        ({"contenders": ()}, "contenders is empty"),
        ({"hidden_size": 192}, "hidden_size is 192; expected a multiple of 128"),
        ({"sigma": float("nan")}, "sigma is nan"),
        ({"json": Path("/nowhere/x.json")}, "json is '/nowhere/x.json'; expected a file in an existing folder"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        RolloutOptions(**options)


def test_quick_changes_sizes_only() -> None:
    options = RolloutOptions(quick=True, contenders=("vllm",), threads=2)
    assert options.sized().rounds == 1
    assert (options.sized().contenders, options.sized().threads) == (("vllm",), 2)
    assert RolloutOptions(rounds=7).sized() == RolloutOptions(rounds=7)


@pytest.mark.slow
def test_bench_measures_rollouts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcore_bench", "rollout", "--quick", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    parts = {part["part"]: part for part in figures["parts"]}
    assert list(parts) == ["generation", "sync", "forms", "sandbox"]
    for part in parts.values():
        assert all(f"│ {row} " in done.stdout for row in part["summary"]["rows"])
        assert all(isfinite(r) and r >= 0 for of_row in part["ratios"].values() for r in of_row.values())

    rows: dict[str, dict[str, float]] = parts["generation"]["summary"]["rows"]
    assert list(rows) == CONTENDERS
    expected = num_tokens(RolloutOptions(quick=True).sized())
    for row in rows.values():
        assert row["tokens"] == expected
        assert row["tokens_per_s"] > 0
        assert row["cpu_s"] > 0
        assert -7 < row["log_prob"] < -3
    # The same seeds give the same tokens: what is compared is one piece of work.
    for name in ("gcore-vllm", "gcore-vllm-process"):
        assert rows[name]["log_prob"] == pytest.approx(rows["vllm"]["log_prob"], abs=1e-3)
    for name in ("gcore-hf-process", "gcore-hf-dynamic", "gcore-hf-static"):
        assert rows[name]["log_prob"] == pytest.approx(rows["gcore-hf"]["log_prob"], abs=1e-5)
    speeds = {name: found["tokens_per_s"] for name, found in parts["generation"]["ratios"].items()}
    assert list(speeds) == ["gcore-vllm", "gcore-vllm-process", "gcore-hf", "gcore-hf-process", "gcore-hf-static"]
    assert min(speeds.values()) > 0

    rows = parts["sync"]["summary"]["rows"]
    assert list(rows) == ["memcpy", "in-process", "process", "2 processes", "files"]
    for name, row in rows.items():
        assert row["wall_s"] > 0
        if name != "memcpy":
            assert row["wall_s"] >= row["copy_s"] > 0
            assert min(row["first_token_s"], row["busy_s"], row["step_s"]) > 0

    rows = parts["forms"]["summary"]["rows"]
    deltas = [f"delta {share} %" for share in ("0.1", "1", "10", "100")]
    ranks = ["1 rank", "2 ranks"]
    assert list(rows) == ["memcpy", *ranks, "full", *deltas, "adapters"]
    sent = {name: row["sent_bytes"] / rows["memcpy"]["sent_bytes"] for name, row in rows.items()}
    assert sent["1 rank"] == 1
    assert sent["2 ranks"] == 0.5
    assert 0 < sent["delta 0.1 %"] < sent["delta 1 %"] < sent["delta 10 %"] < sent["delta 100 %"] == sent["full"] == 1
    assert sent["delta 1 %"] == pytest.approx(0.03, rel=0.1)  # six bytes an element instead of two
    assert sent["adapters"] == 16 * (1024 + 512) / (1024 * 512)
    assert all(row["apply_s"] > 0 for row in rows.values())
    assert min(rows[name]["encode_s"] for name in deltas) > 0

    rows = parts["sandbox"]["summary"]["rows"]
    assert list(rows)[:2] == ["bare", "limits"]
    assert all(min(row["alone_ms"], row["cpu_ms"], row["together_ms"]) > 0 for row in rows.values())


@pytest.mark.slow
def test_wrong_options_end_with_one_message(tmp_path: Path) -> None:
    options = ["--parts", "generation", "--contenders", "gcore-hf", "--vocab-size", "0"]
    command = [sys.executable, "-m", "gcore_bench", "rollout", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr == "gcore-bench: error: vocab_size is 0; expected at least 16\n"
