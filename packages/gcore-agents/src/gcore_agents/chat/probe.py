"""A check of a chat template before a run: can it continue conversations, and what does it make of earlier turns?

Random conversations are rendered as one, and compared with what `ChatEncoder.next` adds turn by turn. A template that
refuses the results of tools fails here, and not at the second turn of the first conversation.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.errors import MessageError
from gcore_agents.graph import Message

_NUM_CONVERSATIONS = 50
_MAX_TURNS = 3
_SEED = 0
_SYSTEM_SHARE = 0.5
_DOUBLE_SHARE = 0.3


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """The kinds of conversations that a chat template can render.

    Example:
        >>> from transformers import AutoTokenizer
        >>> tokenizer = AutoTokenizer.from_pretrained("model")
        >>> tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        >>> facts = check_template(ChatEncoder(tokenizer))
        >>> facts.is_append_only, facts.renders_calls
        (True, False)
    """

    is_append_only: bool
    """Whether each conversation that was tried starts with the tokens of its earlier turns as they were prompted."""
    is_consistent: bool
    """Whether it renders messages alike after any turn; DeepSeek-V3 has a mark before the first results alone."""
    opens_thought: bool
    """Whether a turn starts inside a thought."""
    ends_turns: bool
    """Whether something stands between a turn and the mark of the next message."""
    takes_system: bool
    takes_two_users: bool
    """Whether a message of the user may follow another."""
    renders_calls: bool
    renders_several_calls: bool
    renders_tool_results: bool
    renders_reasoning: bool
    """Whether the last turn has its reasoning."""
    keeps_reasoning: bool
    """Whether an earlier turn has its reasoning after a further message of the user."""
    num_checked: int
    """Turns whose continuation equals the template's own rendering."""


def check_template(
    encoder: ChatEncoder, *, tools: Sequence[Mapping[str, Any]] = (), uses_tools: bool = False
) -> TemplateFacts:
    """Return what the chat template can render, after a check that it can continue conversations.

    Args:
        tools: JSON schemas of the functions that are announced.
        uses_tools: results of tools follow turns, so that the template has to render them.

    Raises:
        MessageError: a conversation cannot be continued; the error has its messages.
    """
    return _Probe(encoder, tools, uses_tools=uses_tools or bool(tools)).run()


class _Probe:
    def __init__(
        self, encoder: ChatEncoder, tools: Sequence[Mapping[str, Any]], *, uses_tools: bool
    ) -> None:
        self._encoder = encoder
        self._tools = tools
        self._uses_tools = uses_tools
        self._random = random.Random(_SEED)
        self._num_words = 0
        self._num_checked = 0
        self._is_append_only = True
        self._is_consistent = True
        self._plain_token = encoder.encode("a")[-1]
        """Ends no turn."""

    def run(self) -> TemplateFacts:
        """Find the facts, and check random conversations of what the template renders."""
        question = _make_text("user", "gcorequestion")
        answer = _make_text("assistant", "gcoreanswer")
        thought = {**answer, "reasoning_content": "gcorethought"}
        system = _make_text("system", "gcoresystem")
        one_call = self._make_calls(1)
        call_with_thought = {**one_call, "reasoning_content": "gcorethought"}
        result = self._make_result(one_call["tool_calls"][0]["id"], "gcoreresult")
        results = [question, one_call, result]
        try:
            last_answer = self._render([question, answer], prompt=False)
        except MessageError as error:
            raise self._make_error(str(error), [question, answer]) from error
        facts = TemplateFacts(
            is_append_only=True,
            is_consistent=True,
            opens_thought=bool(self._encoder.opened_thought),
            ends_turns=not last_answer.endswith("gcoreanswer"),
            takes_system=self._can_render([system, question], "gcoresystem"),
            takes_two_users=self._can_render([question, _make_text("user", "again")], "again"),
            renders_calls=self._can_render([question, one_call], "argument0", prompt=False),
            renders_several_calls=self._can_render(
                [question, self._make_calls(2)], "argument1", prompt=False
            ),
            renders_tool_results=self._can_render(results, "gcoreresult"),
            renders_reasoning=any(
                self._can_render([question, turn], "gcorethought", prompt=False)
                for turn in (thought, call_with_thought)
            ),
            keeps_reasoning=self._can_render([question, thought, question], "gcorethought"),
            num_checked=0,
        )
        if self._uses_tools and not facts.renders_tool_results:
            self._continue(results[:1], one_call, results[2:])
            raise self._make_error("does not render results of tools", results)
        for _ in range(_NUM_CONVERSATIONS):
            self._check_conversation(facts)
        return replace(
            facts,
            is_append_only=self._is_append_only,
            is_consistent=self._is_consistent,
            num_checked=self._num_checked,
        )

    def _check_conversation(self, facts: TemplateFacts) -> None:
        messages: list[Message] = []
        if facts.takes_system and self._random.random() < _SYSTEM_SHARE:
            messages.append(_make_text("system", self._make_word()))
        messages.extend(self._make_users(facts))
        for _ in range(self._random.randint(1, _MAX_TURNS)):
            turn, further = self._make_turn(facts)
            self._check_turn(messages, turn, further)
            messages.extend([turn, *further])

    def _make_turn(self, facts: TemplateFacts) -> tuple[Message, list[Message]]:
        """Return a random turn, and messages that follow it."""
        turn: dict[str, Any] = _make_text("assistant", self._make_word())
        further: list[Message] = self._make_users(facts)
        if facts.renders_calls and facts.renders_tool_results and self._random.random() < 0.5:
            turn = self._make_calls(
                1 + (facts.renders_several_calls and self._random.random() < 0.5)
            )
            further = [
                self._make_result(call["id"], self._make_word()) for call in turn["tool_calls"]
            ]
        if facts.renders_reasoning and self._random.random() < 0.5:
            turn["reasoning_content"] = self._make_word()
        return turn, further

    def _check_turn(
        self, messages: Sequence[Message], turn: Message, further: Sequence[Message]
    ) -> None:
        """Compare what is added after a turn with the template's own rendering of the conversation."""
        conversation = [*messages, turn, *further]
        added = self._continue(messages, turn, further)
        full_ids = self._encoder.encode(self._render(conversation))
        turn_end = len(full_ids) - len(added)
        if full_ids[turn_end:] != added:
            self._check_first_turn(turn, further, added)
            return
        self._check_end_of_turn(added, turn, further, conversation)
        prompt = self._encoder.encode(self._render(messages))
        last = self._encoder.encode(self._render([*messages, turn], prompt=False))
        if full_ids[: len(prompt)] != prompt or last[:turn_end] != full_ids[:turn_end]:
            self._is_append_only = False
            return
        sampled = self._encoder.text(full_ids[len(prompt) : turn_end])
        content = turn["content"] or turn["tool_calls"][-1]["function"]["name"]
        if content not in sampled:
            raise self._make_error("has no end of a turn that can be found", conversation)
        self._num_checked += 1

    def _check_first_turn(
        self, turn: Message, further: Sequence[Message], added: list[int]
    ) -> None:
        """Check that at least after the first turn the template renders messages so."""
        conversation = [_make_text("user", "gcorequestion"), turn, *further]
        full_ids = self._encoder.encode(self._render(conversation))
        if full_ids[len(full_ids) - len(added) :] != added:
            raise self._make_error("renders messages after a turn in another way", conversation)
        self._is_append_only = False
        self._is_consistent = False

    def _check_end_of_turn(
        self,
        added: list[int],
        turn: Message,
        further: Sequence[Message],
        conversation: Sequence[Message],
    ) -> None:
        """Check that a policy that writes the first mark after its turn gets only what comes after it."""
        if not self._encoder.is_mark(added[0]):
            return
        rest = self._encoder.next(further, last_token=added[0], turn=turn, tools=self._tools)
        if rest != added[1:]:
            raise self._make_error("ends a turn twice", conversation)

    def _continue(
        self, messages: Sequence[Message], turn: Message, further: Sequence[Message]
    ) -> list[int]:
        try:
            return self._encoder.next(
                further, last_token=self._plain_token, turn=turn, tools=self._tools
            )
        except MessageError as error:
            raise self._make_error(str(error), [*messages, turn, *further]) from error

    def _make_error(self, fault: str, conversation: Sequence[Message]) -> MessageError:
        text = json.dumps(list(conversation))
        return MessageError(
            f"the chat template cannot continue conversations: {fault}; for example {text}"
        )

    def _can_render(self, messages: Sequence[Message], word: str, *, prompt: bool = True) -> bool:
        try:
            return word in self._render(messages, prompt=prompt)
        except MessageError:
            return False

    def _render(self, messages: Sequence[Message], *, prompt: bool = True) -> str:
        return self._encoder.render(messages, tools=self._tools, prompt=prompt)

    def _make_users(self, facts: TemplateFacts) -> list[Message]:
        is_double = facts.takes_two_users and self._random.random() < _DOUBLE_SHARE
        users: list[Message] = [_make_text("user", self._make_word())]
        if is_double:
            users.append(_make_text("user", self._make_word()))
        return users

    def _make_calls(self, count: int) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for number in range(count):
            arguments = {"text": f"argument{number}"}
            calls.append(
                make_call("gcorename", arguments, f"gcoreid{self._num_words % 10}{number}")
            )
        return make_turn_message("", calls=calls)

    def _make_result(self, call_id: str, text: str) -> dict[str, Any]:
        return {**_make_text("tool", text), "tool_call_id": call_id}

    def _make_word(self) -> str:
        self._num_words += 1
        return f"gcoreword{self._num_words}x"


def _make_text(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}
