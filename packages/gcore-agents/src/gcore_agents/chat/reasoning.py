"""The parts of a turn's text: thoughts, what is said, and messages that hold calls.

Most models write thoughts between two marks, such as <think> and </think>, before the answer. Those of gpt-oss and Muse
write a turn as several messages, each with a header that says whom it is for.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("◁think▷", "◁/think▷"),
)
"""Marks before and after a thought, of Qwen and many others, Mistral, Gemma, Command, Seed, MiniMax and Kimi-VL."""
MESSAGE = "<|message|>"
"""Stands between the header of a message and its text, in models that write several messages in a turn."""
_END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return|eom|eot|start)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

MessagePurpose = Literal["reasoning", "text", "call"]


@dataclass(frozen=True, kw_only=True)
class TurnMessage:
    """One of several messages of a turn.

    Example:
        >>> [message] = split_messages("<|channel|>final<|message|>Yes.<|return|>")
        >>> message.purpose, message.text
        ('text', 'Yes.')
    """

    header: str
    """The text before `MESSAGE`."""
    text: str

    @property
    def purpose(self) -> MessagePurpose:
        """Calls are those for a function; thoughts are for the model itself, or in the channel of analysis."""
        recipient = _RECIPIENT.search(self.header)
        if recipient is not None and recipient[1] not in ("self", "user"):
            return "call"
        if "analysis" in self.header or (recipient is not None and recipient[1] == "self"):
            return "reasoning"
        return "text"


def split_messages(text: str) -> list[TurnMessage]:
    """Return the messages of a turn; text without a header is one that has an empty one."""
    header, *rest = text.split(MESSAGE)
    if not rest:
        return [TurnMessage(header="", text=text)]
    messages: list[TurnMessage] = []
    body = ""
    for number, piece in enumerate(rest, 1):
        end = _END_OF_MESSAGE.search(piece)
        if end is None:
            body += piece
            if number < len(rest):
                # The mark is a part of the text.
                continue
        else:
            body += piece[: end.start()]
        messages.append(TurnMessage(header=header, text=body))
        body = ""
        header = piece[end.end() :] if end else ""
    return messages


def choose_thought_marks(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Return the marks that a model knows: those in its template and its special tokens, and <think>."""
    text = "\n".join(texts)
    return [
        (opening, closing)
        for opening, closing in THOUGHT_MARKS
        if opening == "<think>" or opening in text
    ]


def find_open_thought(prompt: str, marks: Sequence[tuple[str, str]]) -> str:
    """Return the mark that a prompt ends with and that opens a thought, which the turn continues; empty: none."""
    end = prompt.rstrip()
    for opening, _ in marks:
        if end.endswith(opening):
            return opening
    return ""


def split_thoughts(
    text: str, marks: Sequence[tuple[str, str]] = THOUGHT_MARKS, *, opened: str = ""
) -> tuple[str, str]:
    """Return the thoughts of a turn, and its text without them.

    Args:
        opened: the mark with which the prompt has opened a thought; see `find_open_thought`. Where it has not, but a
            thought ends before any starts, the turn starts with it all the same.
    """
    thoughts: list[str] = []
    for opening, closing in marks:
        added, text = _split_between(text, opening, closing, is_open=opening == opened)
        thoughts.extend(thought.strip() for thought in added)
    return "\n".join(thought for thought in thoughts if thought), text


def drop_thoughts(text: str) -> str:
    """Return a turn's text without thoughts in any form that is known."""
    _, answer = split_thoughts(text)
    if MESSAGE not in answer:
        return answer
    messages = [message for message in split_messages(answer) if message.purpose != "reasoning"]
    return "".join(message.header + MESSAGE + message.text for message in messages)


def _split_between(
    text: str, opening: str, closing: str, *, is_open: bool
) -> tuple[list[str], str]:
    thoughts: list[str] = []
    before_closing, mark, after_closing = text.partition(closing)
    if is_open or (mark and opening not in before_closing):
        thoughts.append(before_closing.lstrip().removeprefix(opening))
        text = after_closing
    kept: list[str] = []
    while opening in text:
        before, _, rest = text.partition(opening)
        kept.append(before)
        thought, _, text = rest.partition(closing)
        thoughts.append(thought)
    kept.append(text)
    return thoughts, "".join(kept)
