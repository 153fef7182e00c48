"""A Hub of one's own: a small HTTP server that speaks as much of its protocol as downloads of models and data need."""

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class StandInHub:
    """Repositories as folders; each `push` is a commit, and the last one is ``main``."""

    endpoint: str = ""
    commits: dict[str, dict[str, Path]] = field(default_factory=dict[str, dict[str, Path]])
    """Folders by commit hash, of each repository such as ``models/org/name``, in the order of the commits."""
    requests: list[str] = field(default_factory=list[str])
    """Methods and paths of all requests so far."""

    def push(self, repository: str, folder: Path) -> str:
        """Make a folder the newest commit of a repository, and return its hash."""
        history = self.commits.setdefault(repository, {})
        sha = hashlib.sha1(f"{repository} {len(history)}".encode()).hexdigest()
        history[sha] = folder
        return sha

    def environment(self, home: Path) -> dict[str, str]:
        """Return the variables with which the Hub's libraries use this server, and caches in a folder of their own."""
        quiet = {
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            **quiet,
        }


@contextmanager
def stand_in_hub() -> Generator[StandInHub]:
    """Serve a Hub without repositories on a port of this machine."""
    hub = StandInHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        del format, args

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[0] == "api"
        parts = parts[is_api:]
        if parts[0] not in ("models", "datasets"):
            parts = ["models", *parts]
        repository, (verb, *rest) = "/".join(parts[:3]), parts[3:] or [""]
        history = self.hub.commits.get(repository)
        if not history:
            self._refuse("RepoNotFound")
            return
        revision = rest[0] if rest else "main"
        sha = list(history)[-1] if revision == "main" else revision
        if sha not in history:
            self._refuse("RevisionNotFound")
            return
        folder, path = history[sha], "/".join(rest[1:])
        if not is_api:
            self._send_file(folder / path, sha)
        elif verb == "tree":
            self._send_json([e for e in _entries(folder) if e["path"].startswith(path)], sha)
        else:
            files = [{"rfilename": e["path"]} for e in _entries(folder) if e["type"] == "file"]
            name = "/".join(parts[1:3])
            self._send_json(
                {"id": name, "sha": sha, "private": False, "tags": [], "siblings": files}, sha
            )

    def _send_file(self, file: Path, sha: str) -> None:
        if not file.is_file():
            self._refuse("EntryNotFound")
            return
        content = file.read_bytes()
        self._send(content, 200, {"X-Repo-Commit": sha, "ETag": f'"{_blob_id(content)}"'})

    def _send_json(self, value: Any, sha: str) -> None:
        self._send(
            json.dumps(value).encode(),
            200,
            {"X-Repo-Commit": sha, "Content-Type": "application/json"},
        )

    def _refuse(self, code: str) -> None:
        self._send(
            b"{}",
            404,
            {"X-Error-Code": code, "X-Error-Message": code, "Content-Type": "application/json"},
        )

    def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entries(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_dir():
            found.append(
                {"type": "directory", "path": name, "oid": _blob_id(name.encode()), "size": 0}
            )
        else:
            content = path.read_bytes()
            found.append(
                {"type": "file", "path": name, "oid": _blob_id(content), "size": len(content)}
            )
    return found


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
