"""The part payloads of the bench of controllers: a quick real run, and its pieces with workers and figures by hand."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from worker_handle import Handle

from gcore_bench.controller.contenders import gcore
from gcore_bench.controller.contenders.gcore import BenchWorker, Carried, Sample, dispatch_program
from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.payloads import (
    DRIVER,
    contenders,
    findings,
    payload_rows,
    payload_table,
    simulated_rows,
    simulated_table,
    write_page,
)
from gcore_bench.controller.workload import ALONE, ImagePayload, Payload, checksum
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Run
from gcore_controller import run_inline
from gcore_controller.context import HeldReference

PAYLOAD = ImagePayload.of(nbytes=8 * 100_000, num_samples=8, seed=0)
CARRY, REFER = "2 controllers that carry", "2 controllers, by reference"


def test_features_are_those_of_a_vision_tower() -> None:
    made = [PAYLOAD.features(index) for index in range(8)]
    assert {(array.shape, array.dtype.name) for array in made} == {((39, 1280), "float16")}
    assert PAYLOAD.nbytes == sum(array.nbytes for array in made) == pytest.approx(8 * 100_000, rel=0.01)
    assert len({checksum(array) for array in made}) == 8
    assert all(np.isfinite(array).all() for array in made)
    out = PAYLOAD.empty()
    assert PAYLOAD.features(3, out=out) is out
    np.testing.assert_array_equal(out, made[3])


class Recorder(BenchWorker):
    """Notes which references it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[type] = set()

    async def read(self, samples: Sequence[Sample]) -> list[tuple[int, int]]:
        self.kinds |= {type(sample.features) for sample in samples}
        return await super().read(samples)


@pytest.mark.parametrize(("is_carried", "kind"), [(True, Carried), (False, HeldReference)])
async def test_features_are_carried_or_referred_to(
    is_carried: bool, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcore, "put", HeldReference)
    workers = [Recorder() for _ in range(2)]
    program = partial(dispatch_program, payload=PAYLOAD, num_steps=1, is_carried=is_carried)
    await run_inline(program, roles=[Handle(worker) for worker in workers], world_size=4)
    assert workers[0].kinds | workers[1].kinds == {kind}


async def test_the_same_work_alone_keeps_its_memory() -> None:
    worker = BenchWorker()
    expected = [checksum(PAYLOAD.features(index)) for index in (0, 1)]
    assert await worker.only_make(PAYLOAD, [0, 1]) == await worker.only_read() == expected


def test_one_driver_is_the_controller_that_carries_all() -> None:
    names = contenders(ControllerOptions(controllers=(1, 2)))
    assert names == {
        DRIVER: (1, True),
        CARRY: (2, True),
        "1 controller, by reference": (1, False),
        REFER: (2, False),
    }


def run(part: str, number: int, contender: str, step_s: float, **figures: float) -> Run:
    row = {"step_s": step_s, "payload_bytes": 4e6, **figures}
    return Run(part=part, contender=contender, round=number, load=1.0, rows={contender: row})


RUNS = [
    run(part, number, name, step_s, **({} if name == ALONE else {"resident_bytes": size * number, "cpu_s": step_s / 2}))
    for part, size in (("1 MB", 2.0**20), ("8 MB", 2.0**23))
    for number, name, step_s in (
        (1, ALONE, 1.0),
        (1, DRIVER, 3.0),
        (1, REFER, 1.5),
        (2, ALONE, 2.0),
        (2, DRIVER, 5.0),
        (2, REFER, 1.25),
    )
]


def test_steps_are_compared_with_the_drivers_of_the_same_round() -> None:
    rows = payload_rows(RUNS)
    assert [(row["prompt_mb"], row["contender"]) for row in rows[:3]] == [(1.0, ALONE), (1.0, DRIVER), (1.0, REFER)]
    alone, driver, refer = rows[:3]
    assert (driver["step_s"], driver["speed"], driver["cpu_s"], driver["bytes_per_s"]) == (4.0, 1.0, 2.0, 1e6)
    assert driver["bytes_per_cpu_s"] == 2 * 4e6 / 2.0
    # 3 s over 1.5 s, and 5 s over 1.25 s.
    assert (refer["speed"], refer["resident_bytes"]) == (3.0, 2.0**21)
    assert (alone["cpu_s"], alone["resident_bytes"], alone["speed"]) == (None, None, 2.75)
    assert payload_table(rows, ControllerOptions(), 1.0).row_count == 6
    assert findings(rows) == [
        f"the driver's step over that of others, at 8 MB a prompt: {REFER} 3.00x",
        f"resident MB of the busiest controller, at 1 and 8 MB a prompt: {DRIVER} 2 to 16, {REFER} 2 to 16",
    ]


def test_a_page_shows_every_contender(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", payload_rows(RUNS))
    assert REFER in (tmp_path / "page.html").read_text()


def test_larger_clusters_are_simulated_at_the_measured_rate() -> None:
    rows = simulated_rows((1.0,), 1e9, seed=0)
    alone, *others = rows
    assert alone["busiest_s"] == pytest.approx(4 * alone["held_bytes"] / 1e9)
    assert simulated_rows((1.0,), 2e9, seed=0)[0]["busiest_s"] == pytest.approx(alone["busiest_s"] / 2)
    assert simulated_rows((2.0,), 1e9, seed=0)[0]["held_bytes"] == pytest.approx(2 * alone["held_bytes"], rel=1e-3)
    assert [row["busiest_s"] for row in others] == sorted((row["busiest_s"] for row in others), reverse=True)
    assert simulated_table(rows, 1e9).row_count == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("payloads",), "prompts": 12}, "prompts is 12; expected a multiple of 8"),
        ({"prompt_mb": (0.0,)}, "prompt_mb holds 0.0; expected above 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        ControllerOptions(**options)
    assert isinstance(PAYLOAD, Payload)


@pytest.mark.slow
def test_bench_measures_payloads(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gcore_bench", "controller", "--parts", "payloads", "--quick"]
    command += ["--json", "figures.json", "--html", "page.html"]
    done = subprocess.run(
        command, env=os.environ.copy(), cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    names = [DRIVER, CARRY, "1 controller, by reference", REFER]
    assert [row["contender"] for row in part["rows"]] == [ALONE, *names] * 2
    assert all(row["resident_bytes"] > 0 and row["cpu_s"] > 0 for row in part["rows"] if row["contender"] != ALONE)
    assert len(part["simulated"]) == 2 * 4
    assert (tmp_path / "page.html").exists()
