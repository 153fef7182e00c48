"""Logs of a Ray cluster's nodes that do not share the run's folder: copied into it, a folder for each node."""

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_runs.logs import MAIN

_TIMEOUT_S = 20.0
"""A node that was lost may still count as alive."""

_logger = logging.getLogger(__name__)


class NodeLogs:
    """Copies what processes of other nodes have logged to ``logs``; each call adds what is new.

    Nodes write to a path of their own file systems. One that has the main process's log there shares this one.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._copied: dict[str, dict[str, int]] = {}
        """Bytes of each file that were copied, by node."""

    async def collect(self) -> None:
        """Copy what nodes that answer have logged since the last call; a failure is logged, and ends nothing."""
        try:
            await asyncio.to_thread(self._collect)
        except (RayError, OSError):
            _logger.warning("logs of nodes could not be collected", exc_info=True)

    def _collect(self) -> None:
        main = self._logs / MAIN
        this_node = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] != this_node]
        if not nodes or not main.is_file():
            return
        remote: Any = ray.remote
        calls: dict[Any, str] = {}
        for node in nodes:
            name = f"{node['NodeManagerAddress']}-{node['NodeID'][:8]}"
            on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            read = remote(new_logs).options(num_cpus=0, scheduling_strategy=on_node, max_retries=0)
            calls[read.remote(str(self._logs), _beginning(main), self._copied.get(name, {}))] = name
        done, missed = ray.wait(list(calls), num_returns=len(calls), timeout=_TIMEOUT_S)
        for call in missed:
            _logger.warning(
                "logs of node %s could not be collected within %.0f s", calls[call], _TIMEOUT_S
            )
        for call in done:
            logs: Mapping[str, tuple[int, bytes]] = ray.get(call)
            copied = self._copied.setdefault(calls[call], {})
            for name, (size, content) in logs.items():
                target = self._logs / calls[call] / name
                target.parent.mkdir(exist_ok=True)
                with target.open("ab") as file:
                    file.write(content)
                copied[name] = size


def new_logs(
    folder: str, beginning: bytes, copied: Mapping[str, int]
) -> dict[str, tuple[int, bytes]]:
    """Return size and new content of each log file of this node; none if its folder is the main process's.

    Args:
        beginning: that of the main process's log.
        copied: the bytes of each file that are known.
    """
    main = Path(folder, MAIN)
    if main.is_file() and _beginning(main) == beginning:
        return {}
    logs: dict[str, tuple[int, bytes]] = {}
    for path in Path(folder).glob("*.log"):
        content = path.read_bytes()
        start = copied.get(path.name, 0)
        if start > len(content):
            # The file has become shorter: it was rotated.
            start = 0
        new = content[start:]
        if new:
            logs[path.name] = (len(content), new)
    return logs


def _beginning(path: Path) -> bytes:
    """Return the line with time, process and host at which a log starts."""
    with path.open("rb") as file:
        return file.readline(1000)
