"""Agent Lightning's proxy: ``python agentlightning_proxy.py --dialects chat``.

Its rows are made in agentlightning.verl.rollout_adapter, which needs verl and torch: here a turn continues the one
before it if its prompt starts with all of that one's tokens, which is the rule there.
"""

import socket
import threading
import time
from collections.abc import Mapping
from itertools import count
from typing import Any

import uvicorn
from agentlightning.schemas import Model
from agentlightning.server import store
from agentlightning.server.app import create_app
from suite import main, make_nodes
from upstream import Upstream

CONFIG: Mapping[str, Any] = {
    "key": "",
    "default_proxy": {
        "model_name": "policy",
        "train": {"temperature": 1.0},
        "val": {"temperature": 1.0},
    },
}


class AgentLightningPeer:
    def __init__(self) -> None:
        self._numbers = count()

    async def start(self, upstream: Upstream) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        model = Model.model_construct(model="policy", endpoint=upstream.url, version=0)
        store._models["policy"] = {upstream.url: model}
        config = uvicorn.Config(create_app(CONFIG), port=port, log_level="error")
        self._server = uvicorn.Server(config)
        threading.Thread(target=self._server.run, daemon=True).start()
        while not self._server.started:
            time.sleep(0.05)
        self._url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        self._server.should_exit = True

    def open(self) -> tuple[str, str]:
        self._rollout = f"rollout{next(self._numbers)}"
        store._rollouts[self._rollout] = None
        store._events[self._rollout] = {}
        return f"{self._url}/proxy/rollout/{self._rollout}/attempt/a/mode/train/openai", "EMPTY"

    def read_graph(self) -> Mapping[str, Any]:
        calls: list[tuple[int, list[int], list[int]]] = []
        context: list[int] = []
        for event in store._events[self._rollout].get("a", []):
            response = event.data["response"]
            if "choices" not in response:
                continue
            prompt = response["prompt_token_ids"]
            sampled = response["choices"][0]["token_ids"]
            continues = bool(context) and prompt[: len(context)] == context
            parent = len(calls) - 1 if continues else -1
            calls.append((parent, prompt[len(context) :] if continues else prompt, sampled))
            context = [*prompt, *sampled]
        return make_nodes(calls)


if __name__ == "__main__":
    main(AgentLightningPeer())
