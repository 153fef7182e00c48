"""OpenEnv's capture proxy (openenv.core.harness.capture): ``python openenv_capture.py --same-tokens``."""

import socket
from collections.abc import Mapping
from typing import Any

from openenv.core.harness.capture import CaptureServer
from suite import main, make_nodes
from upstream import Upstream


class OpenEnvPeer:
    async def start(self, upstream: Upstream) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._server = CaptureServer(llm_url=upstream.url, model="policy", port=port)
        self._server.start()
        self._url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        self._server.stop()

    def open(self) -> tuple[str, str]:
        self._session = self._server.registry.create(None)
        return self._url, self._session.session_id

    def read_graph(self) -> Mapping[str, Any]:
        graph = self._session.graph
        nodes = [graph._nodes[node_id] for node_id in graph._order]
        numbers = {node.node_id: number for number, node in enumerate(nodes)}
        calls: list[tuple[int, list[int], list[int]]] = []
        for node in nodes:
            parent = graph._nodes.get(node.parent_id)
            number = numbers[node.parent_id] if parent is not None else -1
            calls.append((number, node.context_ids(parent), node.sampled_ids))
        return make_nodes(calls)


if __name__ == "__main__":
    main(OpenEnvPeer())
