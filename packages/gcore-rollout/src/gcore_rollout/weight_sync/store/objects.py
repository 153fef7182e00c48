"""Objects below a URL, by tensorstore: calls with a time limit, and errors that name the URL."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from gcore_rollout.errors import MissingExtraError

try:
    import tensorstore as ts
except ImportError:
    raise MissingExtraError("tensorstore", "store") from None

_ANSWER_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 2**20
# With the default of 32 tries, an unreachable server would take a quarter of an hour to become an error.
_RETRIES = {"max_retries": 5, "initial_delay": "250ms", "max_delay": "2s"}
# One context, so that `memory://` is the same store in the whole process.
_CONTEXT = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


class Part(NamedTuple):
    """One of the objects that hold a version."""

    key: str
    size_bytes: int
    sha256: str


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
        return [key.decode() for key in self.result(self._store.list())]

    def start_read(self, key: str) -> "ts.Future[Any]":
        """Start reading an object; the `result` has ``state`` "value" or "missing", and ``value``."""
        return self._store.read(key)

    def start_write(self, key: str, value: bytes) -> "ts.Future[Any]":
        """Start writing an object atomically."""
        return self._store.write(key, value)

    def result(self, call: "ts.Future[Any]", size_bytes: int = 0) -> Any:
        """Return a call's answer; an `OSError` if the store reports a failure, a `TimeoutError` if it is silent."""
        timeout_s = _ANSWER_TIMEOUT_S + size_bytes / _SLOWEST_BYTES_PER_S
        try:
            return call.result(timeout=timeout_s)
        except TimeoutError:
            call.cancel()
            raise TimeoutError(f"{self}: no answer within {timeout_s:.0f} s") from None
        except (ValueError, NotImplementedError) as error:  # tensorstore's, for any failure
            raise OSError(f"{self}: {str(error).partition(' [')[0]}") from error

    def results(self, calls: Iterable[tuple[Part, "ts.Future[Any]"]], most: int) -> Iterator[tuple[Part, Any]]:
        """Yield results in order; calls are taken, which starts them, up to ``most`` ahead."""
        started = deque[tuple[Part, "ts.Future[Any]"]]()
        for call in calls:
            started.append(call)
            if len(started) == most:
                part, oldest = started.popleft()
                yield part, self.result(oldest, part.size_bytes)
        yield from ((part, self.result(call, part.size_bytes)) for part, call in started)

    def create(self, key: str, value: bytes) -> bool:
        """Write an object atomically, and return False if another one exists."""
        absent = self.result(self._store.read(key))
        if absent.state == "missing":
            write = self._store.write(key, value, if_equal=absent.stamp.generation)
            if self.result(write, len(value)).generation:
                return True
        # A try whose answer was lost may have written it.
        return self.result(self._store.read(key)).value == value

    def delete(self, key: str) -> None:
        self.result(self._store.write(key, None))

    def delete_folder(self, folder: str) -> None:
        everything = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" is the character after "/"
        self.result(self._store.delete_range(everything))


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
