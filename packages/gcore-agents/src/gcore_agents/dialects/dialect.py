"""The common part of all dialects: an API's JSON becomes a `ChatCall`, and replies become its JSON or its events.

Sampling parameters of the agent are noted in ``ChatCall.unused``: those of the run hold. So are schemas of the answer
and tools that have to be called, because training cannot reproduce constrained sampling: the policy writes what it
likes, and may miss them. Biases of logits and an engine's own grammars are refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.dialects.events import KEEP_ALIVE, write_event
from gcore_agents.dialects.fields import JsonFields, parse_json
from gcore_agents.dialects.images import ImageReader
from gcore_agents.errors import CallError
from gcore_agents.session import Session

MAX_TURNS = 64
"""Most turns that a call may ask for at once."""
MAX_STOPS = 16
"""Most stop strings of a call."""
MODEL = "policy"
"""Name of the model in replies to calls that name none; names in calls are ignored, and written back."""
CONSTRAINED = "training cannot reproduce constrained sampling"

_MEDIA = ("image", "audio", "file", "document", "video")
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
}


class Dialect(ABC):
    """One API of one session.

    Example:
        >>> class Plain(Dialect):
        ...     def read_call(self, body):
        ...         return ChatCall(messages=[{"role": "user", "content": body["question"]}])
        ...
        ...     def write_reply(self, call, replies):
        ...         return {"answer": replies[0].message["content"]}
        ...
        ...     def write_events(self, call, replies):
        ...         yield write_event(self.write_reply(call, replies))
        >>> Plain.write_error(CallError("n is 0; expected 1", field="n"))["error"]["param"]
        'n'
    """

    keep_alive: ClassVar[bytes] = KEEP_ALIVE
    """Sent in a stream while the reply takes long; clients leave it out."""

    def __init__(self, session: Session) -> None:
        self.session = session
        vision = session and session.encoder.vision
        self.images = ImageReader(vision) if vision else None
        """Reads the images of calls; None: the model takes none."""

    @abstractmethod
    def read_call(self, body: Any) -> ChatCall:
        """Return the call that a body of `parse_json` is; `CallError`, which names the field, if it is none."""

    def count_tokens(self, body: Any) -> dict[str, Any]:
        """Return the answer to a question for the number of tokens of a call, which is not recorded."""
        return {"input_tokens": self.session.count_tokens(self.read_call(body))}

    @abstractmethod
    def write_reply(self, call: ChatCall, replies: Sequence[ChatReply]) -> dict[str, Any]:
        """Return the JSON of the turns that a call asked for."""

    @abstractmethod
    def write_events(self, call: ChatCall, replies: Sequence[ChatReply]) -> Iterator[bytes]:
        """Yield the events of the turns that a call asked for, in the order of the API."""

    @classmethod
    def write_error(cls, error: CallError) -> dict[str, Any]:
        """Return the JSON of an error; here that of OpenAI's APIs."""
        fields = {
            "message": str(error),
            "type": error_type(error.status),
            "param": error.field or None,
            "code": error.code or None,
        }
        return {"error": fields}

    @classmethod
    def write_error_event(cls, error: CallError) -> bytes:
        """Return the event of an error that is known after a stream has started."""
        return write_event(cls.write_error(error))


def error_type(status: int) -> str:
    """Return the name that OpenAI and Anthropic give to errors of an HTTP status."""
    if status in _ERROR_TYPES:
        return _ERROR_TYPES[status]
    return "invalid_request_error" if status < 500 else "api_error"


def read_content(fields: JsonFields, field: str, text_types: Mapping[str, str]) -> str:
    """Return the text of a content, which is a text or a list of parts.

    ``text_types`` has the types of parts that hold text, and in which field. Parts are joined by line ends.
    """
    return "\n".join(map(str, read_parts(fields, field, text_types, {}, None)))


def read_parts(
    fields: JsonFields,
    field: str,
    text_types: Mapping[str, str],
    image_types: Mapping[str, Callable[[JsonFields, ImageReader], bytes]],
    images: ImageReader | None,
) -> list[str | bytes]:
    """Return the texts and image files of a content; ``image_types`` has the types of parts that are images."""
    value = fields.values.get(field)
    if value is None or isinstance(value, str):
        return [value or ""]
    if not isinstance(value, list):
        fields.fail(field, "text, or a list of parts")
    parts: list[str | bytes] = []
    for part in fields.read_objects(field):
        part_type = part.require_text("type")
        if part_type in text_types:
            parts.append(part.read_text(text_types[part_type]) or "")
        elif images is not None and part_type in image_types:
            parts.append(image_types[part_type](part, images))
        else:
            refuse_part(part, "type", (*text_types, *(image_types if images is not None else ())))
    return parts


def refuse_part(part: JsonFields, field: str, types: Iterable[str]) -> None:
    """Raise the `CallError` of a part that has a type that is not supported."""
    expected = " or ".join(types)
    part_type = str(part.values.get(field))
    if any(medium in part_type for medium in _MEDIA):
        part.fail(field, f"{expected}: the model takes nothing else")
    part.fail(field, expected)


def read_arguments(fields: JsonFields, field: str) -> dict[str, Any]:
    """Return the arguments of a call, which are JSON in a text."""
    text = fields.read_text(field) or "{}"
    arguments = parse_json(text, fields.name(field))
    if not isinstance(arguments, dict):
        fields.fail(field, "the JSON of an object")
    return arguments


def read_tool(fields: JsonFields, parameters: str) -> dict[str, Any]:
    """Return a function as tools announce it; ``parameters`` is the field of its JSON schema."""
    function: dict[str, Any] = {"name": fields.require_text("name")}
    description = fields.read_text("description")
    if description is not None:
        function["description"] = description
    schema = fields.read_object(parameters)
    if schema is not None:
        check_schema(schema)
        function["parameters"] = schema.values
    return {"type": "function", "function": function}


def check_schema(schema: JsonFields) -> None:
    """Raise a `CallError` if a JSON schema of arguments has properties of another form."""
    properties = schema.read_object("properties")
    if properties is None:
        return
    for name in properties.values:
        details = properties.values[name]
        if isinstance(details, bool):
            continue
        for choices in ("enum", "anyOf", "oneOf"):
            JsonFields(details, properties.name(name)).read_list(choices)


def name_results(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which results of tools have the names of their calls, which some chat templates write."""
    names: dict[str, str] = {}
    results: list[dict[str, Any]] = []
    for message in messages:
        copy = dict(message)
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if call_id in names:
            copy.setdefault("name", names[call_id])
        results.append(copy)
    return results


def join_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose system messages at the start are one: many templates take no more."""
    texts: list[str] = []
    for message in messages:
        if message["role"] != "system":
            break
        texts.append(message["content"])
    if len(texts) < 2:
        return list(messages)
    joined = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [joined, *messages[len(texts) :]]
