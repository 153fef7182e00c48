"""The ledger: sums that are exact, causes that can be identified, and the command that prints them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gcore_placement import Ledger, PlacementError, StepIntervals, read_spans
from gcore_placement.cli import main
from gcore_placement.ledger import CAUSES, COLUMNS, WORK, select_steps

S = 1_000_000_000
STAGES = (*WORK, "swap", "checkpoint", "eval")
Spans = list[tuple[str, int, int]]

times = st.integers(min_value=-5, max_value=10**16)
spans = st.lists(
    st.tuples(st.sampled_from(STAGES), times, times).map(lambda s: (s[0], *sorted(s[1:]))),
    max_size=5,
)
devices = st.dictionaries(
    st.sampled_from(["engine 0", "engine 1", "judge 0", "trainer 0", "trainer 1", "gpu"]), spans
)


@given(
    controllers=st.lists(spans, max_size=3),
    devices=devices,
    start_ns=st.integers(0, 10**15),
    wall_ns=st.integers(0, 10**16),
)
def test_columns_add_up_to_devices_times_wall_time(
    controllers: list[Spans], devices: dict[str, Spans], start_ns: int, wall_ns: int
) -> None:
    step = StepIntervals(
        step=1,
        start_ns=start_ns,
        stop_ns=start_ns + wall_ns,
        controllers=controllers,
        devices=devices,
    )
    ledger = Ledger.of([step, step])
    assert sum(ledger.total_ns.values()) == 2 * (len(devices) or len(controllers)) * wall_ns
    for role, entry in ledger.device_ns.items():
        assert tuple(entry) == COLUMNS
        assert min(entry.values()) >= 0
        assert sum(entry.values()) == ledger.total_ns[role]


@given(row=spans)
def test_work_is_the_union_of_a_devices_spans(row: Spans) -> None:
    """Counted second by second in the place of cuts."""
    short = [(stage, start % 50, start % 50 + (stop - start) % 20) for stage, start, stop in row]
    step = StepIntervals(
        step=1, start_ns=0, stop_ns=40, controllers=[], devices={"engine 0": short}
    )
    expected = dict.fromkeys(COLUMNS, 0)
    for now in range(40):
        within = [
            s for s in sorted(short, key=lambda s: s[1]) if s[1] <= now < s[2] and s[0] != "eval"
        ]
        stage = within[-1][0] if within else "unassigned"
        expected[WORK.get(stage, stage)] += 1
    assert Ledger.of([step]).device_ns["engine"] == expected


def ledger_of(
    controllers: list[list[tuple[str, float, float]]], **rows: list[tuple[str, float, float]]
) -> Ledger:
    """Of a step from 0 to 10 s."""
    named = {name.replace("_", " "): row for name, row in rows.items()}
    step = StepIntervals.of(1, [*controllers, [("eval", 0, 10)]], named)
    assert (step.start_ns, step.stop_ns) == (0, 10 * S)
    return Ledger.of([step])


@pytest.mark.parametrize(
    ("role", "stage", "cause"),
    [
        ("engine", "gen", "long_tail"),
        ("engine", "reward", "waiting_for_reward"),
        ("engine", "prepare", "waiting_for_weights"),
        ("engine", "train", "waiting_for_weights"),
        ("engine", "sync", "waiting_for_weights"),
        ("judge", "gen", "waiting_for_generation"),
        ("judge", "reward", "long_tail"),
        ("judge", "train", "waiting_for_weights"),
        ("trainer", "gen", "waiting_for_generation"),
        ("trainer", "reward", "waiting_for_reward"),
        ("trainer", "sync", "waiting_for_weights"),
        ("trainer", "train", "unassigned"),
        *(
            (role, cause, cause)
            for role in ("engine", "trainer")
            for cause in ("swap", "data", "checkpoint", "failure")
        ),
        ("engine", "eval", "unassigned"),
        ("robot", "gen", "unassigned"),
    ],
)
def test_the_cause_follows_from_the_controllers_stage(role: str, stage: str, cause: str) -> None:
    found = ledger_of([[(stage, 2.0, 9.0)]], **{f"{role}_0": [("gen", 1.0, 4.0)]}).device_ns[role]
    assert found["generation"] == 3 * S
    assert found[cause] >= 5 * S
    assert (
        found["unassigned"] + found["generation"] + (found[cause] if cause != "unassigned" else 0)
        == 10 * S
    )


def test_the_earliest_stage_of_a_controller_is_what_others_wait_for() -> None:
    ledger = ledger_of(
        [[("gen", 0, 4), ("reward", 4, 5)], [("gen", 0, 2), ("reward", 2, 7)]],
        engine_0=[("gen", 0, 3)],
        engine_1=[],
    )
    found = ledger.device_ns["engine"]
    assert {column: ns for column, ns in found.items() if ns} == {
        "generation": 3 * S,
        "long_tail": (1 + 4) * S,
        "waiting_for_reward": 2 * 3 * S,
        "unassigned": 2 * 3 * S,
    }


def test_a_trainer_that_waits_for_another_is_imbalance() -> None:
    ledger = ledger_of(
        [[("train", 0, 10)]], trainer_0=[("train", 0, 8)], trainer_1=[("train", 0, 5)]
    )
    found = ledger.device_ns["trainer"]
    assert (found["training"], found["imbalance"], found["unassigned"]) == (13 * S, 3 * S, 4 * S)
    assert ledger.share("training") == pytest.approx(0.65)
    assert ledger.idle_share("trainer") == pytest.approx(0.35)
    assert sum(ledger.to_dict()["shares"].values()) == pytest.approx(1)


def test_controllers_stand_for_devices_where_none_is_named() -> None:
    ledger = Ledger.of(
        [StepIntervals.of(1, [[("gen", 0, 4), ("train", 5, 6)], [("gen", 0, 3)]], {})]
    )
    found = ledger.device_ns["controller"]
    assert {column: ns for column, ns in found.items() if ns} == {
        "generation": 7 * S,
        "training": 1 * S,
        "imbalance": 2 * S,
        "unassigned": 2 * S,
    }


def write_run(folder: Path, *rows: dict[str, Any], end: str = "\n") -> Path:
    (folder / "spans.jsonl").write_text("\n".join(map(json.dumps, rows)) + end)
    return folder


def row(step: int, start_s: float, *, engine: float = 1.0) -> dict[str, Any]:
    """Two seconds of generation, in which the engine works for some, and one of training."""
    controllers = [[["gen", 0.0, 2.0], ["train", 2.0, 3.0]]]
    devices = {"engine 0": [["gen", 0.0, engine]], "trainer 0": [["train", 2.0, 3.0]]}
    return {"step": step, "start_s": start_s, "controllers": controllers, "devices": devices}


def test_steps_of_a_run_lie_end_to_end(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, row(1, 0.0), row(2, 3.5), row(3, 7.0), row(3, 8.0), end='\n{"step": 4, "con'
    )
    steps = read_spans(run)
    assert [(s.step, s.start_ns, s.stop_ns) for s in steps] == [
        (1, 0, 3.5 * S),
        (2, 3.5 * S, 8 * S),
        (3, 8 * S, 11 * S),
    ]
    assert read_spans(run / "spans.jsonl") == steps
    ledger = Ledger.of(steps)
    assert ledger.total_ns == {"engine": 11 * S, "trainer": 11 * S}
    assert ledger.device_ns["engine"]["long_tail"] == 3 * S


def test_work_that_ends_in_the_next_step_counts_there(tmp_path: Path) -> None:
    steps = read_spans(write_run(tmp_path, row(1, 0.0, engine=5.0), row(2, 4.0, engine=0.5)))
    ledger = Ledger.of(steps)
    assert ledger.total_ns["engine"] == 7 * S
    assert ledger.device_ns["engine"]["generation"] == 5 * S


def test_steps_are_chosen_with_both_ends(tmp_path: Path) -> None:
    steps = read_spans(write_run(tmp_path, *(row(i, 3.0 * i) for i in range(1, 6))))
    assert [[s.step for s in select_steps(steps, text)] for text in ("2:3", ":2", "4:", ":")] == [
        [2, 3],
        [1, 2],
        [4, 5],
        [1, 2, 3, 4, 5],
    ]
    for text, message in (
        ("3", "steps is '3'; expected FIRST:LAST, as in 10:20"),
        ("a:b", r"steps is .*; expected FIRST:LAST"),
        ("7:9", r"steps is '7:9'; expected a range that holds steps of the run \(1:5\)"),
    ):
        with pytest.raises(PlacementError, match=message):
            select_steps(steps, text)


def test_the_command_prints_roles_and_causes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(write_run(tmp_path, row(1, 0.0), row(2, 3.0)))
    assert main(["ledger", run]) == 0
    text = capsys.readouterr().out
    assert text.startswith("steps 1 to 2: 12.0 device-seconds, 66.7% idle")
    lines = [line.split() for line in text.splitlines()]
    assert ["generation", "33.3%", "0.0%", "16.7%", "2.0"] in lines
    assert ["idle:", "long_tail", "33.3%", "0.0%", "16.7%", "2.0"] in lines
    assert ["idle:", "waiting_for_generation", "0.0%", "66.7%", "33.3%", "4.0"] in lines
    assert ["idle", "66.7%", "66.7%", "66.7%"] in lines
    assert main(["ledger", run, "--steps", "2:2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["steps"] == [2, 2]
    assert data["roles"]["engine"]["columns_s"]["generation"] == 1.0
    assert set(data["shares"]) == set(COLUMNS) >= set(CAUSES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"run is .*; expected a folder with spans.jsonl, or that file"),
        ("{}\n", r"line 1 is invalid; expected a step with its spans \(KeyError"),
        ("[1]\n", r"line 1 is invalid; expected a step with its spans \(TypeError"),
        ("nothing\n", r"line 1 is invalid; expected a step with its spans \(JSONDecodeError"),
        ("", r"a range that holds steps of the run \(none\)"),
    ],
)
def test_what_is_no_run_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "spans.jsonl").write_text(content)
    assert main(["ledger", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(PlacementError, match=message):
        select_steps(read_spans(tmp_path), ":")
