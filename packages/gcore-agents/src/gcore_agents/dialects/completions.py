"""OpenAI's Completions: text or tokens are continued without a chat template."""

from collections.abc import Iterator, Sequence
from typing import Any

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.dialects.chat_completions import (
    CONSTRAINTS,
    SAMPLING_FIELDS,
    wants_usage,
    write_usage,
)
from gcore_agents.dialects.dialect import (
    CONSTRAINED,
    MAX_STOPS,
    MAX_TURNS,
    MODEL,
    Dialect,
)
from gcore_agents.dialects.events import LAST_EVENT, split_text, write_event
from gcore_agents.dialects.fields import JsonFields

_DEFAULT_MAX_TOKENS = 16
"""The API's own."""
_MAX_LOG_PROBS = 20


class CompletionsDialect(Dialect):
    """``POST /v1/completions``: a prompt of text or tokens, and replies with their tokens.

    Choices have ``token_ids`` and ``prompt_token_ids`` if the call has ``return_token_ids``, as vLLM's. Of
    ``logprobs`` only the sampled tokens' are known.

    Example:
        >>> def read_prompt(session: Session, text: str) -> tuple[int, ...]:
        ...     return CompletionsDialect(session).read_call({"prompt": text}).prompt_ids
    """

    def read_call(self, body: Any) -> ChatCall:
        fields = JsonFields(body)
        fields.refuse(CONSTRAINTS, CONSTRAINED)
        fields.refuse(("echo", "suffix", "prompt_logprobs", "response_format"), "not supported")
        num_turns = fields.read_integer("n", 1, MAX_TURNS) or 1
        fields.read_integer("best_of", num_turns, num_turns)
        return ChatCall(
            messages=(),
            prompt_ids=tuple(self._read_prompt(fields)),
            max_tokens=fields.read_integer("max_tokens", 1) or _DEFAULT_MAX_TOKENS,
            stop=fields.read_texts("stop", MAX_STOPS),
            n=num_turns,
            stream=fields.read_flag("stream"),
            unused=fields.pick(SAMPLING_FIELDS),
            options={
                "model": fields.read_text("model") or MODEL,
                "logprobs": fields.read_integer("logprobs", 0, _MAX_LOG_PROBS) is not None,
                "token_ids": fields.read_flag("return_token_ids"),
                "usage": wants_usage(fields),
            },
        )

    def _read_prompt(self, fields: JsonFields) -> list[int]:
        encoder = self.session.encoder
        prompt = fields.values.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
            fields = JsonFields({"prompt": prompt}, fields.path)
        if isinstance(prompt, str):
            prompt_ids = encoder.encode(prompt, add_special_tokens=True)
        else:
            prompt_ids = fields.read_token_ids("prompt", encoder.vocab_size)
        if not prompt_ids:
            fields.fail("prompt", "one prompt of text or tokens")
        return prompt_ids

    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, reply in enumerate(replies):
            choice = {"index": index, "text": self._text(call, reply)}
            choices.append({**choice, **self._write_end(call, reply)})
        head = _write_head(call, replies)
        return {**head, "choices": choices, "usage": write_usage(replies)}

    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        head = _write_head(call, replies)
        for index, reply in enumerate(replies):
            for piece in split_text(self._text(call, reply)):
                choice = {"index": index, "text": piece, "finish_reason": None, "logprobs": None}
                yield write_event({**head, "choices": [choice]})
            choice = {"index": index, "text": "", **self._write_end(call, reply)}
            yield write_event({**head, "choices": [choice]})
        if call.options["usage"]:
            yield write_event({**head, "choices": [], "usage": write_usage(replies)})
        yield LAST_EVENT

    def _text(self, call: ChatCall, reply: ChatReply) -> str:
        if not reply.token_ids:
            return reply.message["content"]
        text = self.session.encoder.text(reply.token_ids)
        starts = [text.index(string) for string in call.stop if string in text]
        return text[: min(starts, default=len(text))]

    def _write_end(self, call: ChatCall, reply: ChatReply) -> dict[str, Any]:
        finish_reason = "length" if reply.finish_reason == "length" else "stop"
        end: dict[str, Any] = {"finish_reason": finish_reason, "logprobs": None}
        if call.options["logprobs"]:
            end["logprobs"] = self._write_log_probs(reply)
        if call.options["token_ids"]:
            end["token_ids"] = list(reply.token_ids)
            end["prompt_token_ids"] = list(call.prompt_ids)
        return end

    def _write_log_probs(self, reply: ChatReply) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        offset = 0
        for token_id in reply.token_ids:
            token = self.session.encoder.turn_text([token_id], is_ended=False)
            tokens.append(token)
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": list(reply.log_probs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _write_head(call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
    return {
        "id": replies[0].response_id,
        "object": "text_completion",
        "created": replies[0].created_s,
        "model": call.options["model"],
        "system_fingerprint": None,
    }
