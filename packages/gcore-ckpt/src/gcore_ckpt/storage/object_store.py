"""Steps in an object store. An attempt writes below a folder of its own; one small object, created last, commits it.

    step-00000012/<attempt id>/<data file>
    step-00000012/<attempt id>/index.json
    step-00000012/<attempt id>/links.json   the objects of earlier steps that are files of this one, by their names
    step-00000012/committed                 JSON: the id of the attempt that is the step, the sizes of its data files
    rollback.json                           the attempts that were set aside; see `Journal`

`committed` is created only where there is none, which the store decides: of two writers of a step, one gets it.

The folder of a step that was uploaded as it is, by `aws s3 sync`, is a step too, once all files of its index are there:

    step-00000012/<data file>
    step-00000012/index.json
"""

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from gcore_ckpt.errors import CheckpointError, CorruptCheckpointError
from gcore_ckpt.format import validation
from gcore_ckpt.format.index import decode_index
from gcore_ckpt.storage import (
    INDEX_FILE,
    JOURNAL_FILE,
    Journal,
    StepFiles,
    settled_steps,
    step_name,
    step_of,
)
from gcore_ckpt.storage.objects import Objects
from gcore_ckpt.threads import Workers

_COMMITTED = "committed"
_LINKS_FILE = "links.json"
_REMOVED = "removed"
"""In the folder of an uploaded step that is deleted but for files that later steps link to."""
_UPLOADED = "uploaded"
"""Stands for the id of an attempt in the record of rollbacks."""
_ATTEMPT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_THREADS = 16


class _StoredJournal(NamedTuple):
    """The record of rollbacks, and the generation of its object."""

    content: Journal
    generation: bytes


@dataclass(frozen=True)
class _Listing:
    """The objects of all steps."""

    committed: set[int] = field(default_factory=set[int])
    attempts: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """The folders of the attempts of each step."""
    names: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """The objects in the folder of each attempt, and in that of each step itself."""
    has_journal: bool = False

    def list_uploaded(self) -> dict[int, set[str]]:
        """Return the objects in the folder of each step that has an index there and no attempt that is the step."""
        uploaded: dict[int, set[str]] = {}
        for folder, names in self.names.items():
            step = step_of(folder)
            if INDEX_FILE in names and step is not None and step not in self.committed:
                uploaded[step] = names
        return uploaded


class _ObjectFiles:
    """The files of a committed step: its folder, their sizes, and the objects that those in other folders are."""

    def __init__(
        self, objects: Objects, folder: str, sizes: Mapping[str, int], links: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.sizes = dict(sizes)  # as they were committed; once a file is open, as it is
        self._objects = objects
        self._links = links

    def key(self, name: str) -> str:
        """Return the key of the object that is a file."""
        return self._links.get(name, f"{self.folder}/{name}")

    def read_index(self) -> bytes:
        return self._read(f"{self.folder}/{INDEX_FILE}")

    def open(self, name: str) -> int:
        key = self.key(name)
        size: int | None = None
        if name in self.sizes:
            size = self._objects.size(key, self.sizes[name])
        if size is None:
            raise FileNotFoundError(f"{self._objects} holds no {key}")
        self.sizes[name] = size
        return size

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        stop = min(offset_bytes + buffer.nbytes, self.sizes[name])
        if stop <= offset_bytes:
            return 0
        value = self._read(self.key(name), slice(offset_bytes, stop))
        buffer.cast("B")[: len(value)] = value
        return len(value)

    def _read(self, key: str, byte_range: slice | None = None) -> bytes:
        stored = self._objects.read(key, byte_range)
        if stored.state != "value":
            raise FileNotFoundError(f"{self._objects} holds no {key}")
        return stored.value


class ObjectStorage:
    """The steps below `s3://bucket/folder` or `gs://bucket/folder` (`memory://folder`: in this process, for tests).

    S3: credentials as the AWS tools find them; the server from `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, its region
    from `AWS_REGION` or `AWS_DEFAULT_REGION`.

    An object store has no locks, so two writers may have the path open. A commit of a step that is there is refused,
    so neither replaces what the other has committed; but unfinished attempts below the newest step count as dead, so
    the slower writer can lose one, and its commit then fails. With incremental saves there must be one writer: what one
    is about to link to, another may delete.

    Raises:
        ValueError: Another kind of URL, or no valid one.
    """

    max_file_bytes = 256 * 2**20  # sent in one request, and sent again as a whole when that fails

    def __init__(self, url: str) -> None:
        self._url = url
        self._objects = Objects(url)
        self._live: set[str] = set()
        self._links: dict[str, dict[str, str]] = {}  # of each attempt in flight
        self._base: tuple[int, _ObjectFiles] | None = None  # the step that is being linked to
        self._needed: dict[int, set[str]] = {}  # the objects that make up each uploaded step

    def __str__(self) -> str:
        return self._url

    def steps(self) -> list[int]:
        listing = self._scan()
        if not listing.has_journal:
            return sorted(self._steps(listing, Journal()))
        return settled_steps(
            lambda: self._steps(self._scan(), self._read_journal().content),
            lambda: self._read_journal().content,
        )

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        return nullcontext(self._locate(step))

    def acquire(self) -> None:
        """Check that the place can be listed. Takes no lock: the class docstring says why that is safe."""
        if self._scan().has_journal:
            self._finish_setting_aside(self._read_journal())

    def release(self) -> None:
        """Do nothing: there is no lock."""

    def begin(self, step: int) -> str:
        attempt = f"{step_name(step)}/{uuid.uuid4().hex}"
        self._live.add(attempt)
        self._base = None
        return attempt

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        self._objects.write(f"{attempt}/{name}", b"".join(parts))

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Record a link to an earlier step's object, which is kept as long as a step links to it."""
        if self._base is None or self._base[0] != step:
            self._base = step, self._locate(step)
        self._links.setdefault(attempt, {})[name] = self._base[1].key(file)

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Make the attempt the committed step; then remove what dead attempts have left.

        Raises:
            FileExistsError: The step is committed already; it is left as it is.
            OSError: A file is missing or of another size, or the store failed; nothing was committed.
        """
        key = f"{step_name(step)}/{_COMMITTED}"
        wrong = self._find_wrong_file(attempt, sizes)
        absent = self._objects.read(
            key
        )  # after the files: who commits first removes the others' files
        if absent.state == "value" or self._is_uploaded(step):
            raise FileExistsError(f"{self} holds step {step} already")
        if wrong is not None:
            raise OSError(f"{self}: {wrong}")
        self._objects.write(f"{attempt}/{INDEX_FILE}", index)
        links = self._links.pop(attempt, None)
        if links:
            self._objects.write(f"{attempt}/{_LINKS_FILE}", json.dumps(links).encode())
        record = json.dumps({"attempt": attempt.rpartition("/")[2], "sizes": dict(sizes)}).encode()
        created = self._objects.write(key, record, if_equal=absent.stamp.generation)
        # A second try, after an answer that was lost, is refused because of the first: then the record is ours.
        if not created and self._objects.read(key).value != record:
            raise FileExistsError(
                f"{self} holds step {step} already: another writer has just committed it"
            )
        self._live.discard(attempt)
        with suppress(
            OSError, CheckpointError
        ):  # the step is committed; what stays is removed by the next commit
            self._remove_dead_attempts()

    def abort(self, attempt: str) -> None:
        """Remove what an attempt has written, as far as the store answers; the rest goes with a later commit."""
        self._live.discard(attempt)
        self._links.pop(attempt, None)
        with suppress(OSError, CheckpointError):
            # A commit that failed for want of an answer may have happened.
            if self._committed_attempt(attempt.partition("/")[0]) != attempt:
                self._objects.delete_folder(attempt)

    def remove(self, step: int) -> None:
        """Delete a committed step, but not what was set aside under its number, nor what later steps link to."""
        folder = step_name(step)
        self._objects.write(f"{folder}/{_COMMITTED}", None)
        listing = self._scan()
        set_aside = _attempts(self._read_journal().content)
        dead = listing.attempts.get(step, set[str]()) - set_aside
        if INDEX_FILE in listing.names.get(folder, ()) and f"{folder}/{_UPLOADED}" not in set_aside:
            self._objects.write(f"{folder}/{INDEX_FILE}", None)
            dead.add(folder)
        self._delete(dead, listing)

    def set_aside(self, steps: Sequence[int]) -> None:
        """Record the attempts, which is the atomic act, then take back their commits."""
        journal = self._finish_setting_aside(
            self._read_journal()
        )  # of an earlier call that failed halfway
        if not steps:
            return
        attempts = [
            (step, self._locate(step).folder.partition("/")[2] or _UPLOADED) for step in steps
        ]
        set_aside = (*journal.content.set_aside, *attempts)
        self._finish_setting_aside(
            self._replace(journal, Journal(pending=tuple(steps), set_aside=set_aside))
        )

    def steps_set_aside(self) -> list[int]:
        """Return the steps that were set aside, ascending; one that was set aside twice is there twice."""
        return sorted(step for step, _ in self._read_journal().content.set_aside)

    def remove_set_aside(self) -> None:
        """Delete what was set aside."""
        journal = self._read_journal()
        self._delete(
            {attempt.removesuffix(f"/{_UPLOADED}") for attempt in _attempts(journal.content)},
            self._scan(),
        )
        if journal.content.set_aside:
            self._replace(journal, Journal())

    def _finish_setting_aside(self, journal: _StoredJournal) -> _StoredJournal:
        if not journal.content.pending:
            return journal
        for step in journal.content.pending:
            self._objects.write(f"{step_name(step)}/{_COMMITTED}", None)
        recorded = {step for step, _ in journal.content.set_aside}
        # A record of a local folder, uploaded with it, has none of the attempts.
        uploaded = [(step, _UPLOADED) for step in journal.content.pending if step not in recorded]
        return self._replace(journal, Journal(set_aside=(*journal.content.set_aside, *uploaded)))

    def _read_journal(self) -> _StoredJournal:
        stored = self._objects.read(JOURNAL_FILE)
        data = stored.value if stored.state == "value" else None
        return _StoredJournal(
            Journal.decode(data, f"{self}/{JOURNAL_FILE}"), stored.stamp.generation
        )

    def _replace(self, journal: _StoredJournal, content: Journal) -> _StoredJournal:
        data = content.encode()
        written = self._objects.write(JOURNAL_FILE, data, if_equal=journal.generation)
        stored = self._objects.read(JOURNAL_FILE)
        if (
            not written and stored.value != data
        ):  # a second try, after an answer that was lost, is refused too
            raise OSError(
                f"{self}/{JOURNAL_FILE} was changed by another writer meanwhile; nothing was set aside here"
            )
        return _StoredJournal(content, stored.stamp.generation)

    def _scan(self) -> _Listing:
        keys = self._objects.list_keys()
        listing = _Listing(has_journal=JOURNAL_FILE in keys)
        for key in keys:
            folder, _, name = key.partition("/")
            step = step_of(folder)
            attempt_id, slash, file = name.partition("/")
            if step is None:
                continue
            if name == _COMMITTED:
                listing.committed.add(step)
            elif not slash:
                listing.names.setdefault(folder, set()).add(name)
            elif _ATTEMPT_ID.fullmatch(attempt_id):
                listing.attempts.setdefault(step, set()).add(f"{folder}/{attempt_id}")
                listing.names.setdefault(f"{folder}/{attempt_id}", set()).add(file)
        return listing

    def _steps(self, listing: _Listing, journal: Journal) -> set[int]:
        uploaded = listing.list_uploaded()
        for step, attempt_id in journal.set_aside:
            if attempt_id == _UPLOADED:
                uploaded.pop(step, None)
        with Workers(_THREADS) as workers:
            workers.run(partial(self._read_needed, *entry) for entry in uploaded.items())
        steps = set(listing.committed)
        for step, names in uploaded.items():
            if step in self._needed and self._needed[step] <= names:
                steps.add(step)
        return steps

    def _read_needed(self, step: int, names: set[str]) -> None:
        """Read which objects an uploaded step needs, unless it is known to be whole."""
        if step in self._needed and self._needed[step] <= names:
            return
        with suppress(FileNotFoundError):  # deleted since it was listed
            try:
                self._needed[step] = {INDEX_FILE, *self._read_uploaded(step).sizes}
            except CorruptCheckpointError:  # reported when it is opened
                self._needed[step] = {INDEX_FILE}

    def _is_uploaded(self, step: int) -> bool:
        return (
            self._objects.read(f"{step_name(step)}/{INDEX_FILE}").state == "value"
            and step in self.steps()
        )

    def _read_uploaded(self, step: int) -> _ObjectFiles:
        folder = step_name(step)
        stored = self._objects.read(f"{folder}/{INDEX_FILE}")
        if stored.state != "value":
            raise FileNotFoundError(f"{self} holds no committed {folder}")
        index = decode_index(stored.value, f"{self}/{folder}/{INDEX_FILE}")
        sizes = {name: file.size_bytes for name, file in index.files.items()}
        return _ObjectFiles(self._objects, folder, sizes, {})

    def _locate(self, step: int) -> _ObjectFiles:
        try:
            attempt, sizes = self._read_commit(step_name(step))
        except FileNotFoundError:
            return self._read_uploaded(step)
        links: dict[str, str] = {}
        if any(name.startswith("step-") for name in sizes):
            links = self._read_links(attempt)
        return _ObjectFiles(self._objects, attempt, sizes, links)

    def _read_links(self, attempt: str) -> dict[str, str]:
        stored = self._objects.read(f"{attempt}/{_LINKS_FILE}")
        if stored.state != "value":
            return {}
        with validation.reading(f"{self}/{attempt}/{_LINKS_FILE}"):
            links = validation.expect(dict, json.loads(stored.value), "content")
            return {name: validation.expect(str, key, name) for name, key in links.items()}

    def _read_commit(self, folder: str) -> tuple[str, dict[str, int]]:
        """Return the attempt that is a committed step, and the sizes of its data files."""
        stored = self._objects.read(f"{folder}/{_COMMITTED}")
        if stored.state != "value":
            raise FileNotFoundError(f"{self} holds no committed {folder}")
        try:
            fields = json.loads(stored.value)
            sizes: dict[str, int] = {}
            for name, size in fields["sizes"].items():
                sizes[name] = int(size)
            return f"{folder}/{fields['attempt']}", sizes
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(
                f"{self}: {folder}/{_COMMITTED} is damaged: {error!r}"
            ) from None

    def _committed_attempt(self, folder: str) -> str | None:
        with suppress(FileNotFoundError):
            return self._read_commit(folder)[0]
        return None

    def _find_wrong_file(self, attempt: str, sizes: Mapping[str, int]) -> str | None:
        files = _ObjectFiles(self._objects, attempt, sizes, self._links.get(attempt, {}))

        def find_problem(name: str, expected: int) -> str | None:
            key = files.key(name)
            size = self._objects.size(key, expected)
            if size == expected:
                return None
            if size is None:
                return f"{key} is missing; {expected} bytes were to be written"
            return f"{key} has {size} bytes; {expected} bytes were to be written"

        with Workers(_THREADS) as workers:
            problems = workers.run(partial(find_problem, *entry) for entry in sizes.items())
        return next(filter(None, problems), None)

    def _remove_dead_attempts(self) -> None:
        listing = self._scan()
        retained = set(self._live)
        if listing.has_journal:
            retained |= _attempts(self._read_journal().content)
        newest = max(listing.committed, default=-1)
        dead: set[str] = set()
        for folder, names in listing.names.items():
            if _REMOVED in names and INDEX_FILE not in names:
                dead.add(folder)
        for step, names in listing.attempts.items():
            if step > newest or (step in listing.committed and len(names) == 1):
                continue
            # Read now: since the listing, a slower writer may have committed.
            dead |= names - retained - {self._committed_attempt(step_name(step))}
        self._delete(dead, listing)

    def _delete(self, dead: set[str], listing: _Listing) -> None:
        """Delete folders of attempts or uploaded steps, except for objects that other attempts link to."""
        used: set[str] = set()
        for folder, names in listing.names.items():
            if _LINKS_FILE in names and folder not in dead:
                used.update(self._read_links(folder).values())
        for links in self._links.values():
            used.update(links.values())
        for folder in dead:
            keys = {f"{folder}/{name}" for name in listing.names.get(folder, ())}
            if "/" in folder and not keys & used:
                self._objects.delete_folder(folder)
                continue
            if "/" not in folder and keys & used:
                self._objects.write(f"{folder}/{_REMOVED}", b"")
                keys.discard(f"{folder}/{_REMOVED}")
            for key in keys - used:
                self._objects.write(key, None)


def _attempts(journal: Journal) -> set[str]:
    return {f"{step_name(step)}/{attempt_id}" for step, attempt_id in journal.set_aside}
