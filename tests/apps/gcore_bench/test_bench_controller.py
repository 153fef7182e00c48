"""The bench of controllers: one quick real run of both parts, and its pieces with workers and figures made by hand."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
from rich.console import Console
from worker_handle import Handle

from gcore_bench.controller import bench, workload
from gcore_bench.controller.bench import aims, dispatch_rows, dispatch_table, run_sizes, write_page
from gcore_bench.controller.contenders import gcore
from gcore_bench.controller.contenders.gcore import BenchWorker, Sample, dispatch_program
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.workload import (
    WARMUP_STEPS,
    Payload,
    StepFigures,
    check_read,
    checksum,
    step_row,
)
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Run
from gcore_controller import run_inline
from gcore_controller.context import HeldReference

PAYLOAD = Payload.of(nbytes=1 << 16, num_samples=16, seed=0)
MB = 2.0**20


def test_features_have_the_size_that_was_asked_for_and_differ() -> None:
    assert PAYLOAD.nbytes == 1 << 16
    assert Payload.of(nbytes=1000, num_samples=3, seed=0).num_floats % 2 == 0
    made = [PAYLOAD.features(index) for index in range(PAYLOAD.num_samples)]
    assert len({checksum(features) for features in made}) == PAYLOAD.num_samples
    np.testing.assert_array_equal(made[3], np.linspace(1, 2, PAYLOAD.num_floats, dtype=np.float32) * np.float32(4))
    assert PAYLOAD.parts(4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert {PAYLOAD.response(index)["reward"] for index in range(PAYLOAD.num_samples)} == {0.0, 1.0}


@pytest.mark.parametrize("place", [0, 1, 2, 3, -1])
def test_any_byte_that_differs_changes_the_sum(place: int) -> None:
    features = PAYLOAD.features(1)
    before = checksum(features)
    features.view(np.uint8)[place] ^= 1
    assert checksum(features) != before


def test_samples_that_did_not_arrive_are_found() -> None:
    check_read({1: 10, 2: 20}, [(2, 20), (1, 10)])
    with pytest.raises(BenchError, match="1 samples, 2 among them, were read with other bytes than were made"):
        check_read({1: 10, 2: 20}, [(1, 10), (2, 21)])
    with pytest.raises(BenchError, match="2 samples, 1 among them"):
        check_read({1: 10}, [(3, 30)])
    with pytest.raises(BenchError, match="2 samples were read; only 1 of them are distinct"):
        check_read({1: 10}, [(1, 10), (1, 10)])


class Recorder(BenchWorker):
    """Notes what it makes and reads, and may spoil a sample."""

    def __init__(self, spoilt: int = -1) -> None:
        self.made: list[int] = []
        self.seen: list[int] = []
        self._spoilt = spoilt

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[Sample]:
        self.made += indices
        samples = await super().make(payload, indices)
        for sample in samples:
            if sample.index == self._spoilt:
                (await sample.features.get())[-1] += 1
        return samples

    async def read(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        self.seen += [sample.index for sample in samples]
        return await super().read(samples)


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcore, "put", HeldReference)


@pytest.mark.usefixtures("workers_here")
@pytest.mark.parametrize("num_controllers", [1, 2, 4, 8])
async def test_every_sample_is_made_and_read_once(num_controllers: int) -> None:
    workers = [Recorder() for _ in range(4)]
    program = partial(dispatch_program, payload=PAYLOAD, num_steps=2)
    found = await run_inline(program, roles=[Handle(w) for w in workers], world_size=num_controllers)
    everyone = list(range(PAYLOAD.num_samples))
    for lists in ([w.made for w in workers], [w.seen for w in workers]):
        assert {len(indices) for indices in lists} == {2 * 4}
        assert sorted({index for indices in lists for index in indices}) == everyone
    # Balancing has moved samples to other workers.
    assert [sorted(set(w.made)) for w in workers] != [sorted(set(w.seen)) for w in workers]
    assert len(found) == num_controllers
    assert all(len(one.steps) == 2 and one.peak_bytes >= one.idle_bytes > 0 for one in found)


@pytest.mark.usefixtures("workers_here")
async def test_bytes_changed_in_transit_end_the_run() -> None:
    workers = [Handle(Recorder(spoilt=5)) for _ in range(2)]
    with pytest.raises(BenchError, match="1 samples, 5 among them, were read with other bytes than were made"):
        await run_inline(partial(dispatch_program, payload=PAYLOAD, num_steps=1), roles=workers, world_size=2)


def test_a_step_lasts_from_the_first_to_the_last() -> None:
    unmeasured = [(0.0, 100.0)] * WARMUP_STEPS
    early, late = StepFigures(), StepFigures()
    early.steps, early.idle_bytes, early.peak_bytes = [*unmeasured, (200, 203), (300, 304), (400, 401)], 5, 7
    late.steps, late.idle_bytes, late.peak_bytes = [*unmeasured, (201, 205), (301, 303), (400, 402)], 6, 6
    early.resident_bytes, late.resident_bytes = 8, 9
    early.cpu_s, late.cpu_s = [9.0] * WARMUP_STEPS + [1.0, 2.0, 3.0], [9.0] * WARMUP_STEPS + [2.0, 1.0, 4.0]
    sizes = {"idle_bytes": 6.0, "peak_bytes": 7.0, "resident_bytes": 9.0}
    assert step_row([early, late]) == {"step_s": 4, "cpu_s": 2.0, **sizes}


def test_the_peak_is_seen() -> None:
    figures = StepFigures()
    with figures.watched():
        before = figures.peak_bytes
        large = np.ones(64 << 20, np.uint8)
        # The watcher needs a moment: until it has looked.
        while figures.peak_bytes < before + (60 << 20):
            assert large[0] == 1
    assert before + (60 << 20) <= figures.peak_bytes < before + (200 << 20)


def test_memory_that_is_shared_does_not_count() -> None:
    from multiprocessing.shared_memory import SharedMemory

    shared = SharedMemory(create=True, size=64 << 20)
    try:
        before = StepFigures().idle_bytes
        assert shared.buf is not None
        shared.buf[:] = bytes(64 << 20)
        assert StepFigures().idle_bytes < before + (32 << 20)
    finally:
        shared.close()
        shared.unlink()


@pytest.mark.slow
def test_copies_of_more_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "MOST_COPIED_BYTES", 1 << 20)
    assert workload.memcpy_seconds(1 << 30) > workload.memcpy_seconds(1 << 10) > 0


def run(part: str, name: str, number: int, **row: float) -> Run:
    return Run(part=part, contender=name, round=number, load=1.0, rows={name: row})


def a_round(payload_mb: int, number: int, **seconds: float) -> list[Run]:
    """Controllers of 60 MB, and a driver that grows by four payloads."""
    part = f"dispatch {payload_mb} MB"
    runs = [
        run(part, "memcpy", number, step_s=seconds["memcpy"]),
        run(part, "work alone", number, step_s=seconds["alone"]),
    ]
    for name, peak_mb in (("gcore-1", 60.0), ("gcore-8", 63.0), ("verl", 400.0 + 4 * payload_mb)):
        memory = {"peak_bytes": peak_mb * MB, "idle_bytes": (60.0 if name != "verl" else 400.0) * MB}
        runs.append(run(part, name, number, step_s=seconds[name.replace("-", "_")], **memory))
    return runs


RUNS = [
    *a_round(64, 1, memcpy=0.01, alone=0.1, gcore_1=0.2, gcore_8=0.3, verl=1.0),
    *a_round(1024, 1, memcpy=0.1, alone=1.0, gcore_1=1.1, gcore_8=1.2, verl=5.0),
    *a_round(1024, 2, memcpy=0.2, alone=9.0, gcore_1=9.2, gcore_8=9.4, verl=15.0),
    *a_round(1024, 3, memcpy=0.1, alone=1.0, gcore_1=1.1, gcore_8=1.2, verl=5.0),
]


def test_overhead_is_beyond_the_same_work_in_the_same_round() -> None:
    rows = {(row["payload_mb"], row["contender"]): row for row in dispatch_rows(RUNS)}
    gcore, verl = rows[1024, "gcore-8"], rows[1024, "verl"]
    assert (gcore["step_s"], verl["step_s"]) == (1.2, 5.0)
    assert (gcore["overhead_s"], verl["overhead_s"]) == (pytest.approx(0.2), pytest.approx(4.0))
    assert (gcore["over_memcpy"], verl["over_memcpy"]) == (pytest.approx(0.5), pytest.approx(0.025))
    assert (gcore["grown_bytes"], verl["grown_bytes"]) == (3 * MB, 4096 * MB)
    assert rows[1024, "memcpy"]["overhead_s"] is None
    assert rows[1024, "work alone"]["peak_bytes"] is None


def test_aims_are_judged_by_the_worst_number_of_controllers() -> None:
    flat, less, fast = aims(dispatch_rows(RUNS))
    assert flat.endswith("at 1,024 MB up to 1.00 times that at 64 MB (met: at most 1.1)")
    assert less.endswith("at 1,024 MB: 20.0 to 40.0 (met: at least 5)")
    assert fast.endswith("at 1,024 MB: 0.50 to 1.00 of a copy in memory (met: at least 0.5)")
    slow = [*RUNS, *a_round(2048, 1, memcpy=0.1, alone=1.0, gcore_1=1.1, gcore_8=3.0, verl=5.0)]
    slow[-2] = run("dispatch 2048 MB", "gcore-8", 1, step_s=3.0, peak_bytes=126 * MB, idle_bytes=60 * MB)
    flat, less, fast = aims(dispatch_rows(slow))
    assert "up to 2.00 times that at 64 MB (not met" in flat
    assert "at 1,024 MB: 20.0 to 40.0 (met" in less
    assert "at 2,048 MB: 0.05 to 1.00 of a copy in memory (not met" in fast


def test_aims_without_a_figure_are_left_out() -> None:
    rows = dispatch_rows(RUNS)
    assert aims([row for row in rows if not row["contender"].startswith("gcore")]) == []
    without_verl = aims([row for row in rows if row["contender"] != "verl"])
    assert len(without_verl) == 2
    assert len(aims([row for row in rows if row["payload_mb"] == 64])) == 2


def test_the_table_has_a_row_for_each_payload_and_contender() -> None:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(dispatch_table(dispatch_rows(RUNS), ControllerOptions(), 1.0))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in captured.get().splitlines() if "│" in line]
    assert ["gcore-8", "1,024", "1.200", "0.200", "0.50x", "63", "3"] in rows
    assert ["verl", "1,024", "5.000", "4.000", "0.03x", "4,496", "4,096"] in rows
    assert ["work alone", "64", "0.100", "-", "-", "-", "-"] in rows
    assert len(rows) == 10


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=4 << 30))
    options = ControllerOptions(payload_mb=(64,))
    assert 2 * (64 << 20) < bench.object_store_bytes(options, 64) < 3 * (128 << 20)
    store_bytes = bench.object_store_bytes(ControllerOptions(), 4096)
    assert store_bytes == int(0.45 * (4 << 30))
    assert bench.object_store_bytes(ControllerOptions(object_store_mb=100), 64) == 100 << 20
    assert bench.lack("gcore", 512 << 20, store_bytes) == ""
    assert bench.lack("verl", 768 << 20, store_bytes) == "about 4,608 MB of memory, of which 4,096 are free"
    assert bench.lack("gcore", 1 << 30, store_bytes) == "2,048 MB of the object store, which has 1,843"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected at least 1"),
        ({"parts": ()}, "parts is empty"),
        ({"payload_mb": (64, 0)}, "payload_mb holds 0; expected at least 1"),
        ({"controllers": (1, 3)}, "samples is 64; expected a multiple of 3"),
        ({"workers": 5}, "samples is 64; expected a multiple of 5"),
        ({"devices": (8, 12)}, "devices holds 12; expected a multiple of 8"),
        ({"html": Path("/nowhere/x.html")}, "html is '/nowhere/x.html'; expected a file in an existing folder"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        ControllerOptions(**options)


def test_quick_changes_sizes_only() -> None:
    options = ControllerOptions(quick=True, contenders=("verl",), parts=("dispatch",), seed=3)
    assert options.sized().rounds == 1
    assert (options.sized().contenders, options.sized().parts, options.sized().seed) == (("verl",), ("dispatch",), 3)
    assert ControllerOptions(rounds=7).sized() == ControllerOptions(rounds=7)


def test_small_clusters_have_a_controller_a_prompt_at_most() -> None:
    said: list[str] = []
    rows = run_sizes(ControllerOptions(devices=(64, 8), sim_controllers=(1, 64), sim_steps=1), say=said.append)
    assert [(row["devices"], row["most_controllers"], row["controllers"]) for row in rows] == [
        (8, 1, 1),
        (8, 64, 4),
        (64, 1, 1),
        (64, 64, 32),
    ]
    assert all(row["step_s"] > 0 and 0 < row["load"] < 1 for row in rows)
    assert len(said) == 4


def test_the_page_has_a_line_for_each_number_of_controllers(tmp_path: Path) -> None:
    rows = [
        dict[str, Any](
            devices=d, most_controllers=m, controllers=m, steps=1, step_s=d / 2, load=0.01 * d / m, wall_s=1.0
        )
        for d in (8, 64)
        for m in (1, 4)
    ]
    write_page(tmp_path / "page.html", rows)
    page = (tmp_path / "page.html").read_text()
    assert '"name":"1 controller"' in page
    assert '"name":"up to 4 controllers"' in page
    assert '"y":[0.08,0.64]' in page
    assert "<script src=" not in page


@pytest.mark.slow
def test_bench_measures_controllers(tmp_path: Path) -> None:
    options = ["--quick", "--contenders", "gcore", "verl", "--html", "page.html", "--json", "figures.json"]
    command = [sys.executable, "-m", "gcore_bench", "controller", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ.copy(), capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    dispatch, sim = found["parts"]
    assert [part["part"] for part in found["parts"]] == ["dispatch", "sim"]
    assert found["options"]["quick"] is True
    assert (tmp_path / "page.html").stat().st_size > 1_000_000

    rows: list[dict[str, Any]] = dispatch["rows"]
    names = ["memcpy", "work alone", "gcore-1", "gcore-2", "verl"]
    assert [(row["payload_mb"], row["contender"]) for row in rows] == [(mb, name) for mb in (1, 4) for name in names]
    assert all(row["step_s"] > 0 for row in rows)
    by_name = {(row["payload_mb"], row["contender"]): row for row in rows}
    for mb in (1, 4):
        for name in names[2:]:
            row = by_name[mb, name]
            assert row["peak_bytes"] >= row["grown_bytes"] >= 0
            assert isfinite(row["overhead_s"])
            assert isfinite(row["over_memcpy"])
    # A driver through which every byte passes holds all of them; a controller holds none.
    assert by_name[4, "verl"]["grown_bytes"] > 4 * MB
    assert max(by_name[4, name]["grown_bytes"] for name in ("gcore-1", "gcore-2")) < 4 * MB
    assert len(dispatch["aims"]) == 3
    assert all(cast(str, aim) in done.stdout for aim in dispatch["aims"])

    sizes = [(row["devices"], row["controllers"]) for row in sim["rows"]]
    assert sizes == [(8, 1), (8, 4), (64, 1), (64, 4)]


@pytest.mark.slow
def test_wrong_options_end_with_one_message(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcore_bench", "controller", "--workers", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert done.stderr == "gcore-bench: error: workers is 0; expected at least 1\n"
