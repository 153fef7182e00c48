"""A session: one agent's work on one task, its calls, budgets and rewards."""

import asyncio
import hashlib
import json
import marshal
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.chat.images import list_images
from gcore_agents.errors import CallError, MessageError
from gcore_agents.graph import Message, MessageGraph, MessageNode
from gcore_agents.sampler import SessionClock, TokenSampler

History = Literal["sampled", "template", "tool_cycle"]
"""The form in which the policy sees its earlier turns: the tokens that it sampled, with their reasoning; as the chat
template renders them now; or the first until the next message of the user, and then the second."""
SessionEnd = Literal["done", "truncated_turn", "length", "max_turns", "timeout"]
"""The agent ended it; its last turn was cut off before its end; its tokens were used up, or its turns, or its time."""
SessionStatus = Literal["completed", "failed", "truncated"]
"""The outcome of an agent's work, as its runner says when it closes the session."""

_AGENT_NAME = re.compile(r"[\w.-]{0,64}", re.ASCII)
_BUDGET_TEXT = "The budget of this session is used up. Stop here and give your final answer."


@dataclass(frozen=True, kw_only=True)
class SessionBudget:
    """The limits of a session; the call that would exceed it is answered by a text that ends the agent's loop.

    Example:
        >>> SessionBudget(max_tokens=4096, max_calls=20).max_context
        0
    """

    max_tokens: int
    """Most tokens in all of its conversations, without those of the first call's messages."""
    max_calls: int = 0
    """Most turns; 0: any number."""
    max_tokens_per_turn: int = 0
    """0: what is left."""
    max_context: int = 0
    """Longest conversation that the model takes; 0: no limit of its own."""
    timeout_s: float = 0.0
    """From its first call; 0: any time."""


@dataclass(frozen=True, kw_only=True)
class SessionReward:
    """A reward of a session, of one of its agents, or of a turn.

    Example:
        >>> SessionReward(value=1.0).response_id
        ''
    """

    value: float
    response_id: str = ""
    """The turn; empty: all of the session's, or of the agent's."""
    agent: str = ""
    """Name of the agent; empty: the turn's, or all agents that have no reward of their own."""
    name: str = "reward"


@dataclass(kw_only=True, eq=False)
class Session:
    """The graph of one agent's calls, and what answers them.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        >>> class Yes:
        ...     async def sample(self, prompt_ids, *, session, seed, max_tokens, stop=()):
        ...         numbers = {"log_probs": [-0.1], "weight_versions": [0]}
        ...         return SampledTokens(token_ids=tokenizer("1")["input_ids"], finish_reason="stop", **numbers)
        >>> budget = SessionBudget(max_tokens=64)
        >>> session = Session(session_id="a", sampler=Yes(), encoder=ChatEncoder(tokenizer), budget=budget)
        >>> replies = asyncio.run(session.respond(ChatCall(messages=[{"role": "user", "content": "1 + 1?"}])))
        >>> len(replies), len(session.graph.nodes)
        (1, 2)
    """

    session_id: str
    sampler: TokenSampler
    encoder: ChatEncoder
    budget: SessionBudget
    history: History = "sampled"
    seed: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a turn, besides those of a call."""
    key: str = field(default_factory=lambda: f"sk-{secrets.token_urlsafe(24)}", repr=False)
    """The agent authorizes itself with it."""
    clock: SessionClock = field(default_factory=SessionClock)

    def __post_init__(self) -> None:
        self.graph = MessageGraph()
        self.rewards: list[SessionReward] = []
        self.agents: set[str] = set()
        """Names of the agents that have called."""
        self.end: SessionEnd | None = None
        """Why it is to end; None: the agent may continue."""
        self.status: SessionStatus | None = None
        """How it was closed; None: it is open."""
        self.unused: dict[str, object] = {}
        """Sampling parameters that the agent has sent, and that the run's replace."""
        self.last_call_s = time.monotonic()
        self.last_error = ""
        """Why the last call that was refused was; empty: none was."""
        self._start_s: float | None = None
        """Time of the first call."""
        self.kept_responses: set[str] = set()
        """Turns of a call that asked for several at once, all of which count."""
        self._num_calls = 0
        self._num_started: Counter[int] = Counter()
        """Turns that were started after a node, by its number."""
        self._announced: dict[tuple[int, str], bool] = {}
        """Whether the first node of a conversation, by its number, is rendered with these tools."""
        self._first_prompt: int | None = None
        self._replies: dict[str, asyncio.Task[list[ChatReply]]] = {}
        self._answers: set[asyncio.Task[list[ChatReply]]] = set()
        """Tasks that are not finished."""
        self._num_waiting: Counter[str] = Counter()
        """Callers that wait for a reply, by its key."""
        self._asked_at_once: set[str] = set()
        self._delivered: set[str] = set()
        self._num_reserved = 0
        """Most tokens of the turns that are being sampled."""
        self._turn_ended = asyncio.Condition()

    async def respond(self, call: ChatCall) -> list[ChatReply]:
        """Answer a call with ``call.n`` turns.

        A call gets the reply of an earlier one with the same content if it says that it repeats it, or if that reply
        was not delivered and no call waits for it. Equal calls at once are answered one by one, as with ``n``.

        Raises:
            CallError: the call cannot be answered; the session stays open.
        """
        self._check_open()
        if not _AGENT_NAME.fullmatch(call.agent):
            raise CallError(
                f"agent is {call.agent!r:.80}; expected a name of up to 64 letters, digits, '_', '-' and '.'",
                field="agent",
            )
        if call.agent:
            self.agents.add(call.agent)
        self.last_call_s = time.monotonic()
        if self._start_s is None:
            self._start_s = self.clock.now_s()
        key = call.retry_key or _digest(call)
        task = self._replies.get(key)
        is_marked = bool(call.retry_key) or call.is_retry
        if not is_marked and self._num_waiting[key]:
            self._asked_at_once.add(key)
            task = None
        if task is None or _has_failed(task) or (self._is_delivered(task) and not is_marked):
            task = asyncio.create_task(self._answer(call))
            task.add_done_callback(_has_failed)
            task.add_done_callback(self._answers.discard)
            self._answers.add(task)
            self._replies[key] = task
        self._num_waiting[key] += 1
        try:
            # A client that goes away does not end the turn, which its retry asks for.
            replies = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                self._check_open()
            raise
        finally:
            self._num_waiting[key] -= 1
        if key in self._asked_at_once:
            self.kept_responses |= {reply.response_id for reply in replies}
        return replies

    def close(self, status: SessionStatus = "completed") -> None:
        """Answer no further call, and end those that are being answered; a second close changes nothing."""
        if self.status is not None:
            return
        self.status = status
        for task in self._answers:
            task.cancel()

    @property
    def is_closed(self) -> bool:
        return self.status is not None

    def _check_open(self) -> None:
        if self.is_closed:
            raise CallError("the session is closed", status=409, code="session_closed")

    def _is_delivered(self, task: "asyncio.Task[list[ChatReply]]") -> bool:
        if not task.done():
            return False
        return all(reply.response_id in self._delivered for reply in task.result())

    async def _answer(self, call: ChatCall) -> list[ChatReply]:
        self.unused |= call.unused
        context = await self._add_context(call)
        prompt_ids = context.path_tokens()
        samples = [self._sample(call, context, prompt_ids) for _ in range(call.n)]
        turns = [asyncio.create_task(sample) for sample in samples]
        try:
            replies = list(await asyncio.gather(*turns))
        finally:
            # If one has failed, none of the others is wanted.
            for turn in turns:
                turn.cancel()
        if call.n > 1:
            self.kept_responses |= {reply.response_id for reply in replies}
        self.last_call_s = time.monotonic()
        return replies

    def mark_delivered(self, replies: Sequence[ChatReply]) -> None:
        """Record that the agent got all of these replies; turns that it did not get are not trained on."""
        for reply in replies:
            self._delivered.add(reply.response_id)
            turn = self.graph.find_turn(reply.response_id)
            if turn is not None:
                turn.is_delivered = True

    def find_turn(self, response_id: str) -> MessageNode:
        """Return the turn of this name; `CallError` if there is none."""
        turn = self.graph.find_turn(response_id)
        if turn is None:
            raise CallError(
                f"response_id is {response_id!r}; expected that of a response of this session",
                status=404,
                field="response_id",
            )
        return turn

    def turn_text(self, response_id: str) -> str:
        """Return the text of a turn with its special tokens, but for the one that ends it."""
        node = self.find_turn(response_id)
        stop = self.stop
        if node.stop_string:
            stop = (*stop, node.stop_string)
        return self.encoder.turn_text(
            node.token_ids, stop=stop, is_ended=node.finish_reason == "stop"
        )

    def add_reward(self, reward: SessionReward) -> None:
        """Add a reward; `CallError` if it is not finite, or of no turn or agent of this session."""
        value: Any = reward.value
        if isinstance(value, np.number):
            value = value.item()
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise CallError(
                f"value of {reward.name!r} is {value!r:.80}; expected a finite number",
                field="value",
            )
        agents = self.agents
        agent = reward.agent
        if reward.response_id:
            agents = {self.find_turn(reward.response_id).agent}
            agent = agent or next(iter(agents))
        if agent and agent not in agents:
            names = ", ".join(sorted(agents)) or "none, because no call named its agent"
            raise CallError(f"agent is {agent!r}; expected one of: {names}", field="agent")
        self.rewards.append(replace(reward, value=float(value), agent=agent))

    @property
    def score(self) -> float | None:
        """The sum of all rewards; None: there is none, so the session is not scored."""
        if not self.rewards:
            return None
        return sum(reward.value for reward in self.rewards)

    def agent_score(self, agent: str) -> float | None:
        """Return the sum of an agent's rewards; without any that of the whole session's, and None without these."""
        values = [reward.value for reward in self.rewards if reward.agent == agent]
        if not values:
            values = [r.value for r in self.rewards if not (r.agent or r.response_id)]
        return sum(values) if values else None

    @property
    def num_used_tokens(self) -> int:
        """Tokens of all nodes, without those of the first call's messages."""
        return self.graph.num_tokens - (self._first_prompt or 0)

    def count_tokens(self, call: ChatCall) -> int:
        """Return the number of tokens that a call's messages would have, without adding them to the graph."""
        return len(self.list_prompt_tokens(call))

    def list_prompt_tokens(self, call: ChatCall) -> list[int]:
        """Return the tokens of the prompt that a call would have."""
        node, _, added = self._find(call, counts=False)
        return [*node.path_tokens(), *added]

    def _find(
        self, call: ChatCall, *, counts: bool
    ) -> tuple[MessageNode, Sequence[Message], list[int]]:
        """Return the node that a call continues, its further messages, and the tokens of the prompt after the node's.

        With ``counts``, what began a branch is counted in the graph's findings, and a turn that is continued has been
        delivered.
        """
        graph = self.graph
        if call.prompt_ids:
            node = graph.find_tokens(call.prompt_ids)
            if node.num_images:
                raise CallError(
                    "prompt continues messages with images; expected tokens of text, which say what they are",
                    field="prompt",
                )
            if counts:
                self._mark_continued(node)
            return node, [], list(call.prompt_ids[node.num_tokens :])
        messages = call.messages
        node, position = graph.find(messages, partial(self._has_tools, call), agent=call.agent)
        if counts:
            self._mark_continued(node)
        further = messages[position:]
        if not further and not node.is_turn:
            return node, [], []
        if not further or messages[-1]["role"] == "assistant":
            raise CallError(
                "messages end with one of the assistant; expected one to answer", field="messages"
            )
        has_new_turns = any(message["role"] == "assistant" for message in further)
        is_sampled = self.history == "sampled" or (
            self.history == "tool_cycle" and all(m["role"] == "tool" for m in further)
        )
        try:
            if node.is_turn and is_sampled and not has_new_turns:
                added = self.encoder.next(
                    further,
                    last_token=node.token_ids[-1] if node.token_ids else -1,
                    turn=node.messages[0],
                    tools=call.tools,
                    num_images=node.num_images,
                )
                return node, further, added
            prompt_ids = self.encoder.first(messages, tools=call.tools)
        except MessageError as error:
            raise CallError(str(error), field="messages") from error
        last = graph.find_prefix(node, prompt_ids)
        if counts and graph.nodes:
            if last is not node:
                graph.findings["history_rendered"] += not has_new_turns and node.is_turn
            if not node.is_turn or has_new_turns:
                graph.count_fork(node, further)
        num_messages = sum(len(ancestor.messages) for ancestor in last.path())
        return last, messages[num_messages:], prompt_ids[last.num_tokens :]

    def _mark_continued(self, node: MessageNode) -> None:
        """Record that the agent got a turn which it continues, however its connection has ended."""
        if node.is_turn:
            self._delivered.add(node.response_id)
            node.is_delivered = True

    async def _add_context(self, call: ChatCall) -> MessageNode:
        """Return the node that the turns of a call follow; it is added to the graph if it is new."""
        node, further, added = self._find(call, counts=True)
        await self._wait_for_tokens(len(added))
        num_prompt = node.num_tokens + len(added)
        limit = self.budget.max_context
        if limit and num_prompt >= limit:
            self._stop("length")
        if self._is_over(len(added)):
            return node
        if not further and not added:
            return node
        if self._first_prompt is None:
            self._first_prompt = num_prompt
        image_starts: list[int] = []
        if list_images(further):
            image_starts = self.encoder.find_images(added)
        context = self.graph.add_context(node, further, added, image_starts=image_starts)
        if node is self.graph.root:
            self._announced[context.number, _write_tools(call)] = True
        return context

    def _has_tools(self, call: ChatCall, first: MessageNode) -> bool:
        """Return whether a conversation that starts with a node announces a call's tools, or none where they differ."""
        key = (first.number, _write_tools(call))
        if key not in self._announced:
            try:
                prompt_ids = self.encoder.first(first.messages, tools=call.tools)
            except MessageError:
                prompt_ids = []
            self._announced[key] = prompt_ids == list(first.token_ids)
        return self._announced[key]

    def _stop(self, end: SessionEnd) -> None:
        self.end = self.end or end

    def _is_over(self, num_new_tokens: int) -> bool:
        """Return whether the session has nothing left for a turn after so many new tokens."""
        budget = self.budget
        if self._first_prompt is not None and (
            self.num_used_tokens + num_new_tokens >= budget.max_tokens
        ):
            self._stop("length")
        if budget.max_calls and self._num_calls >= budget.max_calls:
            self._stop("max_turns")
        now_s = self.clock.now_s()
        if budget.timeout_s and now_s - (self._start_s or now_s) > budget.timeout_s:
            self._stop("timeout")
        return self.end is not None

    async def _sample(
        self, call: ChatCall, context: MessageNode, prompt_ids: Sequence[int]
    ) -> ChatReply:
        stop = (*self.stop, *call.stop)
        max_tokens = await self._reserve(call, context)
        if not max_tokens:
            return self._final_reply(context)
        self._num_calls += 1
        options: dict[str, Any] = {}
        if context.num_images:
            images, image_starts = context.path_images()
            options = {"images": images, "image_starts": image_starts}
        start_s = self.clock.now_s()
        try:
            sampled = await self.sampler.sample(
                prompt_ids,
                session=self.session_id,
                seed=self._make_seed(context),
                max_tokens=max_tokens,
                stop=stop,
                **options,
            )
        finally:
            await self._release(max_tokens)
        is_ended = sampled.finish_reason == "stop"
        message = self.encoder.read_turn(
            sampled.token_ids,
            tools=call.tools,
            stop=stop,
            is_ended=is_ended,
            prompt_ids=prompt_ids,
        )
        stop_string = ""
        if is_ended:
            stop_string = _cut_at_stop(message, call.stop)
        finish_reason = "stop" if is_ended else "length"
        if is_ended and message.get("tool_calls"):
            finish_reason = "tool_calls"
        response_id = f"resp_{secrets.token_hex(12)}"
        experts = sampled.routed_experts
        if experts is not None:
            experts = experts[context.num_routed :]
        self.graph.add_turn(
            context,
            message,
            token_ids=sampled.token_ids,
            log_probs=sampled.log_probs,
            weight_versions=sampled.weight_versions,
            routed_experts=experts,
            finish_reason=sampled.finish_reason,
            response_id=response_id,
            stop_string=stop_string,
            agent=call.agent,
            start_s=start_s,
            end_s=self.clock.now_s(),
        )
        return ChatReply(
            response_id=response_id,
            message=message,
            finish_reason=finish_reason,
            prompt_tokens=context.num_tokens,
            stop_string=stop_string,
            token_ids=sampled.token_ids,
            log_probs=sampled.log_probs,
            created_s=int(time.time()),
        )

    def _make_seed(self, context: MessageNode) -> int:
        """Return a seed by the place of a turn: in a session of one conversation, by its number there."""
        number = self._num_started[context.number]
        self._num_started[context.number] += 1
        num_turns = context.num_turns
        if context.depth == len(self.graph.nodes) and not number:
            return hash((self.seed, num_turns))
        return hash((self.seed, num_turns, context.number, number))

    async def _reserve(self, call: ChatCall, context: MessageNode) -> int:
        """Reserve the tokens of a turn, and return how many it may have; 0: the session's budget is used up.

        Turns at once have what is left for all of them: without a limit for each, one waits for the other.
        """
        budget = self.budget
        async with self._turn_ended:
            while not self._is_over(0):
                num_left = budget.max_tokens - self.num_used_tokens - self._num_reserved
                limits = [num_left, budget.max_tokens_per_turn or num_left]
                if call.max_tokens is not None:
                    limits.append(call.max_tokens)
                if budget.max_context:
                    limits.append(budget.max_context - context.num_tokens)
                if num_left > 0:
                    self._num_reserved += min(limits)
                    return min(limits)
                await self._turn_ended.wait()
        return 0

    async def _wait_for_tokens(self, num_new: int) -> None:
        """Wait while so many new tokens of messages fit, but not next to the turns that are being sampled."""
        async with self._turn_ended:
            while True:
                num_left = self.budget.max_tokens - self.num_used_tokens - num_new
                if not 0 < num_left <= self._num_reserved:
                    return
                await self._turn_ended.wait()

    async def _release(self, num_tokens: int) -> None:
        async with self._turn_ended:
            self._num_reserved -= num_tokens
            self._turn_ended.notify_all()

    def _final_reply(self, context: MessageNode) -> ChatReply:
        """Return a text that ends the agent's loop. It is not empty, or clients ask again; no turn is recorded."""
        return ChatReply(
            response_id=f"resp_{secrets.token_hex(12)}",
            message={"role": "assistant", "content": _BUDGET_TEXT},
            finish_reason="stop",
            prompt_tokens=context.num_tokens,
            created_s=int(time.time()),
        )


def _cut_at_stop(message: dict[str, Any], stop: Sequence[str]) -> str:
    """Cut a turn's content where the first of these strings starts, and return that string; empty: there is none."""
    content: str = message["content"]
    hits = [(content.index(string), string) for string in stop if string in content]
    if not hits:
        return ""
    position, string = min(hits)
    message["content"] = content[:position]
    return string


def _has_failed(task: "asyncio.Task[list[ChatReply]]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _write_tools(call: ChatCall) -> str:
    return json.dumps([dict(tool) for tool in call.tools], default=str)


def _digest(call: ChatCall) -> str:
    """Return a digest that is equal for calls with the same body."""
    lists = {"messages": list(call.messages), "tools": list(call.tools)}
    fields = vars(replace(call, is_retry=False, unused={}, options={})) | lists
    try:
        # Seven times faster than JSON; in version 2 the bytes depend on the values alone.
        written = marshal.dumps(fields, 2)
    except ValueError:
        written = json.dumps(fields, default=str).encode()
    return hashlib.sha256(written).hexdigest()
