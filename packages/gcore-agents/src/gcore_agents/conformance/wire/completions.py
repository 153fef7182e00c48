"""A client of Completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_agents.chat.messages import make_turn_message
from gcore_agents.conformance.wire.chat import read_ids
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    join_choices,
    label_reply,
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
                message=make_turn_message(choice["text"]),
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
        return join_choices(events, _add_text)


def _add_text(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    choice["text"] = choice.get("text", "") + part["text"]
