"""The objects below a URL, by tensorstore's key-value stores: with a bound on time, and errors that name the URL."""

import os
from typing import Any, TypeVar

from gcore_ckpt.errors import CheckpointError, MissingExtraError

try:
    import tensorstore as ts
except ModuleNotFoundError:
    raise MissingExtraError("tensorstore", "object-store") from None

_T = TypeVar("_T")
_OUT_OF_RANGE = "OUT_OF_RANGE"
"""Start of the message of tensorstore where an object has not all of the bytes asked for."""
_SCHEMES = ("s3", "gs", "memory")
_ANSWER_TIMEOUT_S = 60.0
_SLOWEST_BYTES_PER_S = 2**20
# With the defaults, 32 tries, a server that is gone would take a quarter of an hour to become an error.
_RETRIES = {"max_retries": 5, "initial_delay": "250ms", "max_delay": "2s"}
# One context for all: it is what makes `memory://` the same store for everyone in the process.
_CONTEXT = ts.Context({"s3_request_retries": _RETRIES, "gcs_request_retries": _RETRIES})


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
            raise CheckpointError(
                f"{self._url} was opened before a fork: open it in a process started by 'spawn'"
            )
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
            result = self.read(key, slice(start, None))
        except OSError as error:
            if _OUT_OF_RANGE not in str(error):
                raise
            start = 0
            result = self.read(key)
        return start + len(result.value) if result.state == "value" else None

    def write(self, key: str, value: bytes | None, if_equal: bytes | None = None) -> bool:
        """Write an object, or delete it for None; False if it is not of the generation `if_equal`."""
        stamp = self._wait(self._store.write(key, value, if_equal=if_equal), len(value or b""))
        return bool(stamp.generation)

    def delete_folder(self, folder: str) -> None:
        everything = ts.KvStore.KeyRange(
            f"{folder}/", f"{folder}0"
        )  # "0" is the character after "/"
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
            raise OSError(f"{self._url}: {status.partition(' [')[0]}") from error


def _spec(url: str) -> dict[str, Any]:
    """Return what tensorstore opens. The prefix ends with a slash, lest `ckpt` hold the steps of `ckpt-2`."""
    if url.partition("://")[0] not in _SCHEMES:
        raise ValueError("a path is a local folder, s3://bucket/folder or gs://bucket/folder")
    spec: dict[str, Any] = ts.KvStore.Spec(url).to_json()
    path = spec.pop("path", "").rstrip("/")
    if path:
        spec["path"] = path + "/"
    if spec["driver"] == "s3":
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            spec["endpoint"] = endpoint.rstrip("/")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        if region:
            spec["aws_region"] = region
        if os.environ.get("AWS_ACCESS_KEY_ID"):
            # The default chain would look here first too, but prints errors about files that are not there.
            spec["aws_credentials"] = {"type": "environment"}
    return spec
