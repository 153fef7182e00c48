"""The bench of controllers: one quick real run, and its pieces with workers and figures made by hand."""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_handle import Handle

from gcore_bench import controller
from gcore_bench.controller import (
    WARMUP_STEPS,
    BenchWorker,
    ControllerOptions,
    Features,
    Payload,
    SampleFacts,
    StepFigures,
    check_read,
    checksum,
    compare,
    dispatch_program,
    memcpy_seconds,
    step_row,
)
from gcore_bench.harness.report import BenchError
from gcore_controller import run_inline
from gcore_controller.context import Reference

PAYLOAD = Payload.of(nbytes=1 << 16, num_samples=16, seed=0)
MB = 2.0**20


def test_features_have_the_size_that_was_asked_for_and_differ() -> None:
    assert PAYLOAD.nbytes == 1 << 16
    assert Payload.of(nbytes=1000, num_samples=3, seed=0).num_floats % 2 == 0
    made = [PAYLOAD.features(index) for index in range(PAYLOAD.num_samples)]
    assert len({checksum(features) for features in made}) == PAYLOAD.num_samples
    np.testing.assert_array_equal(
        made[3], np.linspace(1, 2, PAYLOAD.num_floats, dtype=np.float32) * np.float32(4)
    )
    assert PAYLOAD.split(4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert {PAYLOAD.response(index)["reward"] for index in range(PAYLOAD.num_samples)} == {0.0, 1.0}


@pytest.mark.parametrize("place", [0, 1, 2, 3, -1])
def test_any_byte_that_differs_changes_the_sum(place: int) -> None:
    features = PAYLOAD.features(1)
    before = checksum(features)
    features.view(np.uint8)[place] ^= 1
    assert checksum(features) != before


def test_samples_that_did_not_arrive_are_found() -> None:
    check_read({1: 10, 2: 20}, [(2, 20), (1, 10)])
    with pytest.raises(
        BenchError, match="1 samples, 2 among them, were read with other bytes than were made"
    ):
        check_read({1: 10, 2: 20}, [(1, 10), (2, 21)])
    with pytest.raises(BenchError, match="2 samples, 1 among them"):
        check_read({1: 10}, [(3, 30)])
    with pytest.raises(BenchError, match="2 samples were read; only 1 of them are distinct"):
        check_read({1: 10}, [(1, 10), (1, 10)])


class Recorder(BenchWorker):
    """Notes what it makes and reads, and may spoil a sample."""

    def __init__(self, spoilt: int = -1) -> None:
        super().__init__()
        self.made: list[int] = []
        self.seen: list[int] = []
        self._spoilt = spoilt

    def put(self, features: Features) -> Reference[Features]:
        return Reference(features)

    async def make(self, payload: Payload, indices: Sequence[int]) -> list[SampleFacts]:
        self.made += indices
        samples = await super().make(payload, indices)
        for sample in samples:
            if sample.index == self._spoilt:
                (await sample.features.get())[-1] += 1
        return samples

    async def read(self, samples: Sequence[SampleFacts]) -> list[tuple[int, int]]:
        self.seen += [sample.index for sample in samples]
        return await super().read(samples)


@pytest.mark.parametrize("num_controllers", [1, 2, 4, 8])
async def test_every_sample_is_made_and_read_once(num_controllers: int) -> None:
    workers = [Recorder() for _ in range(4)]
    program = partial(dispatch_program, payload=PAYLOAD, num_steps=2)
    found = await run_inline(
        program, roles=[Handle(w) for w in workers], world_size=num_controllers
    )
    everyone = list(range(PAYLOAD.num_samples))
    for lists in ([w.made for w in workers], [w.seen for w in workers]):
        assert {len(indices) for indices in lists} == {2 * 4}
        assert sorted({index for indices in lists for index in indices}) == everyone
    # Balancing has moved samples to other workers.
    assert [sorted(set(w.made)) for w in workers] != [sorted(set(w.seen)) for w in workers]
    assert len(found) == num_controllers
    assert all(len(one.steps) == 2 and one.peak_bytes >= one.idle_bytes > 0 for one in found)


async def test_bytes_changed_in_transit_end_the_run() -> None:
    workers = [Handle(Recorder(spoilt=5)) for _ in range(2)]
    with pytest.raises(
        BenchError, match="1 samples, 5 among them, were read with other bytes than were made"
    ):
        await run_inline(
            partial(dispatch_program, payload=PAYLOAD, num_steps=1), roles=workers, world_size=2
        )


def test_a_step_lasts_from_the_first_to_the_last() -> None:
    unmeasured = [(0.0, 100.0)] * WARMUP_STEPS
    early, late = StepFigures(), StepFigures()
    early.steps, early.idle_bytes, early.peak_bytes = (
        [*unmeasured, (200, 203), (300, 304), (400, 401)],
        5,
        7,
    )
    late.steps, late.idle_bytes, late.peak_bytes = (
        [*unmeasured, (201, 205), (301, 303), (400, 402)],
        6,
        6,
    )
    assert step_row([early, late]) == {"step_s": 4, "peak_bytes": 7.0, "grown_bytes": 1.0}


def test_the_peak_is_seen() -> None:
    figures = StepFigures()
    with figures.watch():
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
    monkeypatch.setattr(controller, "_MOST_COPIED_BYTES", 1 << 20)
    assert memcpy_seconds(1 << 30) > memcpy_seconds(1 << 10) > 0


def test_aims_are_judged_by_the_worst_number_of_controllers() -> None:
    overheads = {"gcore-1": 0.1, "gcore-8": 0.2, "verl": 4.0, "verl-numpy": 2.0}
    rows = {name: {"overhead_s": seconds} for name, seconds in overheads.items()}
    (line,) = compare({"memcpy": {"step_s": 1.0}, **rows})
    assert line.endswith("over gcore's: 10.0 to 20.0 (aim: at least 5, met)")
    assert compare(rows | {"gcore-8": {"overhead_s": 1.0}})[0].endswith(
        "2.0 to 20.0 (aim: at least 5, not met)"
    )
    assert compare({"verl": rows["verl"]}) == []
    assert compare({"gcore-1": rows["gcore-1"]}) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        ({"payload_mb": (64, 0)}, "payload_mb holds 0; expected 1 or more"),
        ({"controllers": (1, 3)}, "samples is 64; expected a multiple of 3"),
        ({"workers": 5}, "samples is 64; expected a multiple of 5"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        ControllerOptions(**options)


@pytest.mark.slow
def test_bench_measures_controllers(tmp_path: Path) -> None:
    options = ["--quick", "--contenders", "gcore", "verl", "--json", "figures.json"]
    command = [sys.executable, "-m", "gcore_bench", "controller", *options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    found: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    assert [part["part"] for part in found["parts"]] == ["1 MB", "4 MB"]
    assert found["options"]["quick"] is True
    for part in found["parts"]:
        rows: dict[str, dict[str, float]] = part["rows"]
        assert list(rows) == ["memcpy", "work alone", "gcore-1", "gcore-2", "verl"]
        assert all(row["step_s"] > 0 for row in rows.values())
        for name in ("gcore-1", "gcore-2", "verl"):
            assert rows[name]["peak_bytes"] >= rows[name]["grown_bytes"] >= 0
            assert rows[name]["over_memcpy"] > 0
        assert part["lines_below"][0] in done.stdout
    # A driver through which every byte passes holds all of them; a controller holds none.
    rows = found["parts"][1]["rows"]
    assert rows["verl"]["grown_bytes"] > 4 * MB
    assert max(rows[name]["grown_bytes"] for name in ("gcore-1", "gcore-2")) < 4 * MB
