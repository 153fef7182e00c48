"""Recorded traffic of SDKs and frameworks: their requests as they wrote them, played again.

A file has what the engine answers, and the bodies of the calls in order. Where a client has sent back an id that it
got, the body has its label, such as ``@0:call:1`` for the second call of the first reply.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.turns import ModelTurn
from gcore_agents.conformance.wire.client import WireReply

_FOLDER = files("gcore_agents.conformance") / "traffic"


def list_traffic_cases() -> list[Case]:
    """Return a case for each recording."""
    names = [file.name for file in _FOLDER.iterdir() if file.name.endswith(".json")]
    return [_read_case(name) for name in sorted(names)]


def _read_case(file_name: str) -> Case:
    record: dict[str, Any] = json.loads((_FOLDER / file_name).read_text())
    return Case(
        name=f"sdk-{file_name.removesuffix('.json')}",
        summary=f"Turns in traffic of {record['client']} continue as recorded.",
        script=[ModelTurn(**turn) for turn in record["script"]],
        drive=partial(_play, record["calls"]),
        parents=record["parents"],
        dialects=(record["dialect"],),
        needs=record["needs"],
        is_scripted=True,
    )


async def _play(calls: Sequence[Mapping[str, Any]], agent: CaseAgent) -> None:
    ids: dict[str, str] = {}
    for number, call in enumerate(calls):
        body = replace_ids(call["body"], ids)
        replies = await agent.send_body(call["path"], body, stream=call["stream"])
        ids |= label_ids(number, replies)


def label_ids(number: int, replies: Sequence[WireReply]) -> dict[str, str]:
    """Return the ids of a call's first reply by their labels in recordings."""
    return {f"@{number}:{label}": value for label, value in replies[0].ids.items() if value}


def replace_ids(value: Any, replacements: Mapping[str, str]) -> Any:
    """Return a value of JSON in which ids are replaced, also within texts."""
    if isinstance(value, str):
        for old in sorted(replacements, key=len, reverse=True):
            value = value.replace(old, replacements[old])
        return value
    if isinstance(value, Mapping):
        return {name: replace_ids(entry, replacements) for name, entry in value.items()}
    if isinstance(value, list):
        return [replace_ids(entry, replacements) for entry in value]
    return value
