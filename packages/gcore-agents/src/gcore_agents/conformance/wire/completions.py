"""A client of Completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_agents.conformance.wire.chat import read_ids
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    label_reply,
    make_message,
    write_options,
)


class CompletionsClient(WireClient):
    """Writes and reads Completions, whose prompts are text or tokens.

    Example:
        >>> CompletionsClient().write_body(WireRequest(prompt=[4, 5]))["prompt"]
        [4, 5]
    """

    name = "completions"
    route = "/v1/completions"

    def write_body(self, request: WireRequest) -> dict[str, Any]:
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return {**write_options(request), "prompt": prompt}

    def read_reply(self, body: Mapping[str, Any]) -> list[WireReply]:
        usage = body.get("usage") or {}
        replies: list[WireReply] = []
        for number, choice in enumerate(body["choices"]):
            reply = WireReply(
                message=make_message(choice["text"], "", ()),
                finish_reason=choice["finish_reason"],
                prompt_tokens=usage.get("prompt_tokens", 0),
                completion_tokens=usage.get("completion_tokens", 0),
                prompt_ids=read_ids(choice, "prompt_token_ids"),
                token_ids=read_ids(choice, "token_ids"),
                ids=label_reply(body["id"], number),
            )
            replies.append(reply)
        return replies

    def join_events(self, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        body: dict[str, Any] = {"id": events[0]["id"], "usage": None}
        choices: dict[int, dict[str, Any]] = {}
        for event in events:
            body["usage"] = event.get("usage") or body["usage"]
            for part in event["choices"]:
                choice = choices.setdefault(part["index"], {"text": "", "finish_reason": ""})
                choice["text"] += part["text"]
                choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
                if part.get("prompt_token_ids"):
                    choice["prompt_token_ids"] = part["prompt_token_ids"]
                if part.get("token_ids"):
                    choice["token_ids"] = [*choice.get("token_ids", ()), *part["token_ids"]]
        return {**body, "choices": [choices[index] for index in sorted(choices)]}
