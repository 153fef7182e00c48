"""Calls of tools in the text of a turn, read as the model's chat template writes them.

The template renders a call whose name and arguments are known. Where these stand in its text says how to read others,
in one of five forms: a JSON object for each call (Hermes, Qwen3, Llama 3.1, Mistral); a name and then JSON (DeepSeek,
Kimi, gpt-oss); a name and an element for each argument (GLM, Qwen3.5, Nemotron, MiniMax); a name and an object whose
strings have quotes of their own (Gemma 4); a list of Python's calls (LFM2).
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from gcore_agents.chat.json_values import STRICT_DECODER, is_deeper
from gcore_agents.chat.messages import make_call, make_turn_message
from gcore_agents.chat.reasoning import drop_thoughts
from gcore_agents.errors import MessageError

Properties: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schemas of a tool's arguments, by name."""

_NAME = "gcorename"
_ARGUMENTS = {"gcorekeya": "gcorevaluea", "gcorekeyb": "gcorevalueb"}
_ANSWER = "zzanswer"
"""A text that starts otherwise than calls."""
_CALL_ID = "gcoreid01"
"""Nine characters, as in Mistral's ids."""
_NAMED_ID = f"functions.{_NAME}:0"
"""Kimi's ids hold the name, which it writes nowhere else."""
_MARK = re.compile(r"<\W?[^<>\s]+\W?>|\[[A-Z_]+\]")
_FIRST_MARK = re.compile(rf"\A(?:{_MARK.pattern})")
_WORDS = {"True": True, "False": False, "None": None}
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:]+)\s*:")
_NAMES = r"[\w./-]++"

_MAX_DEPTH = 64
"""Deepest nesting of arguments; an agent could not send deeper ones back."""
_FAULTS = (ValueError, RecursionError, MemoryError)
"""Errors of parsers for text that is malformed or nested too deeply."""


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One call that a turn holds.

    Example:
        >>> [call] = read_hermes('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', {})
        >>> call.name, call.arguments
        ('add', {'a': 1})
    """

    name: str
    arguments: Mapping[str, Any]
    error: str = ""
    """Why the call cannot be read; empty: it can."""
    call_id: str = field(default="", compare=False)
    """Id that the policy has written; empty: none."""
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    """Start and end in the text. Calls of one list have the span of the list."""


ReadCalls: TypeAlias = Callable[[str, Mapping[str, Properties]], list[ToolCall]]
"""Reads the calls of a text; the second argument has the properties of each tool."""


@dataclass(frozen=True, kw_only=True)
class CallForm:
    """The form in which a chat template writes calls."""

    read: ReadCalls
    before: tuple[str, ...] = ()
    """Marks and words that may stand before a call, around all calls or each of them."""
    after: tuple[str, ...] = ()
    takes_json: bool = False
    """Whether the template takes arguments as JSON, and not as a mapping."""
    has_named_ids: bool = False
    """Whether ids are as Kimi's: functions.NAME:NUMBER."""


def index_properties(tools: Sequence[Mapping[str, Any]]) -> dict[str, Properties]:
    """Return the JSON schemas of arguments by the name of the tool."""
    properties: dict[str, Properties] = {}
    for tool in tools:
        function = tool.get("function") or tool
        parameters = function.get("parameters") or {}
        properties[str(function.get("name"))] = parameters.get("properties") or {}
    return properties


def read_calls(
    turn: str, read: ReadCalls, tools: Sequence[Mapping[str, Any]] = ()
) -> list[ToolCall]:
    """Return the calls of a turn with its special tokens.

    What stands in its thoughts is no call, also where the chat template has opened them, or nothing closes them.

    Args:
        read: of a `CallForm`.
        tools: JSON schemas of the functions. In some forms they alone say whether 5 is a text or a number.
    """
    return read(drop_thoughts(turn), index_properties(tools))


def remove_calls(text: str, calls: Sequence[ToolCall], form: CallForm) -> str:
    """Return a text without its calls and what stands around them; those that cannot be read stay in it."""
    spans = sorted({call.span for call in calls if not call.error})
    kept: list[str] = []
    position = 0
    for start, end in spans:
        kept.append(_remove_end(text[position:start], form.before))
        position = _skip_start(text, end, form.after)
    kept.append(text[position:])
    pieces = [piece.strip() for piece in kept]
    return "\n".join(piece for piece in pieces if piece)


def _remove_end(text: str, pieces: Sequence[str]) -> str:
    """Return a text without any of these pieces at its end, or space between them."""
    while True:
        text = text.rstrip()
        piece = next((piece for piece in pieces if text.endswith(piece)), "")
        if not piece:
            return text
        text = text.removesuffix(piece)


def _skip_start(text: str, position: int, pieces: Sequence[str]) -> int:
    """Return the position after any of these pieces, and space between them."""
    while True:
        position = _skip_space(text, position)
        piece = next((piece for piece in pieces if text.startswith(piece, position)), "")
        if not piece:
            return position
        position += len(piece)


def find_call_form(render: Callable[[list[dict[str, Any]]], str]) -> CallForm:
    """Return how a chat template writes calls; if it writes none, the form of Hermes.

    ``render`` applies the template to messages, and raises a `MessageError` for those that the template refuses. A form
    is only taken if the template's own call is read in it.
    """
    question = {"role": "user", "content": "?"}
    try:
        answer = render([question, {"role": "assistant", "content": _ANSWER}])
    except MessageError:
        return HERMES
    for call_id in (_CALL_ID, _NAMED_ID):
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            turn = make_turn_message("", calls=[make_call(_NAME, arguments, call_id)])
            try:
                text = _cut_turn(render([question, turn]), answer)
            except MessageError:
                continue
            # Where arguments are expected as JSON, a mapping is refused, or written as Python does.
            if _NAME not in text or repr(_ARGUMENTS) in text:
                continue
            if not all(key in text for key in _ARGUMENTS):
                continue
            read = _json_form(text) or _element_form(text)
            calls = read(text, {}) if read is not None else []
            if read is not None and calls == [_EXPECTED]:
                start, end = calls[0].span
                return CallForm(
                    read=read,
                    before=_split_pieces(text[:start]),
                    after=_split_pieces(text[end:]),
                    takes_json=arguments is not _ARGUMENTS,
                    has_named_ids=call_id == _NAMED_ID,
                )
    return HERMES


def _split_pieces(text: str) -> tuple[str, ...]:
    """Return the marks and words of a text, without any twice."""
    words = _MARK.sub(lambda mark: f" {mark[0]} ", text).split()
    return tuple(dict.fromkeys(words))


def _cut_turn(text: str, answer: str) -> str:
    """Return what a conversation with a call has that the same one with an answer does not have."""
    start = count_common(text, answer)
    for mark in _MARK.finditer(text):
        if mark.start() < start < mark.end():
            start = mark.start()
    return text[start:].removesuffix(answer.rpartition(_ANSWER)[2])


def count_common(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of entries that both start with."""
    count = 0
    while first[count : count + 1] == second[count : count + 1] and count < len(first):
        count += 1
    return count


def _json_form(text: str) -> ReadCalls | None:
    """Return how to read calls whose arguments are JSON, as in this text; None: they are not."""
    for brace in re.finditer(r"\{", text):
        try:
            value, end = STRICT_DECODER.raw_decode(text, brace.start())
        except json.JSONDecodeError:
            continue
        if value == _ARGUMENTS:
            before, name, between = text[: brace.start()].rpartition(_NAME)
            marks = _MARK.findall(between)
            # gpt-oss writes other words between the two than its template does.
            middle = "[^{}]{0,200}?" + re.escape(marks[-1]) if marks else _flexible(between)
            opening = _flexible(_last_line(before))
            if not name or not opening:
                return None
            pattern = rf"{opening}\s*({_NAMES})(:\d+)?{middle}\s*(?=\{{)"
            return partial(_read_named, re.compile(pattern))
        keys = {json.dumps(entry): key for key, entry in value.items()}
        name_key = keys.get(json.dumps(_NAME))
        arguments_key = keys.get(json.dumps(_ARGUMENTS))
        if name_key and arguments_key:
            opening = _last_line(text[: brace.start()]).removesuffix("[")
            closing = _MARK.match(text[end:].lstrip("] \n"))
            return _make_object_reader(
                opening, closing.group() if closing else "", name_key, arguments_key
            )
    return None


def _element_form(text: str) -> ReadCalls | None:
    """Return how to read calls whose arguments stand one by one, as in this text; None: no mark begins them."""
    (key, value), (next_key, next_value) = _ARGUMENTS.items()
    before, _, after_name = text.partition(key)[0].rpartition(_NAME)
    to_value, _, rest = text.partition(key)[2].partition(value)
    between, _, rest = rest.partition(next_key)
    rest = rest.partition(next_value)[2]
    opening = _last_line(before)
    marks = _MARK.findall(rest)
    if after_name.startswith("("):
        closing = marks[0] if marks else ""
        return partial(_read_marked, opening.removesuffix("["), closing, "Python", _parse_python)
    if not opening:
        return None
    name = rf"{_flexible(opening)}\s*({_NAMES})"
    for quote in marks[:1]:
        if len(marks) > 1 and to_value.endswith(quote) and between.startswith(quote):
            return partial(_read_quoted, re.compile(rf"{name}(?=\{{)"), quote, marks[1])
    to_key = between[len(between) - count_common(after_name[::-1], between[::-1]) :]
    to_key = to_key[max(to_key.find("<"), 0) :]
    end_of_value = between.removesuffix(to_key)
    if not to_key or not to_value or not end_of_value:
        return None
    pieces = [re.compile(_flexible(piece)) for piece in (to_key, to_value, end_of_value)]
    end_of_call = rest.strip().removeprefix(end_of_value.strip()).split()
    return partial(
        _read_elements,
        re.compile(name + _flexible(after_name.removesuffix(to_key))),
        pieces,
        end_of_call[0] if end_of_call else "",
    )


def _last_line(text: str) -> str:
    """Return the last line with text, from its last mark on."""
    lines = text.strip().splitlines()
    if not lines:
        return ""
    line = lines[-1]
    marks = list(_MARK.finditer(line))
    return line[marks[-1].start() :] if marks else line


def _flexible(text: str) -> str:
    """Return the pattern of a text, in which any space stands for its spaces but at its ends, where a line may end."""
    words = list(map(re.escape, text.split()))
    start = r"\n?" if text[:1].isspace() else ""
    end = r"\n?" if words and text[-1:].isspace() else ""
    return start + r"\s*".join(words) + end


def _make_call(name: object, arguments: object) -> ToolCall:
    if not (isinstance(name, str) and isinstance(arguments, dict)):
        return _make_error("a call is an object with a name and an object of arguments")
    entries: dict[str, Any] = arguments
    if is_deeper(entries, _MAX_DEPTH):
        return _make_error(f"the arguments are nested more than {_MAX_DEPTH} levels deep")
    try:
        # Lone surrogates and infinite numbers cannot be sent to an agent.
        json.dumps([name, entries], allow_nan=False, ensure_ascii=False).encode()
    except _FAULTS as error:
        return _make_error(f"the arguments cannot be sent: {error}")
    return ToolCall(name=name, arguments=entries)


def _make_error(error: str, name: str = "") -> ToolCall:
    return ToolCall(name=name, arguments={}, error=error)


def _read_marked(
    opening: str,
    closing: str,
    language: str,
    parse: Callable[[str], tuple[list[ToolCall], int]],
    text: str,
    tools: Mapping[str, Properties],
) -> list[ToolCall]:
    """Read calls between two marks; without the first the text is one call, whose end needs no mark."""
    del tools
    opening_length = len(opening)
    if opening:
        starts = [match.start() for match in re.finditer(re.escape(opening), text)]
    else:
        # Llama 3.1 may write <|python_tag|> before a call, which its template does not.
        first_mark = _FIRST_MARK.match(text)
        opening_length = first_mark.end() if first_mark else 0
        starts = [0]
    calls: list[ToolCall] = []
    for start, body_end in pairwise([*starts, len(text)]):
        body_start = start + opening_length
        body = text[body_start:body_end]
        content, mark, _ = body.partition(closing) if closing else (body, "", "")
        if mark != closing:
            # It was cut off.
            continue
        try:
            parsed, length = parse(content)
        except (SyntaxError, TypeError, *_FAULTS) as error:
            if opening:
                calls.append(_make_error(f"the call is not {language}: {error}"))
            continue
        span = (start, body_start + length + len(mark))
        calls.extend(replace(call, span=span) for call in parsed)
    return calls


def _parse_objects(
    name_key: str, arguments_key: str, content: str, *, is_call: bool, is_whole: bool
) -> tuple[list[ToolCall], int]:
    """Return the calls of a JSON object or a list of them, and how many characters they take.

    If it ``is_call``, objects of another form are errors; otherwise they are no calls. If it ``is_whole``, there is
    nothing else in the content.
    """
    value: Any
    if is_whole:
        value = STRICT_DECODER.decode(content)
        length = len(content)
    else:
        value, length = STRICT_DECODER.raw_decode(content, _skip_space(content, 0))
    calls: list[ToolCall] = []
    for call in value if isinstance(value, list) else [value]:
        entries: Any = call if isinstance(call, dict) else {}
        if is_call or (name_key in entries and arguments_key in entries):
            calls.append(_make_call(entries.get(name_key), entries.get(arguments_key, {})))
    return calls, length


def _make_object_reader(opening: str, closing: str, name_key: str, arguments_key: str) -> ReadCalls:
    parse = partial(
        _parse_objects,
        name_key,
        arguments_key,
        is_call=bool(opening),
        is_whole=bool(closing),
    )
    return partial(_read_marked, opening, closing, "JSON", parse)


_EXPECTED = ToolCall(name=_NAME, arguments=_ARGUMENTS)
read_hermes = _make_object_reader("<tool_call>", "</tool_call>", "name", "arguments")
"""Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen3 write calls."""
HERMES = CallForm(read=read_hermes)


def _read_named(
    pattern: re.Pattern[str], text: str, tools: Mapping[str, Properties]
) -> list[ToolCall]:
    """Read calls that are a name, which the pattern finds, and JSON after it."""
    del tools
    calls: list[ToolCall] = []
    for match in pattern.finditer(text):
        name = match.group(1)
        try:
            arguments, end = STRICT_DECODER.raw_decode(text, match.end())
        except _FAULTS as error:
            calls.append(_make_error(f"the call is not JSON: {error}", name))
        else:
            call_id = f"functions.{name}{match[2]}" if match[2] else ""
            span = (match.start(), end)
            calls.append(replace(_make_call(name, arguments), call_id=call_id, span=span))
    return calls


def _read_elements(
    pattern: re.Pattern[str],
    pieces: Sequence[re.Pattern[str]],
    closing: str,
    text: str,
    tools: Mapping[str, Properties],
) -> list[ToolCall]:
    """Read calls that are a name, which the first pattern finds, and an element for each argument.

    The pieces of an element are what stands before its key, between key and value, and after the value.
    """
    before_key, before_value, after_value = pieces
    calls: list[ToolCall] = []
    position = 0
    while match := pattern.search(text, position):
        name = match.group(1)
        properties = tools.get(name, {})
        arguments: dict[str, Any] = {}
        position = _skip_space(text, match.end())
        while start := before_key.match(text, position):
            middle = before_value.search(text, start.end())
            end = middle and after_value.search(text, middle.end())
            if middle is None or end is None:
                # Nor does any later one end.
                return [*calls, _make_error("an argument does not end", name)]
            key = text[start.end() : middle.start()].strip()
            value = text[middle.end() : end.start()]
            arguments[key] = _convert(value, properties.get(key, {}))
            position = _skip_space(text, end.end())
        if text.startswith(closing, position):
            span = (match.start(), position + len(closing))
            calls.append(replace(_make_call(name, arguments), span=span))
        elif position < len(text):
            rest = text[position : position + 20]
            calls.append(_make_error(f"after its name and arguments stands {rest!r}", name))
    return calls


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _convert(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of an argument, which is a text if its schema allows one, or if it is no JSON."""
    if _may_be_text(schema):
        return text
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return STRICT_DECODER.decode(text)
    except _FAULTS:
        return text


def _may_be_text(schema: Any) -> bool:
    if not isinstance(schema, Mapping):
        return False
    fields: Mapping[str, Any] = schema
    kinds = fields.get("type")
    choices = fields.get("enum") or ()
    alternatives = [*(fields.get("anyOf") or ()), *(fields.get("oneOf") or ())]
    return (
        kinds == "string"
        or (isinstance(kinds, list) and "string" in kinds)
        or any(isinstance(choice, str) for choice in choices)
        or any(map(_may_be_text, alternatives))
    )


def _read_quoted(
    pattern: re.Pattern[str],
    quote: str,
    closing: str,
    text: str,
    tools: Mapping[str, Properties],
) -> list[ToolCall]:
    """Read calls that are a name and an object whose keys have no quotes, and whose strings have a mark as quotes."""
    del tools
    calls: list[ToolCall] = []
    for match in pattern.finditer(text):
        body, mark, _ = text[match.end() :].partition(closing)
        if mark != closing:
            continue
        parts = body.split(quote)
        for number, part in enumerate(parts):
            # Strings are every second part.
            parts[number] = json.dumps(part) if number % 2 else _KEY.sub(r'\1"\2":', part)
        try:
            call = _make_call(match.group(1), STRICT_DECODER.decode("".join(parts)))
            calls.append(replace(call, span=(match.start(), match.end() + len(body + mark))))
        except _FAULTS as error:
            calls.append(_make_error(f"the arguments cannot be read: {error}", match.group(1)))
    return calls


def _parse_python(content: str) -> tuple[list[ToolCall], int]:
    """Return the calls of a Python list of calls with named arguments, or of one such call; and their characters."""
    with warnings.catch_warnings():
        # Of escapes that Python does not have.
        warnings.simplefilter("ignore")
        expression = ast.parse(content.strip(), mode="eval").body
    nodes = expression.elts if isinstance(expression, ast.List) else [expression]
    return [_read_node(node) for node in nodes], len(content)


def _read_node(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected calls with named arguments alone")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("expected calls with named arguments alone")
        for name in ast.walk(keyword.value):
            # JSON's words are names in Python.
            if isinstance(name, ast.Name) and name.id in ("true", "false", "null"):
                name.id = {"true": "True", "false": "False", "null": "None"}[name.id]
        value = ast.literal_eval(ast.unparse(keyword.value))
        # A `TypeError` for what is no JSON, such as bytes.
        json.dumps(value, allow_nan=False)
        arguments[keyword.arg] = value
    return _make_call(ast.unparse(node.func), arguments)
