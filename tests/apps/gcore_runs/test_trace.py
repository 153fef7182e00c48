"""The timeline for Perfetto: its format, what is inside of what, and that it adds up to the recorded times."""

import json
from pathlib import Path
from typing import Any

from trace_events import checked_events, slices_of, threads_of

from gcore_runs.report.trace import write_trace
from gcore_runs.run_folder import RunFolder


def folder(
    path: Path,
    spans: list[dict[str, Any]],
    metrics: list[dict[str, Any]],
    *warnings: dict[str, Any],
) -> RunFolder:
    for name, rows in {"spans": spans, "metrics": metrics, "warnings": warnings}.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFolder(path)


def test_a_step_is_a_slice_without_what_it_waited_for(tmp_path: Path) -> None:
    """A checkpoint, and a move of engines before the step; one in the step, of devices that take turns, is in it."""
    own = [
        ["checkpoint", 0, 0.5],
        ["swap", 0.5, 2],
        ["swap", 2.1, 2.2],
        ["gen", 2.2, 4],
        ["train", 4, 5],
    ]
    spans = {
        "step": 2,
        "start_s": 10.0,
        "controllers": [own],
        "devices": {"engine 10": [["gen", 2.2, 4]], "engine 2": []},
    }
    run = folder(
        tmp_path,
        [{"step": 1, "start_s": 0.0, "controllers": [[["gen", 0, 9.9]]]}, spans],
        [
            {"step": 1, "timing_s/step": 9.95},
            {"step": 2, "timing_s/step": 2.95, "critic/score/mean": 0.5, "val/a": float("nan")},
            {"step": 2, "val/greedy/score/mean": 0.25},
        ],
        {"step": 2, "key": "k", "message": "watch out", "count": 3},
    )
    events = checked_events(write_trace(run, last=1))
    threads = threads_of(events)
    assert threads == {
        "steps": ("run", 0),
        "controller 0": ("controller", 0),
        "engine 10": ("engine", 10),
    }
    seconds = [
        (name, start / 1e6, (start + length) / 1e6)
        for name, start, length in slices_of(events, "controller 0")
    ]
    assert seconds == [
        ("checkpoint", 10, 10.5),
        ("swap", 10.5, 12),
        ("step 2", 12.1, 15),
        *(("swap", 12.1, 12.2), ("gen", 12.2, 14), ("train", 14, 15)),
    ]
    [whole] = [
        event
        for event in events
        if event["ph"] == "X" and event["name"] == "step 2" and event["pid"] == 0
    ]
    assert (whole["ts"], whole["dur"]) == (12_100_000, 2_900_000)
    assert whole["args"]["critic/score/mean"] == 0.5
    [counted] = [event for event in events if event["ph"] == "C"]
    assert (counted["name"], counted["args"]) == ("critic/score/mean", {"value": 0.5})
    marks = {event["name"]: event["args"] for event in events if event["ph"] == "i"}
    assert marks == {
        "evaluation": {"val/greedy/score/mean": 0.25},
        "warning": {"message": "watch out", "count": 3},
    }


def test_a_run_without_a_step_has_an_empty_timeline(tmp_path: Path) -> None:
    events = checked_events(
        write_trace(folder(tmp_path, [], [{"step": 0, "val/greedy/score/mean": 0.25}]))
    )
    assert {event["ph"] for event in events} == {"M"}
