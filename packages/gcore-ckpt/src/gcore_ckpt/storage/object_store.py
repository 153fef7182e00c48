"""Steps in an object store. An attempt writes below a folder of its own; one small object, created last, commits it.

    step-00000012/<attempt id>/<data file>
    step-00000012/<attempt id>/index.json
    step-00000012/committed                 JSON: the id of the attempt that is the step, the sizes of its data files
    rollback.json                           the attempts that were set aside; see `Journal`

`committed` is created only where there is none, which the store decides: of two writers of a step, one gets it.
"""

import json
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from gcore_ckpt.errors import CheckpointError, CorruptCheckpointError, MissingExtraError
from gcore_ckpt.storage import INDEX_FILE, JOURNAL_FILE, Journal, StepFiles, settled_steps, step_name, step_of
from gcore_ckpt.threads import Workers

try:
    import tensorstore as ts
except ModuleNotFoundError:
    raise MissingExtraError("tensorstore", "object-store") from None

_T = TypeVar("_T")
_SCHEMES = ("s3", "gs", "memory")
_COMMITTED = "committed"
_ATTEMPT_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_CHECK_THREADS = 16
_ANSWER_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 2**20
# With the defaults, 32 tries, a server that is gone would take a quarter of an hour to become an error.
_RETRIES = {"max_retries": 5, "initial_delay": "250ms", "max_delay": "2s"}
# One context for all: it is what makes `memory://` the same store for everyone in the process.
_CONTEXT = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


class OutOfRangeError(OSError):
    """The object has not all of the bytes asked for."""


class Objects:
    """The objects below a URL: tensorstore's calls with a bound on time and errors that name the URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = os.getpid()
        try:
            self._opened = ts.KvStore.open(_spec(url), context=_CONTEXT).result()
        except ValueError as error:
            raise ValueError(f"{url!r} names no place in an object store: {error}") from None

    def __str__(self) -> str:
        return self._url

    @property
    def _store(self) -> ts.KvStore:
        if os.getpid() != self._process:  # tensorstore would abort the process
            raise CheckpointError(f"{self._url} was opened before a fork: open it in a process started by 'spawn'")
        return self._opened

    def list_keys(self) -> list[str]:
        return [key.decode(errors="replace") for key in self._wait(self._store.list())]

    def read(self, key: str, byte_range: slice | None = None) -> ts.KvStore.ReadResult:
        size_bytes = byte_range.stop - byte_range.start if byte_range and byte_range.stop else 0
        return self._wait(self._store.read(key, byte_range=byte_range), size_bytes)

    def size(self, key: str, expected: int) -> int | None:
        """Return the size of an object in bytes, or None, by a read of its last byte if it is as expected."""
        start = max(expected - 1, 0)
        try:
            found = self.read(key, slice(start, None))
        except OutOfRangeError:
            start, found = 0, self.read(key)
        return start + len(found.value) if found.state == "value" else None

    def write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> bool:
        """Write an object, or delete it for None; False if it is not of the generation `if_equal`."""
        stamp = self._wait(self._store.write(key, value, if_equal=if_equal), len(value or b""))
        return bool(stamp.generation)

    def delete_folder(self, folder: str) -> None:
        everything = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" is the character after "/"
        self._wait(self._store.delete_range(everything))

    def _wait(self, future: "ts.Future[_T]", size_bytes: int = 0) -> _T:
        timeout_s = _ANSWER_TIMEOUT_S + size_bytes / _SLOWEST_BYTES_PER_S
        try:
            return future.result(timeout=timeout_s)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"{self._url}: no answer within {timeout_s:.0f} s") from None
        except (ValueError, NotImplementedError) as error:  # tensorstore's, whatever has gone wrong
            status = str(error)
            kind = OutOfRangeError if status.startswith("OUT_OF_RANGE") else OSError
            raise kind(f"{self._url}: {status.partition(' [')[0]}") from error


def _spec(url: str) -> dict[str, Any]:
    """Return what tensorstore opens. The prefix ends with a slash, lest `ckpt` hold the steps of `ckpt-2`."""
    if url.partition("://")[0] not in _SCHEMES:
        raise ValueError("a path is a local folder, s3://bucket/folder or gs://bucket/folder")
    spec: dict[str, Any] = ts.KvStore.Spec(url).to_json()
    if path := spec.pop("path", "").rstrip("/"):
        spec["path"] = path + "/"
    if spec["driver"] == "s3":
        if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            spec["endpoint"] = endpoint.rstrip("/")
        if region := os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
            spec["aws_region"] = region
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            # The default chain would look here first too, but prints errors about files that are not there.
            spec["aws_credentials"] = {"type": "environment"}
    return spec


class _StoredJournal(NamedTuple):
    """The record of rollbacks, and the generation of its object."""

    content: Journal
    generation: bytes


class ObjectStorage:
    """The steps below `s3://bucket/folder` or `gs://bucket/folder` (`memory://folder`: in this process, for tests).

    S3: credentials as the AWS tools find them; the server from `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, its region
    from `AWS_REGION` or `AWS_DEFAULT_REGION`.

    An object store has no locks, so two writers may have the path open. A commit of a step that is there is refused,
    so neither replaces what the other has committed; but unfinished attempts below the newest step count as dead, so
    the slower writer can lose one, and its commit then fails.

    Raises:
        ValueError: Another kind of URL, or no valid one.
    """

    max_file_bytes = 256 * 2**20  # sent in one request, and sent again as a whole when that fails

    def __init__(self, url: str) -> None:
        self._url = url
        self._objects = Objects(url)
        self._live: set[str] = set()

    def __str__(self) -> str:
        return self._url

    def steps(self) -> list[int]:
        committed, _, has_journal = self._scan()
        if not has_journal:
            return sorted(committed)
        return settled_steps(lambda: self._scan()[0], lambda: self._read_journal().content)

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        return nullcontext(_ObjectFiles(self._objects, *self._read_commit(step_name(step))))

    def acquire(self) -> None:
        """Check that the place can be listed. Takes no lock: the class docstring says why that is safe."""
        if self._scan()[2]:
            self._finish_setting_aside(self._read_journal())

    def release(self) -> None:
        """Do nothing: there is no lock."""

    def begin(self, step: int) -> str:
        attempt = f"{step_name(step)}/{uuid.uuid4().hex}"
        self._live.add(attempt)
        return attempt

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        self._objects.write(f"{attempt}/{name}", b"".join(parts))

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Raise `OSError`: an object has one name."""
        raise OSError(f"{attempt}/{name} cannot be a link to {file} of step {step}: hard links need a local folder")

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Make the attempt the committed step; then remove what dead attempts have left.

        Raises:
            FileExistsError: The step is committed already; it is left as it is.
            OSError: A file is missing or of another size, or the store failed; nothing was committed.
        """
        key = f"{step_name(step)}/{_COMMITTED}"
        wrong = self._find_wrong_file(attempt, sizes)
        absent = self._objects.read(key)  # after the files: who commits first removes the others' files
        if absent.state == "value":
            raise FileExistsError(f"{self} holds step {step} already")
        if wrong is not None:
            raise OSError(f"{self}: {wrong}")
        self._objects.write(f"{attempt}/{INDEX_FILE}", index)
        record = json.dumps({"attempt": attempt.rpartition("/")[2], "sizes": dict(sizes)}).encode()
        created = self._objects.write(key, record, if_equal=absent.stamp.generation)
        # A second try, after an answer that was lost, is refused because of the first: then the record is ours.
        if not created and self._objects.read(key).value != record:
            raise FileExistsError(f"{self} holds step {step} already: another writer has just committed it")
        self._live.discard(attempt)
        with suppress(OSError, CheckpointError):  # the step is committed; what stays is removed by the next commit
            self._remove_dead_attempts()

    def abort(self, attempt: str) -> None:
        """Remove what an attempt has written, as far as the store answers; the rest goes with a later commit."""
        self._live.discard(attempt)
        with suppress(OSError, CheckpointError):
            # A commit that failed for want of an answer may have happened.
            if self._committed_attempt(attempt.partition("/")[0]) != attempt:
                self._objects.delete_folder(attempt)

    def remove(self, step: int) -> None:
        """Delete a committed step, but not what was set aside under its number."""
        self._objects.write(f"{step_name(step)}/{_COMMITTED}", None)
        kept = _attempts(self._read_journal().content)
        if not any(attempt.startswith(f"{step_name(step)}/") for attempt in kept):
            self._objects.delete_folder(step_name(step))
            return
        for attempt in self._scan()[1].get(step, set[str]()) - kept:
            self._objects.delete_folder(attempt)

    def set_aside(self, steps: Sequence[int]) -> None:
        """Record the attempts, which is the atomic act, then take back their commits."""
        journal = self._finish_setting_aside(self._read_journal())  # of an earlier call that failed halfway
        if not steps:
            return
        attempts = [(step, self._read_commit(step_name(step))[0].partition("/")[2]) for step in steps]
        set_aside = (*journal.content.set_aside, *attempts)
        self._finish_setting_aside(self._replace(journal, Journal(pending=tuple(steps), set_aside=set_aside)))

    def steps_set_aside(self) -> list[int]:
        return sorted(step for step, _ in self._read_journal().content.set_aside)

    def remove_set_aside(self) -> None:
        journal = self._read_journal()
        for attempt in _attempts(journal.content):
            self._objects.delete_folder(attempt)
        if journal.content.set_aside:
            self._replace(journal, Journal())

    def _finish_setting_aside(self, journal: _StoredJournal) -> _StoredJournal:
        if not journal.content.pending:
            return journal
        for step in journal.content.pending:
            self._objects.write(f"{step_name(step)}/{_COMMITTED}", None)
        return self._replace(journal, Journal(set_aside=journal.content.set_aside))

    def _read_journal(self) -> _StoredJournal:
        found = self._objects.read(JOURNAL_FILE)
        data = found.value if found.state == "value" else None
        return _StoredJournal(Journal.decode(data, f"{self}/{JOURNAL_FILE}"), found.stamp.generation)

    def _replace(self, journal: _StoredJournal, content: Journal) -> _StoredJournal:
        data = content.encode()
        written = self._objects.write(JOURNAL_FILE, data, if_equal=journal.generation)
        found = self._objects.read(JOURNAL_FILE)
        if not written and found.value != data:  # a second try, after an answer that was lost, is refused too
            raise OSError(f"{self}/{JOURNAL_FILE} was changed by another writer meanwhile; nothing was set aside here")
        return _StoredJournal(content, found.stamp.generation)

    def _scan(self) -> tuple[set[int], dict[int, set[str]], bool]:
        """Return the committed steps, the attempts of each step, and whether there is a record of rollbacks."""
        committed: set[int] = set()
        attempts: dict[int, set[str]] = {}
        has_journal = False
        for key in self._objects.list_keys():
            has_journal = has_journal or key == JOURNAL_FILE
            folder, _, name = key.partition("/")
            step = step_of(folder)
            attempt_id, slash, _ = name.partition("/")
            if step is None:
                continue
            if name == _COMMITTED:
                committed.add(step)
            elif slash and _ATTEMPT_ID.fullmatch(attempt_id):
                attempts.setdefault(step, set()).add(f"{folder}/{attempt_id}")
        return committed, attempts, has_journal

    def _read_commit(self, folder: str) -> tuple[str, dict[str, int]]:
        """Return the attempt that is a committed step, and the sizes of its data files."""
        found = self._objects.read(f"{folder}/{_COMMITTED}")
        if found.state != "value":
            raise FileNotFoundError(f"{self} holds no committed {folder}")
        try:
            fields = json.loads(found.value)
            return f"{folder}/{fields['attempt']}", {name: int(size) for name, size in fields["sizes"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"{self}: {folder}/{_COMMITTED} is damaged: {error!r}") from None

    def _committed_attempt(self, folder: str) -> str | None:
        with suppress(FileNotFoundError):
            return self._read_commit(folder)[0]
        return None

    def _find_wrong_file(self, attempt: str, sizes: Mapping[str, int]) -> str | None:
        checks = (partial(self._objects.size, f"{attempt}/{name}", size) for name, size in sizes.items())
        with Workers(_CHECK_THREADS) as workers:
            found = workers.run(checks)
        for (name, expected), size in zip(sizes.items(), found, strict=True):
            if size != expected:
                problem = "is missing" if size is None else f"has {size} bytes"
                return f"{attempt}/{name} {problem}; {expected} bytes were to be written"
        return None

    def _remove_dead_attempts(self) -> None:
        committed, attempts, has_journal = self._scan()
        kept = self._live | (_attempts(self._read_journal().content) if has_journal else set())
        newest = max(committed, default=-1)
        for step, names in attempts.items():
            if step > newest or (step in committed and len(names) == 1):
                continue
            # Read now: since the listing, a slower writer may have committed.
            for attempt in names - kept - {self._committed_attempt(step_name(step))}:
                self._objects.delete_folder(attempt)


def _attempts(journal: Journal) -> set[str]:
    return {f"{step_name(step)}/{attempt_id}" for step, attempt_id in journal.set_aside}


class _ObjectFiles:
    def __init__(self, objects: Objects, attempt: str, sizes: Mapping[str, int]) -> None:
        self._objects = objects
        self._attempt = attempt
        self._sizes = dict(sizes)  # as they were committed; once a file is open, as it is

    def read_index(self) -> bytes:
        return self._read(INDEX_FILE)

    def open(self, name: str) -> int:
        key = f"{self._attempt}/{name}"
        size = self._objects.size(key, self._sizes[name]) if name in self._sizes else None
        if size is None:
            raise FileNotFoundError(f"{self._objects} holds no {key}")
        self._sizes[name] = size
        return size

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        stop = min(offset_bytes + buffer.nbytes, self._sizes[name])
        if stop <= offset_bytes:
            return 0
        value = self._read(name, slice(offset_bytes, stop))
        buffer.cast("B")[: len(value)] = value
        return len(value)

    def _read(self, name: str, byte_range: slice | None = None) -> bytes:
        found = self._objects.read(f"{self._attempt}/{name}", byte_range)
        if found.state != "value":
            raise FileNotFoundError(f"{self._objects} holds no {self._attempt}/{name}")
        return found.value
