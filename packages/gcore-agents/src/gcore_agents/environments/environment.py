"""Environments in which a policy acts: the protocol, revisions after a reward's feedback, and tools."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Protocol

from gcore_agents.chat.tool_calls import ToolCall, read_calls, read_hermes
from gcore_agents.graph import Message
from gcore_agents.session import SessionEnd

EpisodeOutcome = Literal[SessionEnd, "failed", "cancelled"]
"""How an episode ended, or that it was given up: something failed in it, or the run ended."""


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The start of an episode.

    Example:
        >>> function = {"name": "days", "description": "Count the days of a month.", "parameters": {"type": "object"}}
        >>> class Calendar:
        ...     async def reset(self):
        ...         question = {"role": "user", "content": "How many days has May?"}
        ...         return Opening(messages=[question], tools=[{"type": "function", "function": function}])
        >>> asyncio.run(Calendar().reset()).messages[0]["content"]
        'How many days has May?'
    """

    messages: Sequence[Message]
    """The messages that the policy answers first."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas of the functions that the chat template announces."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ValueError("messages is empty; expected one or more at the start of an episode")


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of an environment to one turn of the policy.

    Example:
        >>> class GuessANumber:
        ...     async def step(self, completion):
        ...         if completion == "7":
        ...             return Reply(reward=1.0, done=True)
        ...         return Reply(messages=[{"role": "user", "content": "No, try again."}], reward=-0.1)
        >>> asyncio.run(GuessANumber().step("5")).reward
        -0.1
        >>> asyncio.run(GuessANumber().step("7"))
        Reply(messages=(), reward=1.0, done=True)
    """

    messages: Sequence[Message] = ()
    """Read by the policy before its next turn."""
    reward: float = 0.0
    """Reward of this turn; an episode's score is the sum."""
    done: bool = False
    """Whether the episode ends here; its messages are then not read."""

    def __post_init__(self) -> None:
        if not self.done and not self.messages:
            raise ValueError(
                "messages is empty; expected one or more in a reply that does not end the episode"
            )


class Environment(Protocol):
    """The environment of one episode. Its methods may take long: other episodes continue meanwhile.

    An environment that holds resources, such as a process or a session of a server, has a third method
    ``async def close(self, reason: EpisodeOutcome) -> None``. It is awaited once for each episode, however that ends,
    also if ``reset`` has failed.

    Example:
        >>> class Echo:
        ...     async def reset(self) -> Opening:
        ...         return Opening(messages=[{"role": "user", "content": "Say something."}])
        ...
        ...     async def step(self, completion: str) -> Reply:
        ...         return Reply(reward=float(len(completion)), done=True)
        ...
        ...     async def close(self, reason: str) -> None:
        ...         print(f"the episode is over: {reason}")
    """

    async def reset(self) -> Opening:
        """Start the episode."""
        ...

    async def step(self, completion: str) -> Reply:
        """Answer the text of one turn, which has its special tokens but for the one that ends it.

        A ``step`` with a further parameter ``truncated: bool`` is notified by it of a turn that was cut off at its
        largest number of tokens. After such a turn the episode ends, whatever the answer. One with a parameter
        ``calls: Sequence[ToolCall]`` gets the turn's calls of tools, read as the model's chat template writes them.
        """
        ...


@dataclass(eq=False)
class RevisionEnvironment:
    """Returns an answer with its reward's feedback until it is good enough (G-Core, arXiv 2507.22789).

    A turn's reward is the gain of its answer's score over the one before, so an episode's score is that of its last.
    The feedback of the reward, such as a judge's verdict, is the policy's next message; without any, that is the score.
    An answer of the score ``good_enough`` or more ends the episode.

    Example:
        >>> async def score(completion):
        ...     return float(completion == "4"), "Count again."
        >>> messages = [{"role": "user", "content": "2 + 2 ="}]
        >>> environment = RevisionEnvironment(messages, score, good_enough=1.0, max_revisions=3)
        >>> asyncio.run(environment.step("5")).messages
        [{'role': 'user', 'content': 'Count again.'}]
        >>> asyncio.run(environment.step("4"))
        Reply(messages=(), reward=1.0, done=True)
    """

    messages: Sequence[Message]
    reward: Callable[[str], Awaitable[tuple[float, str]]]
    """Returns an answer's score and the feedback on it, which may be empty."""
    _: KW_ONLY
    good_enough: float
    max_revisions: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.good_enough):
            raise ValueError(f"good_enough is {self.good_enough}; expected a finite number")
        if self.max_revisions < 1:
            raise ValueError(f"max_revisions is {self.max_revisions}; expected at least 1")
        self._num_left = self.max_revisions
        self._score = 0.0

    async def reset(self) -> Opening:
        return Opening(messages=self.messages)

    async def step(self, completion: str) -> Reply:
        score, feedback = await self.reward(completion)
        gain = score - self._score
        self._score = score
        if score >= self.good_enough or not self._num_left:
            return Reply(reward=gain, done=True)
        self._num_left -= 1
        feedback = feedback or f"The answer scores {score:.3g}."
        return Reply(messages=[{"role": "user", "content": feedback}], reward=gain)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a policy may call. A failure is reported to the policy, and is no error of the run.

    Example:
        >>> async def add(a, b):
        ...     return a + b
        >>> numbers = {"a": {"type": "number"}, "b": {"type": "number"}}
        >>> parameters = {"type": "object", "properties": numbers}
        >>> tool = Tool(name="add", description="Add two numbers.", function=add, parameters=parameters)
        >>> asyncio.run(tool({"a": 2, "b": 3}))
        '5'
        >>> asyncio.run(tool({"a": 2, "b": "3"}))
        "error: TypeError: unsupported operand type(s) for +: 'int' and 'str'"
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
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

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


@dataclass(eq=False)
class ToolEnvironment:
    """An environment that runs the calls of every turn, all at once; a turn without calls is the answer and ends it.

    So is a turn that was cut off: no further turn could read the results of its calls.

    Example:
        >>> async def shout(text):
        ...     return text.upper()
        >>> parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
        >>> tool = Tool(name="shout", description="Shout a text.", function=shout, parameters=parameters)
        >>> environment = ToolEnvironment([{"role": "user", "content": "Shout hi."}], [tool])
        >>> call = '<tool_call>{"name": "shout", "arguments": {"text": "hi"}}</tool_call>'
        >>> asyncio.run(environment.step(call)).messages
        [{'role': 'tool', 'name': 'shout', 'content': 'HI'}]
        >>> asyncio.run(environment.step("HI")).done
        True
    """

    messages: Sequence[Message]
    tools: Sequence[Tool]
    _: KW_ONLY
    parse: Callable[[str], Sequence[ToolCall]] | None = None
    """Reads the calls of a turn; None: they are read as the model's chat template writes them."""
    reward: Callable[[str], float | Awaitable[float]] | None = None
    """Scores the answer; None: the episode is scored elsewhere."""

    def __post_init__(self) -> None:
        self._by_name = {tool.name: tool for tool in self.tools}

    async def reset(self) -> Opening:
        return Opening(messages=self.messages, tools=[tool.schema for tool in self.tools])

    async def step(
        self, completion: str, truncated: bool = False, calls: Sequence[ToolCall] | None = None
    ) -> Reply:
        if not truncated:
            if self.parse is not None:
                calls = self.parse(completion)
            elif calls is None:
                calls = read_calls(completion, read_hermes)
            if calls:
                return Reply(messages=await asyncio.gather(*map(self._answer, calls)))
        if not self.reward:
            return Reply(done=True)
        reward = self.reward(completion)
        if not isinstance(reward, int | float):
            reward = await reward
        return Reply(done=True, reward=reward)

    async def _answer(self, call: ToolCall) -> Message:
        """Return the message with the result of a call."""
        if call.error:
            content = f"error: {call.error}"
        elif call.name not in self._by_name:
            content = f"error: there is no tool {call.name!r}: there are {', '.join(sorted(self._by_name))}"
        else:
            content = await self._by_name[call.name](call.arguments)
        return {"role": "tool", "name": call.name, "content": content}
