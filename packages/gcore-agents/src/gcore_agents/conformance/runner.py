"""Runs cases on this package's endpoint, or on another."""

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import aiohttp

from gcore_agents.chat.encoder import ChatEncoder
from gcore_agents.chat.probe import TemplateFacts, check_template
from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.scripted import ScriptedEngine, write_turn
from gcore_agents.conformance.templates import make_encoder, read_template
from gcore_agents.conformance.turns import ModelTurn
from gcore_agents.conformance.wire.anthropic import AnthropicClient
from gcore_agents.conformance.wire.chat import ChatClient
from gcore_agents.conformance.wire.client import WireClient
from gcore_agents.conformance.wire.completions import CompletionsClient
from gcore_agents.conformance.wire.google import GoogleClient
from gcore_agents.conformance.wire.responses import ResponsesClient
from gcore_agents.errors import MessageError
from gcore_agents.server import AgentServer
from gcore_agents.session import Session, SessionBudget

CLIENTS: dict[str, WireClient] = {
    client.name: client
    for client in (
        ChatClient(),
        ResponsesClient(),
        AnthropicClient(),
        CompletionsClient(),
        GoogleClient(),
    )
}
"""Clients by the names of dialects."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """The outcome of a case.

    Example:
        >>> CaseResult(case="two-turns", dialect="chat", template="chatml", outcome="ok").detail
        ''
    """

    case: str
    dialect: str
    template: str
    outcome: Literal["ok", "FAIL", "-"]
    """``-``: the case says nothing about this endpoint or template."""
    detail: str = ""
    """The first difference, or why the case does not apply."""


class ScriptedEndpoint:
    """This package's endpoint, with a scripted engine and a template's tokenizer.

    Example:
        >>> async def run(case: Case) -> CaseResult:
        ...     endpoint = ScriptedEndpoint()
        ...     await endpoint.start()
        ...     result = await run_case(endpoint, case, dialect="chat", template="chatml")
        ...     await endpoint.close()
        ...     return result
    """

    async def start(self) -> None:
        self._server = AgentServer()
        await self._server.start()
        self._http = aiohttp.ClientSession()

    async def close(self) -> None:
        await self._http.close()
        await self._server.close()

    async def run(self, case: Case, *, dialect: str, template: str) -> Session:
        """Run one case, and return its session.

        Raises:
            MismatchError: the endpoint does not do what the case expects.
            CaseNotApplicableError: the chat template cannot write or render what the case has.
        """
        encoder, facts = _load_template(template)
        if dialect != "completions":
            _check_needs(case, facts)
        turns = [_write_turn(template, turn) for turn in case.script]
        engine = ScriptedEngine(encoder=encoder, turns=turns, delay_s=case.delay_s)
        session = Session(
            session_id=f"{case.name}-{dialect}-{template}",
            sampler=engine,
            encoder=encoder,
            budget=SessionBudget(max_tokens=100_000, max_calls=case.max_calls),
            history=case.history,
        )
        self._server.open(session)
        agent = CaseAgent(
            self._http,
            url=self._server.url,
            key=session.key,
            client=CLIENTS[dialect],
            engine=engine,
            script=case.script,
        )
        try:
            await _drive(case, agent)
        finally:
            self._server.release(session)
        return session


class RemoteEndpoint:
    """Another endpoint, whose model is not known.

    Args:
        base_url: of OpenAI's API, with or without /v1.
        key: of the API, or of the session.

    Example:
        >>> RemoteEndpoint("http://localhost:8000/v1", key="EMPTY").url
        'http://localhost:8000'
    """

    def __init__(self, base_url: str, *, key: str, model: str = "policy") -> None:
        self.url = base_url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._model = model
        self._has_graph = False

    async def start(self) -> None:
        """Look whether the endpoint shows a session's graph."""
        self._http = aiohttp.ClientSession()
        headers = {"Authorization": f"Bearer {self._key}"}
        async with self._http.get(
            f"{self.url}/session/graph?tokens=1", headers=headers
        ) as response:
            self._has_graph = response.status == 200

    async def close(self) -> None:
        await self._http.close()

    async def run(self, case: Case, *, dialect: str, template: str) -> None:
        """Run one case; the template is the endpoint's own.

        Raises:
            MismatchError: the endpoint does not do what the case expects, or cannot be reached.
            CaseNotApplicableError: the case needs what the endpoint does not show.
        """
        del template
        if case.is_scripted:
            raise CaseNotApplicableError("needs a scripted engine")
        agent = CaseAgent(
            self._http,
            url=self.url,
            key=self._key,
            client=CLIENTS[dialect],
            has_graph=self._has_graph,
            model=self._model,
            nonce=f" ({secrets.token_hex(4)})",
        )
        try:
            await _drive(case, agent)
        except aiohttp.ClientError as error:
            raise MismatchError(str(error) or type(error).__name__) from error


Endpoint = ScriptedEndpoint | RemoteEndpoint


async def run_cases(
    endpoint: Endpoint, cases: Sequence[Case], *, dialects: Sequence[str], templates: Sequence[str]
) -> AsyncIterator[CaseResult]:
    """Yield the results of all cases in all dialects and with all templates.

    Completions have no template: their cases run once.
    """
    for template in templates:
        for dialect in dialects:
            if dialect == "completions" and template != templates[0]:
                continue
            for case in cases:
                if dialect in case.dialects:
                    yield await run_case(endpoint, case, dialect=dialect, template=template)


async def run_case(endpoint: Endpoint, case: Case, *, dialect: str, template: str) -> CaseResult:
    """Run one case, and return its result."""
    outcome: Literal["ok", "FAIL", "-"] = "ok"
    detail = ""
    try:
        await endpoint.run(case, dialect=dialect, template=template)
    except CaseNotApplicableError as error:
        outcome = "-"
        detail = str(error)
    except MismatchError as error:
        outcome = "FAIL"
        detail = str(error)
    return CaseResult(
        case=case.name, dialect=dialect, template=template, outcome=outcome, detail=detail
    )


async def _drive(case: Case, agent: CaseAgent) -> None:
    await agent.start()
    await case.drive(agent)
    await agent.finish()
    agent.trace.check(parents=case.parents, siblings=case.siblings, undelivered=case.undelivered)


@lru_cache(maxsize=2)
def _load_template(name: str) -> tuple[ChatEncoder, TemplateFacts]:
    encoder = make_encoder(read_template(name))
    try:
        return encoder, check_template(encoder)
    except MessageError as error:
        raise MismatchError(str(error)) from error


@lru_cache(maxsize=128)
def _write_turn(template: str, turn: ModelTurn) -> list[int]:
    """Return the tokens of a turn, which are written once for all cases and dialects."""
    encoder, _ = _load_template(template)
    return write_turn(encoder, turn)


def _check_needs(case: Case, facts: TemplateFacts) -> None:
    """Raise a `CaseNotApplicableError` if the template cannot render what a case has."""
    if "system" in case.needs and not facts.takes_system:
        raise CaseNotApplicableError("the template takes no system message")
    if "results" in case.needs and not facts.renders_tool_results:
        raise CaseNotApplicableError("the template renders no results of tools")
