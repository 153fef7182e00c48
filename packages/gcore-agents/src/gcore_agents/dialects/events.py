"""Server-sent events: the form of streams in all dialects."""

import json
from typing import Any

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients leave out."""
LAST_EVENT = b"data: [DONE]\n\n"
_MAX_PIECES = 4


def write_event(data: Any, name: str = "") -> bytes:
    """Return an event of JSON; ``name`` is its type where the API has one outside of the JSON."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def split_text(text: str) -> list[str]:
    """Return a text in a few pieces, none of which is empty."""
    size = max(1, -(-len(text) // _MAX_PIECES))
    return [text[start : start + size] for start in range(0, len(text), size)]
