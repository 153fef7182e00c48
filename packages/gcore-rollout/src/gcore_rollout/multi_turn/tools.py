"""Tools: plain async functions that a policy calls by writing a call into its turn."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gcore_rollout.multi_turn.chat import Message
from gcore_rollout.multi_turn.environment import Opening, Reply

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call that a turn holds."""

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """Why the call cannot be read; empty: it can."""


CallParser = Callable[[str], Sequence[ToolCall]]
"""Parses the text of a turn to its calls; a turn without calls is an answer."""


def hermes_calls(text: str) -> list[ToolCall]:
    """Parse calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
    return [_call(match) for match in _HERMES.findall(text)]


def _call(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except json.JSONDecodeError as error:
        return ToolCall(name="", arguments={}, error=f"the call is not JSON: {error}")
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if not isinstance(arguments, dict) or not isinstance(call.get("name"), str):
        return ToolCall(name="", arguments={}, error="a call is an object with a name and an object of arguments")
    return ToolCall(name=call["name"], arguments=arguments)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a policy may call.

    A failure of a call is reported to the policy, which may correct it, and is no error of the run.
    """

    name: str
    description: str
    function: Callable[..., Awaitable[object]]
    """Called with the arguments by name; its result is reported as text."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    timeout_s: float = 10.0
    max_characters: int = 2_000
    """Largest length of the answer, which is cut."""

    @property
    def schema(self) -> dict[str, Any]:
        """The function's schema in the form of chat templates."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """Call the function, and return the answer to the policy."""
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = str(await self.function(**arguments))
        except TimeoutError:
            return f"error: {self.name} took longer than {self.timeout_s} s"
        except Exception as error:
            answer = f"error: {type(error).__name__}: {error}"
        if len(answer) > self.max_characters:
            return f"{answer[: self.max_characters]} ... ({len(answer):,} characters)"
        return answer


class ToolEnvironment:
    """An environment that runs the calls of every turn, all at once; a turn without calls is the answer and ends it.

    Args:
        messages: the first ones.
        tools: what may be called.
        parse: how calls are written.
        reward: scores the answer; None: the episode is scored elsewhere.
    """

    def __init__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        *,
        parse: CallParser = hermes_calls,
        reward: Callable[[str], float | Awaitable[float]] | None = None,
    ) -> None:
        self._messages = list(messages)
        self._tools = {tool.name: tool for tool in tools}
        self._parse = parse
        self._reward = reward

    async def reset(self) -> Opening:
        return Opening(messages=self._messages, tools=[tool.schema for tool in self._tools.values()])

    async def step(self, completion: str) -> Reply:
        calls = self._parse(completion)
        if calls:
            answers = await asyncio.gather(*(self._answer(call) for call in calls))
            named = zip(calls, answers, strict=True)
            return Reply(messages=[{"role": "tool", "name": call.name, "content": answer} for call, answer in named])
        reward = self._reward(completion) if self._reward else 0.0
        return Reply(done=True, reward=reward if isinstance(reward, int | float) else await reward)

    async def _answer(self, call: ToolCall) -> str:
        if call.error:
            return f"error: {call.error}"
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name!r}: there are {', '.join(sorted(self._tools))}"
        return await tool(call.arguments)
