"""Reads files in Chrome's trace-event format, and checks that they hold to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FIELDS: dict[str, dict[str, type]] = {
    "M": {},
    "X": {"ts": int, "dur": int},
    "C": {"ts": int},
    "i": {"ts": int, "s": str},
}
"""The fields of each phase, in addition to those that all events have."""

Event = dict[str, Any]


def checked_events(path: Path) -> list[Event]:
    """The events of a trace, which name their threads, and whose slices on a thread are apart or inside each other."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    trace = json.loads(path.read_text(), parse_constant=refuse)
    assert trace["displayTimeUnit"] == "ms"
    events: list[Event] = trace["traceEvents"]
    for event in events:
        types = {
            "ph": str,
            "name": str,
            "pid": int,
            "tid": int,
            "args": dict,
            **FIELDS[event["ph"]],
        }
        assert {name: type(value) for name, value in event.items()} == types
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events} == named
    for thread in threads_of(events):
        check_nesting(slices_of(events, thread))
    return events


def threads_of(events: Sequence[Event]) -> dict[str, tuple[str, int]]:
    """The process and the number of each thread, by its name."""
    processes = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    threads = [event for event in events if event["name"] == "thread_name"]
    return {event["args"]["name"]: (processes[event["pid"]], event["tid"]) for event in threads}


def slices_of(events: Sequence[Event], thread: str) -> list[tuple[str, int, int]]:
    """Name, start and length in microseconds of the slices of a thread, each before those inside it."""
    [named] = [
        event
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"] == thread
    ]
    own = [
        e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (named["pid"], named["tid"])
    ]
    return sorted(
        ((e["name"], e["ts"], e["dur"]) for e in own), key=lambda slice: (slice[1], -slice[2])
    )


def check_nesting(slices: Sequence[tuple[str, int, int]]) -> None:
    open_until: list[int] = []
    for _, start, length in slices:
        while open_until and open_until[-1] <= start:
            open_until.pop()
        assert not open_until or start + length <= open_until[-1]
        open_until.append(start + length)
