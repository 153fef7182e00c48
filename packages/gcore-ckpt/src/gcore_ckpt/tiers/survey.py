"""Which steps are whole, when their files lie in several places, and where each file is.

A place is the folder of one machine. It may hold some of the files of a step, next to the step's index. The index has
checksums of all files, so that files next to equal indexes belong together, whichever attempt wrote them.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from gcore_ckpt.errors import CheckpointError
from gcore_ckpt.format.boxes import checksum
from gcore_ckpt.format.index import decode_index
from gcore_ckpt.storage import INDEX_FILE, Storage, step_name

_logger = logging.getLogger(__name__)

Report: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The parts of steps in a place, as JSON: by step, the checksum of its index, when it was saved, and its files."""


def report(storage: Storage, steps: Collection[int] | None = None) -> Report:
    """Return what a place holds of these steps, or of all."""
    report_by_step: dict[str, Mapping[str, Any]] = {}
    for step in storage.steps():
        if steps is not None and step not in steps:
            continue
        where = f"{storage}/{step_name(step)}"
        try:
            report_by_step[str(step)] = _inspect_step(storage, step, where)
        except (OSError, ValueError, CheckpointError) as error:  # other places may hold the step
            if step in storage.steps():  # else it was deleted since it was listed
                _logger.warning("%s is damaged and not used: %s", where, error)
    return report_by_step


def _inspect_step(storage: Storage, step: int, where: str) -> Mapping[str, Any]:
    with storage.open_step(step) as files:
        data = files.read_index()
        index = decode_index(data, where)
        sizes = {INDEX_FILE: len(data)}
        missing: list[str] = []
        for name, file in index.files.items():
            try:
                is_here = files.open(name) == file.size_bytes
            except FileNotFoundError:
                is_here = False
            if is_here:
                sizes[name] = file.size_bytes
            else:
                missing.append(name)
    return {"index": checksum(data), "saved_at": index.saved_at, "files": sizes, "missing": missing}


Copies: TypeAlias = Mapping[str, tuple[int, Sequence[int]]]
"""The files of a whole step: the size of each, and the places that have it, by number."""


def whole_steps(reports: Sequence[Report]) -> dict[int, tuple[str, Copies]]:
    """Return the steps of which every file is somewhere, from the report of each place, in order.

    Each comes with the checksum of its index.
    """
    groups: dict[tuple[int, str, str], dict[int, Mapping[str, Any]]] = {}
    for number, report_by_step in enumerate(reports):
        for step, step_report in report_by_step.items():
            group = (int(step), step_report["saved_at"], step_report["index"])
            groups.setdefault(group, {})[number] = step_report
    steps: dict[int, tuple[str, Copies]] = {}
    newest: dict[int, str] = {}
    for (step, saved_at, index), report_by_place in groups.items():
        files: dict[str, tuple[int, list[int]]] = {}
        missing: set[str] = set()
        for number, step_report in report_by_place.items():
            missing.update(step_report["missing"])
            for name, size_bytes in step_report["files"].items():
                files.setdefault(name, (size_bytes, []))[1].append(number)
        if not missing <= files.keys():
            continue
        # A machine that comes back with steps of long ago may hold another that is whole.
        if step not in steps or saved_at > newest[step]:
            newest[step] = saved_at
            steps[step] = (index, files)
    return steps
