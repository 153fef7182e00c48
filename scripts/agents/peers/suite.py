"""Runs the cases of `gcore-agents conformance` on a peer's endpoint in this process, and prints rows."""

import argparse
import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from upstream import Upstream

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.cases import list_cases
from gcore_agents.conformance.cli.table import write_failures, write_table
from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.runner import CLIENTS, CaseResult
from gcore_agents.conformance.scripted import write_turn
from gcore_agents.conformance.templates import make_encoder, read_template
from gcore_agents.errors import MessageError

LEFT_OUT = ("hang-up", "budget-end", "call-cut-off")
"""Peers' graphs have no mark of delivery, and their budgets are set in other ways. What the text of a call that is cut
off is, depends on the tokenizer."""

FURTHER_MARKS = "{# <|endoftext|> <|im_end|> #}"
"""Tokens that peers look for in the tokenizer, in a comment of the template, from which the tokenizer is made."""


class Peer(Protocol):
    """An endpoint of a peer."""

    async def start(self, upstream: Upstream) -> None: ...

    async def close(self) -> None: ...

    def open(self) -> tuple[str, str]:
        """Open a session, and return its URL and key."""
        ...

    def read_graph(self) -> Mapping[str, Any]:
        """Return the last session's graph, in the form of this package's."""
        ...


def make_nodes(calls: list[tuple[int, list[int], list[int]]]) -> dict[str, Any]:
    """Return a graph of turns: for each its parent's number, the tokens added before it, and its own."""
    nodes: list[dict[str, Any]] = []
    for number, (parent, context, sampled) in enumerate(calls):
        above = 2 * parent + 1 if parent >= 0 else -1
        context_node = {"number": 2 * number, "parent": above, "token_ids": context}
        nodes.append({**context_node, "response_id": "", "is_delivered": False})
        turn = {"number": 2 * number + 1, "parent": 2 * number, "token_ids": sampled}
        nodes.append({**turn, "response_id": f"turn{number}", "is_delivered": True})
    return {"nodes": nodes}


async def run_case(peer: Peer, upstream: Upstream, case: Case, *, dialect: str, same: bool) -> None:
    """Run a case; an error says what is wrong."""
    encoder = upstream.encoder
    turns = [write_turn(encoder, turn) for turn in case.script]
    if same:
        turns = [encoder.encode(encoder.turn_text(turn, is_ended=False)) for turn in turns]
    upstream.engine.turns = turns
    upstream.engine.calls.clear()
    upstream.engine.delay_s = case.delay_s
    url, key = peer.open()

    async def read_graph() -> Mapping[str, Any]:
        return peer.read_graph()

    async with aiohttp.ClientSession() as http:
        agent = CaseAgent(
            http,
            url=url,
            key=key,
            client=CLIENTS[dialect],
            engine=upstream.engine,
            script=case.script,
            read_graph=read_graph,
        )
        await agent.start()
        await case.drive(agent)
        await agent.finish()
        # Peers add contexts per turn: siblings are turns with one parent, and all count as delivered.
        agent.trace.check(parents=case.parents)


async def run_peer(peer: Peer, options: argparse.Namespace) -> list[CaseResult]:
    results: list[CaseResult] = []
    for template in options.templates:
        upstream = Upstream(make_encoder(read_template(template) + FURTHER_MARKS))
        await upstream.start()
        await peer.start(upstream)
        for dialect in options.dialects:
            for case in list_cases():
                if dialect not in case.dialects or case.name in LEFT_OUT:
                    continue
                row: dict[str, Any] = {"case": case.name, "dialect": dialect, "template": template}
                try:
                    await run_case(peer, upstream, case, dialect=dialect, same=options.same_tokens)
                    results.append(CaseResult(outcome="ok", **row))
                except (CaseNotApplicableError, MessageError) as error:
                    results.append(CaseResult(outcome="-", detail=str(error), **row))
                except (MismatchError, aiohttp.ClientError, KeyError, ValueError) as error:
                    results.append(CaseResult(outcome="FAIL", detail=repr(error), **row))
        await peer.close()
        await upstream.close()
    return results


def main(peer: Peer) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--templates", nargs="+", default=["chatml", "drops-thoughts"])
    parser.add_argument(
        "--dialects", nargs="+", default=["chat", "responses", "anthropic", "google"]
    )
    parser.add_argument(
        "--same-tokens",
        action="store_true",
        help="turns are sampled as the tokenizer would tokenize their text",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = asyncio.run(run_peer(peer, options))
    print(write_table(results))
    print(write_failures(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
