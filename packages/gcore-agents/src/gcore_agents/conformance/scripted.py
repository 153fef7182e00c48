"""An engine whose turns are written in advance, as the chat template writes them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.chat.tool_calls import count_common
from gcore_agents.conformance.errors import CaseNotApplicableError
from gcore_agents.conformance.templates import split_pairs
from gcore_agents.conformance.turns import ANNOUNCED, ModelTurn, results, user
from gcore_agents.errors import MessageError
from gcore_agents.graph import Message
from gcore_agents.sampler import SampledTokens

_QUESTION = user("question")


def write_turn(encoder: ChatEncoder, turn: ModelTurn) -> list[int]:
    """Return the tokens of a turn as the policy would sample them, with the one that ends it.

    Raises:
        CaseNotApplicableError: the chat template cannot write such a turn, or what it writes is read as another one.
    """
    message = turn.message()
    further = results(message, *["result"] * len(turn.calls)) if turn.calls else [_QUESTION]
    plain_token = encoder.encode("a")[-1]
    try:
        text = _render_turn(encoder, turn)
        end = _find_end(encoder, further, plain_token, message)
    except MessageError as error:
        raise CaseNotApplicableError(str(error)) from error
    tokens = split_pairs(encoder, encoder.encode(text.rstrip()))
    closes_call = encoder.turn_text(tokens[-1:], is_ended=False) == "</tool_call>"
    if not encoder.is_mark(tokens[-1]) or closes_call:
        marks = [token for token in end if encoder.is_mark(token)]
        tokens += marks[:1] or encoder.encode("<eos>")
    prompt = encoder.first([_QUESTION], tools=ANNOUNCED if turn.calls else ())
    read = encoder.read_turn(tokens, tools=ANNOUNCED, is_ended=True, prompt_ids=prompt)
    check_message(read, turn)
    return tokens


def _find_end(
    encoder: ChatEncoder, further: Sequence[Message], plain_token: int, turn: Message
) -> list[int]:
    """Return what follows a turn; a template that renders no results of tools ends all turns alike."""
    try:
        return encoder.next(further, last_token=plain_token, turn=turn, tools=ANNOUNCED)
    except MessageError:
        return encoder.next([_QUESTION], last_token=plain_token, tools=ANNOUNCED)


def check_message(message: Message, turn: ModelTurn) -> None:
    """Raise a `CaseNotApplicableError` if a message is not what a turn says, up to the ids of its calls."""
    expected = turn.message()
    for name in ("content", "reasoning_content"):
        if (message.get(name) or "") != (expected.get(name) or ""):
            raise CaseNotApplicableError(
                f"the template writes a turn whose {name} is read as {message.get(name)!r}; expected "
                f"{expected.get(name)!r}"
            )
    read = [call["function"] for call in message.get("tool_calls") or ()]
    written = [call["function"] for call in expected.get("tool_calls") or ()]
    if read != written:
        raise CaseNotApplicableError(
            f"the template writes calls that are read as {read}; expected {written}"
        )


def _render_turn(encoder: ChatEncoder, turn: ModelTurn) -> str:
    """Return the text of a turn after its prompt."""
    tools = ANNOUNCED if turn.calls else []
    prompt = encoder.render([_QUESTION], tools=tools)
    message = turn.message()
    text = encoder.render([_QUESTION, message], tools=tools, prompt=False)
    if text.startswith(prompt) and turn.reasoning in text:
        return text[len(prompt) :]
    opened = encoder.opened_thought
    if not opened:
        return _drop_prompt(encoder, prompt, text)
    # The template leaves the reasoning out, or the mark that its prompt opens.
    message.pop("reasoning_content", None)
    text = encoder.render([_QUESTION, message], tools=tools, prompt=False)
    close = opened.replace("<", "</", 1)
    answer = _drop_prompt(encoder, prompt, text)
    answer = answer.rpartition(close)[2].lstrip()
    return f"{turn.reasoning}\n{close}\n\n{answer}"


def _drop_prompt(encoder: ChatEncoder, prompt: str, text: str) -> str:
    """Return a text without what it starts with as a prompt does; marks are not cut in pieces."""
    tokens = encoder.encode(text)
    num_common = count_common(encoder.encode(prompt), tokens)
    return encoder.turn_text(tokens[num_common:], is_ended=False)


@dataclass(frozen=True, kw_only=True)
class EngineCall:
    """A prompt that an engine was given, and the turn that it gave.

    Example:
        >>> EngineCall(prompt_ids=(4, 5), token_ids=(6, 1)).token_ids
        (6, 1)
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(kw_only=True)
class ScriptedEngine:
    """Gives one turn after the other, and records its calls; the last turn is given again and again.

    Example:
        >>> engine = ScriptedEngine(encoder=None, turns=[[6, 7, 1]])
        >>> asyncio.run(engine.sample([4], session="a", seed=0, max_tokens=2)).finish_reason
        'length'
        >>> engine.calls
        [EngineCall(prompt_ids=(4,), token_ids=(6, 7))]
    """

    encoder: ChatEncoder | None
    """Finds stop strings; None: there are none."""
    turns: Sequence[Sequence[int]]
    delay_s: float = 0.0
    calls: list[EngineCall] = field(default_factory=list[EngineCall])

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        **options: Any,
    ) -> SampledTokens:
        """Give the next turn, up to a stop string or its most tokens."""
        del options
        turn = list(self.turns[min(len(self.calls), len(self.turns) - 1)])
        length = self._find_stop(turn, stop)
        finish_reason = "stop" if length <= max_tokens else "length"
        turn = turn[: min(length, max_tokens)]
        self.calls.append(EngineCall(prompt_ids=tuple(prompt_ids), token_ids=tuple(turn)))
        version = len(self.calls)
        await asyncio.sleep(self.delay_s)
        return SampledTokens(
            token_ids=turn,
            log_probs=[-0.5 - position / 100 for position in range(len(turn))],
            weight_versions=[version] * len(turn),
            finish_reason=finish_reason,
        )

    def _find_stop(self, turn: Sequence[int], stop: Sequence[str]) -> int:
        """Return how many tokens of a turn there are up to the end of its first stop string."""
        if self.encoder is None or not stop:
            return len(turn)
        for length in range(1, len(turn)):
            text = self.encoder.turn_text(turn[:length], is_ended=False)
            if any(string in text for string in stop):
                return length
        return len(turn)
