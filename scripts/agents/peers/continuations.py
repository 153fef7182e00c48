"""Conversations that a peer's library continues in tokens, and rows of what comes out.

A library continues a prompt and a sampled turn with further messages. The row is ok if the result starts with both and
if its rest is what the chat template itself writes for these messages after such a turn.
"""

from collections.abc import Callable, Mapping, Sequence

from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.conformance.errors import CaseNotApplicableError
from gcore_agents.conformance.scripted import write_turn
from gcore_agents.conformance.turns import ANNOUNCED, ModelTurn, results, user
from gcore_agents.errors import MessageError
from gcore_agents.graph import Message

ADD = {"name": "add", "arguments": {"first": 1, "second": 2}}
LOOK_UP = {"name": "look_up", "arguments": {"word": "tree"}}
TURNS: Mapping[str, ModelTurn] = {
    "user after text": ModelTurn(text="the other one"),
    "user after thought": ModelTurn(text="the other one", reasoning="there is another"),
    "result after call": ModelTurn(calls=[ADD]),
    "result after text and call": ModelTurn(text="let me see", calls=[ADD]),
    "result after thought and call": ModelTurn(reasoning="there is another", calls=[ADD]),
    "two results after two calls": ModelTurn(calls=[ADD, LOOK_UP]),
}

Continue = Callable[[list[int], list[int], Message, list[Message]], "list[int] | None"]
"""Continues a prompt's tokens and a turn's with messages; None: the library renders all again."""


def check(encoder: ChatEncoder, name: str, continue_: Continue) -> str:
    """Return ``ok``, ``-`` if the template cannot write the turn, or what is wrong."""
    turn = TURNS[name]
    question = [user("where is it")]
    try:
        sampled = write_turn(encoder, turn)
        message = turn.message()
        further = [user("and then")]
        if turn.calls:
            further = results(message, *("three", "a plant")[: len(turn.calls)])
        tools = ANNOUNCED if turn.calls else ()
        prompt = encoder.first(question, tools=tools)
        expected = encoder.next(further, last_token=sampled[-1], turn=message, tools=tools)
    except (CaseNotApplicableError, MessageError):
        return "-"
    try:
        result = continue_(prompt, sampled, message, further)
    except Exception as error:  # a library may fail in any way
        return f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
    if result is None:
        return "renders again"
    path = [*prompt, *sampled]
    if result[: len(path)] != path:
        return "other tokens than sampled"
    rest = encoder.turn_text(result[len(path) :], is_ended=False)
    wanted = encoder.turn_text(expected, is_ended=False)
    return "ok" if rest == wanted else f"writes {rest!r:.60}, the template {wanted!r:.60}"


def print_rows(rows: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Print a table of templates and turns."""
    names = list(TURNS)
    print("| template |", " | ".join(names), "|")
    print("|" + "---|" * (len(names) + 1))
    for template, cells in rows:
        print(f"| {template} |", " | ".join(cells[name] for name in names), "|")
