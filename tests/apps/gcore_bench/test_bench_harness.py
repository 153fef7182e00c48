"""The harness of all benches: options, rounds, sessions, and the processes of a measurement."""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from rich.console import Console

from gcore_bench.harness.processes import (
    Spec,
    highest_bytes,
    run_child,
    run_processes,
    start_server,
)
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    BenchSession,
    Rounds,
    Turn,
    add_ratios,
    format_figure,
)
from gcore_runs import Count, at_least
from gcore_runs.settings.checks import multiple_of


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    size: Annotated[int, at_least(8), multiple_of(8)] = 16
    ranks: tuple[Count, ...] = (1, 2)
    names: tuple[str, ...] = ()
    folder: Path = Path("files")

    QUICK: ClassVar[Mapping[str, Any]] = {"size": 8, "rounds": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        ({"size": 4}, "size is 4; expected 8 or more"),
        ({"size": 12}, "size is 12; expected a multiple of 8"),
        ({"ranks": (2, 0)}, "ranks holds 0; expected 1 or more"),
        ({"ranks": ()}, "ranks is empty; expected at least one entry"),
        (
            {"json": Path("/nowhere/x.json")},
            "json is '/nowhere/x.json'; expected a file in an existing folder",
        ),
    ],
)
def test_options_out_of_their_bounds_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        Options(**options)


def test_quick_replaces_sizes_only() -> None:
    assert Options(quick=True, ranks=(4,)).resize_if_quick() == Options(
        quick=True, size=8, rounds=1, ranks=(4,)
    )
    assert Options(size=32).resize_if_quick() == Options(size=32)


def test_contenders_take_turns_and_figures_are_medians() -> None:
    said: list[str] = []
    rounds = Rounds("part", 3, say=said.append)
    names = ["a", "b"]
    for turn in rounds.turns(names):
        if turn.contender == "b" and turn.round == 2:
            turn.fail("no memory")
            names.remove("b")
            continue
        figures = {"wall_s": 10.0 * turn.round, "peak_bytes": 2.0**20 * (4 - turn.round)}
        turn.done(figures, "{wall_s:.0f} s")
    assert [(run.round, run.contender) for run in rounds.runs] == [
        (1, "a"),
        (1, "b"),
        (2, "a"),
        (2, "b"),
        (3, "a"),
    ]
    assert said[0].startswith("part, round 1 of 3: a 10 s, load ")
    assert said[3].startswith("part, round 2 of 3: b failed: no memory, load ")
    assert rounds.summarise()["a"] == {"wall_s": 20.0, "peak_bytes": 3 * 2.0**20}


def test_a_ratio_is_the_median_of_those_of_each_round() -> None:
    runs = [
        Turn(
            part="p",
            contender="",
            round=number,
            load=0.0,
            rows={"ours": {"s": ours}, "peer": {"s": 2.0 * number}},
        )
        for number, ours in ((1, 4.0), (2, 40.0), (3, 6.0))
    ]
    rounds = Rounds("p", 3, say=print)
    rounds.runs.extend(runs)
    rows = rounds.summarise()
    add_ratios(rows, runs, "peer", "s", "cpu_s")
    assert rows == {"ours": {"s": 6.0, "s_ratio": 2.0, "cpu_s_ratio": None}, "peer": {"s": 4.0}}


def test_cells_show_figures() -> None:
    row = {"wall_s": 20.0, "ratio": 4.0, "bytes": 3 * 2**20, "none": None}
    columns = ["wall_s .1f", "ratio x", "bytes MB", "none", "other"]
    assert [format_figure(row, *column.split()) for column in columns] == [
        "20.0",
        "4.00x",
        "3",
        "-",
        "-",
    ]


def test_a_session_writes_figures_options_and_machine(tmp_path: Path) -> None:
    options = Options(json=tmp_path / "figures.json")
    output = io.StringIO()
    with BenchSession(options, Console(file=output)) as session:
        (session.folder / "scratch").touch()
        runs = [Turn(part="one", contender="a", round=1, load=0.5)]
        columns = {"seconds": "wall_s .1f"}
        session.report("title", columns, {"a": {"wall_s": 1.0}}, runs, lines=["a line", "[a note]"])
    assert not session.folder.exists()
    assert "│ a │     1.0 │" in output.getvalue()
    assert output.getvalue().endswith("\na line\n[a note]\n")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["options"]["ranks"] == [1, 2]
    assert found["machine"]["versions"]["torch"]
    assert found["parts"][0]["part"] == "one"
    assert found["parts"][0]["rows"] == {"a": {"wall_s": 1.0}}
    assert found["parts"][0]["runs"][0]["contender"] == "a"


def test_a_session_that_fails_writes_nothing(tmp_path: Path) -> None:
    output = io.StringIO()
    session = BenchSession(Options(json=tmp_path / "figures.json"), Console(file=output))

    def fail() -> None:
        with session:
            (session.folder / "scratch").touch()
            raise BenchError("it failed")

    with pytest.raises(BenchError, match="it failed"):
        fail()
    assert not session.folder.exists()
    assert (output.getvalue(), list(tmp_path.iterdir())) == ("", [])


WORK = """
import time

from gcore_bench.harness.processes import joined_world


def run(spec):
    if spec.contender == "slow":
        time.sleep(600)
    if spec.contender == "wrong" and spec.rank == spec.world_size - 1:
        raise ValueError("not\\nme")
    with joined_world(spec):
        memory = b"x" * 2**27
        time.sleep(1.5)
    return {"wall_s": 1.0 + spec.rank, "cpu_s": spec.options, "bytes": len(memory)}
"""


def spec(tmp_path: Path, contender: str, *, world_size: int = 1) -> Spec:
    (tmp_path / "work_of_two.py").write_text(WORK)
    return Spec(
        work="work_of_two",
        contender=contender,
        folder=tmp_path,
        options=2.0,
        world_size=world_size,
    )


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_figures_of_ranks_are_merged_and_one_that_fails_ends_the_others(tmp_path: Path) -> None:
    start_server(1)
    assert run_processes(spec(tmp_path, "right", world_size=2).of_ranks()) == {
        "wall_s": 2.0,
        "cpu_s": 2.0,
        "bytes": 2**27,
    }
    with pytest.raises(BenchError, match="wrong failed: ValueError: not me"):
        run_processes(spec(tmp_path, "wrong", world_size=2).of_ranks())


@pytest.mark.slow
@pytest.mark.usefixtures("importable")
def test_a_child_is_watched(tmp_path: Path) -> None:
    value, sizes = run_child(spec(tmp_path, "right"), poll_s=0.2)
    assert value == {"wall_s": 1.0, "cpu_s": 2.0, "bytes": 2**27}
    assert highest_bytes(sizes) > 2**27
    with pytest.raises(BenchError, match="wrong failed: ValueError: not me"):
        run_child(spec(tmp_path, "wrong"), poll_s=0.2)
    with pytest.raises(BenchError, match="slow did not end within 3 s"):
        run_child(spec(tmp_path, "slow"), poll_s=0.2, timeout_s=3.0)
