"""An engine's server as vLLM's, with turns that are written in advance: what peers' endpoints are run on."""

import json

from aiohttp import web

from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.chat.messages import normalize_messages
from gcore_agents.conformance.scripted import ScriptedEngine
from gcore_agents.graph import Message


class Upstream:
    """Serves Chat Completions with ``return_token_ids``, and vLLM's ``/inference/v1/generate``.

    It renders and tokenizes each conversation as a whole, as an engine's server does.
    """

    def __init__(self, encoder: ChatEncoder) -> None:
        self.encoder = encoder
        self.engine = ScriptedEngine(encoder=encoder, turns=[[0]])

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self.list_models)
        app.router.add_post("/v1/chat/completions", self.complete_chat)
        app.router.add_post("/inference/v1/generate", self.generate)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def list_models(self, request: web.Request) -> web.Response:
        del request
        model = {"id": "policy", "object": "model", "owned_by": "vllm", "max_model_len": 100_000}
        return web.json_response({"object": "list", "data": [model]})

    async def complete_chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        tools = body.get("tools") or []
        prompt = self.encoder.first(read_messages(body["messages"]), tools=tools)
        choices = []
        for index in range(body.get("n") or 1):
            turn = await self.sample(prompt, body)
            stop = body.get("stop") or []
            message = self.encoder.read_turn(
                turn.token_ids,
                tools=tools,
                stop=stop,
                is_ended=turn.finish_reason == "stop",
                prompt_ids=prompt,
            )
            for string in stop:
                message["content"] = message["content"].partition(string)[0]
            calls = message.get("tool_calls") or ()
            for call in calls:
                function = call["function"]
                function["arguments"] = json.dumps(function["arguments"])
            finish_reason = "tool_calls" if calls else turn.finish_reason
            choice = {"index": index, "message": message, "finish_reason": finish_reason}
            choice["token_ids"] = turn.token_ids
            choice["logprobs"] = {"content": self.write_log_probs(turn)}
            choices.append(choice)
        num_sampled = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": num_sampled}
        usage["total_tokens"] = len(prompt) + num_sampled
        reply = {"id": f"chatcmpl-{len(self.engine.calls)}", "object": "chat.completion"}
        reply |= {"created": 1, "model": "policy", "choices": choices, "usage": usage}
        return web.json_response({**reply, "prompt_token_ids": prompt})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        turn = await self.sample(body["token_ids"], body["sampling_params"])
        choice = {"index": 0, "token_ids": turn.token_ids, "finish_reason": turn.finish_reason}
        choice["logprobs"] = {"content": self.write_log_probs(turn)}
        return web.json_response({"request_id": f"r{len(self.engine.calls)}", "choices": [choice]})

    async def sample(self, prompt, parameters):
        limit = parameters.get("max_completion_tokens") or parameters.get("max_tokens") or 512
        stop = tuple(parameters.get("stop") or ())
        return await self.engine.sample(prompt, session="", seed=0, max_tokens=limit, stop=stop)

    def write_log_probs(self, turn):
        entries = []
        for token, log_prob in zip(turn.token_ids, turn.log_probs, strict=True):
            entry = {"token": f"token_id:{token}", "logprob": log_prob, "bytes": None}
            entries.append({**entry, "top_logprobs": []})
        return entries


def read_messages(messages: list[Message]) -> list[Message]:
    """Return messages with parsed arguments, as vLLM gives them to chat templates."""
    parsed = []
    for message in normalize_messages([{**m, "content": m.get("content") or ""} for m in messages]):
        for call in message.get("tool_calls") or ():
            arguments = call["function"].get("arguments")
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments or "{}")
        parsed.append(message)
    return parsed
