"""Messages of cases, in the form of Chat Completions with parsed arguments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore_agents.graph import Message

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first", "second"],
        },
    },
    {
        "name": "look_up",
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}},
            "required": ["word"],
        },
    },
)
"""Functions of the cases that use tools."""
ANNOUNCED = [{"type": "function", "function": tool} for tool in TOOLS]
"""They, as chat templates take them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelTurn:
    """A turn that the scripted engine writes; it is equal to itself alone.

    Example:
        >>> turn = ModelTurn(text="Let me see.", calls=[{"name": "look_up", "arguments": {"word": "tree"}}])
        >>> turn.message()["tool_calls"][0]["function"]["name"]
        'look_up'
    """

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    """Names and arguments of functions."""

    def message(self) -> dict[str, Any]:
        """Return the turn as a message; ids of calls have nine letters, as Mistral's templates demand."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls: list[dict[str, Any]] = []
        for number, call in enumerate(self.calls):
            calls.append({"id": f"scripted{number}", "type": "function", "function": {**call}})
        if calls:
            message["tool_calls"] = calls
        return message


def system(text: str) -> dict[str, Any]:
    """Return a system message."""
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def results(turn: Message, *texts: str) -> list[dict[str, Any]]:
    """Return the results of a turn's calls."""
    messages: list[dict[str, Any]] = []
    for call, text in zip(turn["tool_calls"], texts, strict=True):
        name = call["function"]["name"]
        result = {"role": "tool", "content": text, "tool_call_id": call["id"], "name": name}
        messages.append(result)
    return messages
