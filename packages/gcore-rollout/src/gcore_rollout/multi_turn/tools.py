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
    """What is wrong with the call, if it cannot be read."""


CallParser = Callable[[str], Sequence[ToolCall]]
"""From the text of a turn to its calls; none: the turn is an answer."""


def hermes_calls(text: str) -> list[ToolCall]:
    """Calls as Hermes and Qwen write them: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""
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

    What goes wrong in a call is told to the policy, which may do better: it is no error of the run.
    """

    name: str
    description: str
    function: Callable[..., Awaitable[object]]
    """Called with the arguments by name; what it returns is told as text."""
    parameters: Mapping[str, Any]
    """JSON schema of the arguments, an object."""
    timeout_s: float = 10.0
    max_characters: int = 2_000
    """Of the answer; what is longer is cut."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates announce it."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }

    async def __call__(self, arguments: Mapping[str, Any]) -> str:
        """What the policy is told."""
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
        reward: of the answer; it may be left to what scores the episode.
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
        """See `Environment.reset`."""
        return Opening(messages=self._messages, tools=[tool.schema for tool in self._tools.values()])

    async def step(self, completion: str) -> Reply:
        """See `Environment.step`."""
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
