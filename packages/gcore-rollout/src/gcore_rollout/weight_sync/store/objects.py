"""Objects below a URL, by tensorstore: calls with a time limit, and errors that name the URL."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from gcore_rollout.errors import MissingExtraError

try:
    import tensorstore as ts
except ImportError:
    raise MissingExtraError("tensorstore", "store") from None

_T = TypeVar("_T")
_ANSWER_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 2**20
# With the default of 32 tries, an unreachable server would take a quarter of an hour to become an error.
_RETRIES = {"max_retries": 5, "initial_delay": "250ms", "max_delay": "2s"}
# One context, so that `memory://` is the same store in the whole process.
_CONTEXT = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


@dataclass(frozen=True)
class Pending:
    """A call in flight."""

    _future: "ts.Future[Any]"
    _url: str
    _timeout_s: float

    def result(self) -> Any:
        """Return the answer; an `OSError` if the store reports a failure, a `TimeoutError` if it does not answer."""
        try:
            return self._future.result(timeout=self._timeout_s)
        except TimeoutError:
            self._future.cancel()
            raise TimeoutError(f"{self._url}: no answer within {self._timeout_s:.0f} s") from None
        except (ValueError, NotImplementedError) as error:  # tensorstore's, for any failure
            raise OSError(f"{self._url}: {str(error).partition(' [')[0]}") from error


def in_flight(calls: Iterable[tuple[_T, Pending]], max_in_flight: int) -> Iterator[tuple[_T, Any]]:
    """Yield results in order; calls are taken, which starts them, up to ``max_in_flight`` ahead."""
    started = deque[tuple[_T, Pending]]()
    for call in calls:
        started.append(call)
        if len(started) == max_in_flight:
            key, pending = started.popleft()
            yield key, pending.result()
    yield from ((key, pending.result()) for key, pending in started)


class Objects:
    """The objects below a URL; a `ValueError` if it names no such place.

    It is ``file:///FOLDER``, ``s3://BUCKET/FOLDER``, ``gs://BUCKET/FOLDER``, or ``memory://NAME`` within a process. An
    S3 endpoint, region and credentials are read from the usual environment variables (``AWS_*``).
    """

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            self._store = ts.KvStore.open(_spec(url), context=_CONTEXT).result()
        except ValueError as error:
            raise ValueError(f"url is {url!r}, which names no store: {error}") from None

    def __str__(self) -> str:
        return self._url

    def keys(self) -> list[str]:
        """Return the keys of all objects."""
        return [key.decode() for key in self._pending(self._store.list()).result()]

    def start_read(self, key: str, size_bytes: int = 0) -> Pending:
        """Start reading an object; the result has ``state`` "value" or "missing", and ``value``."""
        return self._pending(self._store.read(key), size_bytes)

    def start_write(self, key: str, value: bytes) -> Pending:
        """Start writing an object atomically."""
        return self._pending(self._store.write(key, value), len(value))

    def create(self, key: str, value: bytes) -> bool:
        """Write an object atomically, and return False if another one exists."""
        absent = self.start_read(key).result()
        if absent.state == "missing":
            stamp = self._pending(self._store.write(key, value, if_equal=absent.stamp.generation), len(value)).result()
            if stamp.generation:
                return True
        # A try whose answer was lost may have written it.
        return self.start_read(key).result().value == value

    def delete(self, key: str) -> None:
        self._pending(self._store.write(key, None)).result()

    def delete_folder(self, folder: str) -> None:
        everything = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" is the character after "/"
        self._pending(self._store.delete_range(everything)).result()

    def _pending(self, future: "ts.Future[_T]", size_bytes: int = 0) -> Pending:
        return Pending(future, self._url, _ANSWER_TIMEOUT_S + size_bytes / _SLOWEST_BYTES_PER_S)


def _spec(url: str) -> dict[str, Any]:
    """Return the spec for tensorstore. Its prefix ends with a slash, so that ``run`` excludes ``run-2``."""
    spec: dict[str, Any] = ts.KvStore.Spec(url).to_json()
    if path := spec.pop("path", "").rstrip("/"):
        spec["path"] = path + "/"
    if spec["driver"] == "s3":
        found = os.environ.get
        if endpoint := found("AWS_ENDPOINT_URL_S3") or found("AWS_ENDPOINT_URL"):
            spec["endpoint"] = endpoint.rstrip("/")
        if region := found("AWS_REGION") or found("AWS_DEFAULT_REGION"):
            spec["aws_region"] = region
        if found("AWS_ACCESS_KEY_ID"):
            # The default chain would look here first too, but prints errors about files that are not there.
            spec["aws_credentials"] = {"type": "environment"}
    return spec
