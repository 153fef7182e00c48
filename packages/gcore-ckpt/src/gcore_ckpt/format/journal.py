"""`rollback.json`: the record that makes setting several steps aside one atomic act.

    {"format": "gcore-ckpt rollback", "id": "...", "pending": [30, 40], "set_aside": [[30, "<attempt id>"], ...]}

A step that is pending is no longer a step, whatever else the storage holds; the writer, or the next one, moves it out
of the way and then writes the record without it. `set_aside` is kept in object stores, where nothing can be renamed.
"""

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gcore_ckpt.errors import CorruptCheckpointError
from gcore_ckpt.format import validation

JOURNAL_FILE = "rollback.json"
_FORMAT = "gcore-ckpt rollback"


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The content of the record; empty where there is none.

    Attributes:
        pending: Steps that are being set aside.
        set_aside: In an object store, the step and the attempt id of all that is set aside.
    """

    pending: tuple[int, ...] = ()
    set_aside: tuple[tuple[int, str], ...] = ()

    def encode(self) -> bytes:
        """Return the bytes of the file, never the same twice, so that readers see that it has changed."""
        content = {
            "format": _FORMAT,
            "id": uuid.uuid4().hex,
            "pending": self.pending,
            "set_aside": self.set_aside,
        }
        return json.dumps(content).encode()


def decode_journal(data: bytes | None, where: str) -> Journal:
    """Return the content of the file at `where`; None if it does not exist.

    Raises:
        CorruptCheckpointError: It is damaged.
    """
    if data is None:
        return Journal()
    try:
        content = validation.expect(dict, json.loads(data), "content")
        if content.get("format") != _FORMAT:
            raise ValueError(f"format is {str(content.get('format'))[:40]!r}; expected {_FORMAT!r}")
        pending = validation.sizes(content.get("pending"), "pending")
        set_aside = [_entry(entry) for entry in validation.expect(list, content.get("set_aside"), "set_aside")]
    except ValueError as error:
        raise CorruptCheckpointError(f"{where}: {error}") from error
    return Journal(pending=pending, set_aside=tuple(set_aside))


def _entry(entry: object) -> tuple[int, str]:
    fields: Sequence[Any] = validation.expect(list, entry, "entry of set_aside")
    if len(fields) != 2:
        raise ValueError(f"an entry of set_aside has {len(fields)} members; expected 2")
    return validation.size(fields[0], "step"), validation.plain_name(validation.expect(str, fields[1], "attempt"))
