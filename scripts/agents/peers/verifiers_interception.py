"""verifiers' interception server and training client: ``python verifiers_interception.py --templates qwen3``.

With ``--keep-thoughts`` its renderer continues turns also at a message of the user (thinking_retention="all").
"""

import sys
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from renderers import Qwen3RendererConfig
from suite import main, make_nodes
from upstream import Upstream
from verifiers.v1.clients.client import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig

RENDERER = Qwen3RendererConfig()
if "--keep-thoughts" in sys.argv:
    sys.argv.remove("--keep-thoughts")
    RENDERER = Qwen3RendererConfig(thinking_retention="all")


class VerifiersPeer:
    async def start(self, upstream: Upstream) -> None:
        self._stack = AsyncExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        upstream.encoder._tokenizer.save_pretrained(folder)
        self._client = TrainClientConfig(
            base_url=upstream.url, renderer=RENDERER, renderer_model_name=folder
        )
        self._server = InterceptionServer()
        await self._stack.enter_async_context(self._server)

    async def close(self) -> None:
        await self._stack.aclose()

    def open(self) -> tuple[str, str]:
        context = ModelContext(model="policy", client=self._client, sampling=SamplingConfig())
        task = TraceTask.model_construct(type="task", data={})
        agent = AgentInfo.model_construct(config=None)
        self._trace = Trace.model_construct(task=task, agent=agent, nodes=[], calls=[], tools=[])
        secret, _ = self._server.register(RolloutSession(ctx=context, trace=self._trace))
        return self._server.base_url, secret

    def read_graph(self) -> Mapping[str, Any]:
        nodes = self._trace.nodes
        turns = [number for number, node in enumerate(nodes) if node.sampled]
        calls: list[tuple[int, list[int], list[int]]] = []
        for number in turns:
            node = nodes[number]
            num_context = node.mask.index(True)
            context = list(node.token_ids[:num_context])
            parent = node.parent
            while parent is not None and not nodes[parent].sampled:
                context = [*nodes[parent].token_ids, *context]
                parent = nodes[parent].parent
            above = turns.index(parent) if parent is not None else -1
            calls.append((above, context, list(node.token_ids[num_context:])))
        return make_nodes(calls)


if __name__ == "__main__":
    main(VerifiersPeer())
