"""Which processes a process has, for tests that kill some and look for what is left."""

import time
from collections.abc import Iterable
from pathlib import Path

from forks import parent_of


def grandchildren(pid: int) -> list[int]:
    """Engine processes or training ranks of a `gcore-llm`: children of its fork server."""
    parents = dict(_parents())
    return sorted(p for p, parent in parents.items() if parents.get(parent) == pid)


def descendants(pid: int, title: str) -> list[int]:
    """Processes below another one whose command line begins so, as Ray titles its workers."""
    parents = dict(_parents())
    found: list[int] = []
    for process in parents:
        above = process
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and process != pid and _command_line(process).startswith(title):
            found.append(process)
    return sorted(found)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""  # it has just ended


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def left_after(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Those that have not ended in time."""
    end = time.monotonic() + timeout_s
    left = list(pids)
    while (
        left := [pid for pid in left if Path(f"/proc/{pid}").exists()]
    ) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _parents() -> Iterable[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has just ended
        pid = int(stat.parent.name)
        yield pid, parent_of(pid) or int(text.rpartition(")")[2].split()[1])
