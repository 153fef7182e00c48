"""Finished sessions on disk, so that a process which is killed loses none of them."""

import base64
import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from gcore_agents.chat.images import convert_images
from gcore_agents.graph import MessageGraph, MessageNode
from gcore_agents.session import Session, SessionReward

_TURN_FIELDS = (
    "log_probs",
    "weight_versions",
    "routed_experts",
    "finish_reason",
    "response_id",
    "is_delivered",
    "agent",
    "start_s",
    "end_s",
)


class SessionJournal:
    """Records finished sessions in a folder, one line of JSON each, and gives back those of former journals.

    Each journal writes files of its own, one for each step. A line is on disk before `add` returns; a line that was cut
    off is no session. Files of old steps are removed.

    Args:
        folder: of the run; made with the first session.
        num_steps: before the last one, whose sessions are kept: those between two checkpoints.
        max_age: steps for which a session may last, or wait for others of its group.

    Example:
        >>> journal = SessionJournal(Path("sessions"), num_steps=25)
        >>> journal.find("row 3", step=7) is None
        True
    """

    def __init__(self, folder: Path, *, num_steps: int, max_age: int = 0) -> None:
        self._folder = folder
        self._num_steps = num_steps + max_age
        self._max_age = max_age
        self._former: dict[tuple[str, int], tuple[Path, int]] = {}
        """File of each session, and where its line starts there: their tokens may be more than the memory takes."""
        for file in sorted(folder.glob("*.jsonl")):
            step = int(file.name.partition("-")[0])
            for key, start in _list_records(file):
                self._former[key, step] = file, start
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._step = -1
        self._file: IO[bytes] | None = None

    def find(self, key: str, *, step: int) -> Mapping[str, Any] | None:
        """Return the record of a session that began with the weights of ``step``, or of one up to ``max_age`` before.

        Its entry "step" is that one, the newest of several. None: no former journal has a record.
        """
        for began in range(step, step - self._max_age - 1, -1):
            if (key, began) in self._former:
                path, start = self._former[key, began]
                with path.open("rb") as file:
                    file.seek(start)
                    return {**json.loads(file.readline()), "step": began}
        return None

    def add(self, key: str, session: Session, *, step: int, version: int, turns: list[str]) -> None:
        """Record a finished session.

        Args:
            key: names the session among those of a step.
            step: the last one before the session, whose weights it began with.
            version: of these weights, as its engine numbers them.
            turns: the texts that the agent's driver returned.
        """
        record = {
            "key": key,
            "version": version,
            "end": session.end,
            "duration_s": session.clock.now_s(),
            "turns": turns,
            "rewards": [vars(reward) for reward in session.rewards],
            "kept_responses": sorted(session.kept_responses),
            "findings": dict(session.graph.findings),
            "nodes": [_describe(node) for node in session.graph.nodes],
        }
        file = self._open(step)
        file.write(json.dumps(record, default=np.ndarray.tolist).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Close the open file. Idempotent."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, step: int) -> IO[bytes]:
        """Return the file of a step; with a new one, files of steps that no resumed run needs are removed."""
        if self._file is None or step != self._step:
            self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            for file in self._folder.glob("*.jsonl"):
                if int(file.name.partition("-")[0]) < step - self._num_steps:
                    file.unlink(missing_ok=True)
            self._file = (self._folder / f"{step:08}-{self._name}").open("ab")
            self._step = step
        return self._file


def restore_session(session: Session, record: Mapping[str, Any], *, version: int) -> list[str]:
    """Set the graph, the rewards and the end of a new session from a record, and return the texts of its turns.

    ``version`` is the number that the weights which it began with have now: engines that were replaced count from
    another one.
    """
    graph = MessageGraph()
    shift = version - record["version"]
    for fields in record["nodes"]:
        node_fields = dict(fields)
        number = node_fields.pop("parent")
        parent = graph.root if number < 0 else graph.nodes[number]
        node_fields["messages"] = convert_images(fields["messages"], base64.b64decode)
        if "weight_versions" in fields:
            node_fields["weight_versions"] = [
                number + shift for number in fields["weight_versions"]
            ]
        if fields.get("routed_experts") is not None:
            node_fields["routed_experts"] = np.array(fields["routed_experts"], np.int16)
        graph.add_node(parent, **node_fields)
    graph.findings.update(record["findings"])
    session.graph = graph
    session.rewards = [SessionReward(**reward) for reward in record["rewards"]]
    session.kept_responses = set(record["kept_responses"])
    session.end = record["end"]
    return list(record["turns"])


def _describe(node: MessageNode) -> dict[str, Any]:
    assert node.parent is not None
    fields: dict[str, Any] = {
        "parent": node.parent.number,
        "messages": convert_images(node.messages, _encode_image),
        "token_ids": list(node.token_ids),
        "image_starts": list(node.image_starts),
    }
    if node.is_turn:
        fields |= {name: getattr(node, name) for name in _TURN_FIELDS}
    return fields


def _encode_image(image: bytes) -> str:
    return base64.b64encode(image).decode()


def _list_records(path: Path) -> list[tuple[str, int]]:
    """Return the key of each record of a file, and where its line starts, without a last one that was cut off."""
    records: list[tuple[str, int]] = []
    start = 0
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                records.append((json.loads(line)["key"], start))
            start += len(line)
    return records
