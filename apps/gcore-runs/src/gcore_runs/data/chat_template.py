"""A check that a chat template, which is a program, ends."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import lru_cache
from typing import Any

from gcore_rollout import LimitedProcess, LimitExceededError, ProcessLimits
from gcore_runs.errors import UserError

_CALL_S = 10.0
_MEMORY_BYTES = 1 << 30
_CONVERSATION = (
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
)
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag of transformers, which marks text and does not change it."""


def check_chat_template(tokenizer: Any, where: str) -> None:
    """Raise `UserError` if the chat template does not render a short conversation within 10 s and 1 GiB of memory.

    It is rendered in a process of its own, once for each template. Other errors, which may be about this conversation,
    are left to the first use. A template that loops only for other messages or further variables is not found.
    """
    if tokenizer.chat_template is None:
        return
    try:
        template: str = tokenizer.get_chat_template()
    except ValueError:
        # It has several templates, and none of them is the default.
        return
    excess = _find_excess(template, tuple(tokenizer.special_tokens_map.items()))
    if excess:
        raise UserError(
            f"{where} has a chat template that {excess} on a conversation of {len(_CONVERSATION)} messages; expected "
            f"at most {_CALL_S:g} s and {_MEMORY_BYTES / 2**30:g} GiB: correct chat_template.jinja, or "
            "chat_template in tokenizer_config.json"
        )


@lru_cache
def _find_excess(template: str, special_tokens: tuple[tuple[str, Any], ...]) -> str:
    """Return how a template exceeds the limits; empty: it does not."""
    # In a thread of its own, because this one may run an event loop.
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, _render_apart(template, dict(special_tokens))).result()


async def _render_apart(template: str, special_tokens: Mapping[str, Any]) -> str:
    limits = ProcessLimits(call_s=_CALL_S, memory_bytes=_MEMORY_BYTES)
    process = LimitedProcess(_make_renderer, limits, describe=_describe)
    try:
        await process.ask((template, special_tokens))
    except LimitExceededError as error:
        return str(error)
    except Exception:
        return ""
    finally:
        process.close()
    return ""


def _describe(_: object) -> str:
    return "the chat template"


def _make_renderer() -> Callable[[str, Mapping[str, Any]], None]:
    """Return a function that renders a template with the variables and functions that it has in transformers.

    Importing transformers in a new process would take 2 s, and Jinja alone takes a fifth of a second.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = json.dumps
    names: dict[str, Any] = environment.globals
    names["raise_exception"] = raise_exception
    names["strftime_now"] = strftime_now

    def render(template: str, special_tokens: Mapping[str, Any]) -> None:
        program = environment.from_string(_GENERATION_TAG.sub("", template))
        program.render(
            messages=_CONVERSATION,
            tools=None,
            documents=None,
            add_generation_prompt=True,
            **special_tokens,
        )

    return render
