"""The conformance suite passes on this package's endpoint, and fails on endpoints that are broken."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from aiohttp import web
from transformers import Qwen2Config, Qwen2ForCausalLM

import gcore_agents.graph
import gcore_agents.server
from gcore_agents import (
    AgentServer,
    MessageGraph,
    Session,
    SessionBudget,
    choose_trained,
    collect_tokens,
)
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.cases import list_cases
from gcore_agents.conformance.cli import command
from gcore_agents.conformance.runner import (
    CLIENTS,
    CaseResult,
    Endpoint,
    RemoteEndpoint,
    ScriptedEndpoint,
    run_cases,
)
from gcore_agents.conformance.scripted import ScriptedEngine, write_turn
from gcore_agents.conformance.templates import (
    list_model_templates,
    list_templates,
    make_encoder,
    read_template,
)
from gcore_agents.conformance.traffic import list_traffic_cases
from gcore_agents.conformance.turns import ModelTurn
from gcore_trainer import PackedModel, Sample

CASES = [*list_cases(), *list_traffic_cases()]
BY_NAME = {case.name: case for case in CASES}
FAST = ("drops-thoughts", "next-mark")


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[ScriptedEndpoint]:
    scripted = ScriptedEndpoint()
    await scripted.start()
    yield scripted
    await scripted.close()


async def run(
    endpoint: Endpoint,
    cases: Sequence[Case] = CASES,
    *,
    templates: Sequence[str] = ("chatml",),
    dialects: Sequence[str] = tuple(CLIENTS),
) -> list[CaseResult]:
    outcome = run_cases(endpoint, cases, dialects=dialects, templates=templates)
    return [result async for result in outcome]


def failures(results: Sequence[CaseResult]) -> list[CaseResult]:
    return [result for result in results if result.outcome == "FAIL"]


@pytest.mark.parametrize("template", FAST)
async def test_the_endpoint_conforms(endpoint: ScriptedEndpoint, template: str) -> None:
    results = await run(endpoint, templates=[template])
    assert {result.outcome for result in results} == {"ok"}


@pytest.mark.slow
async def test_the_endpoint_conforms_with_all_templates(endpoint: ScriptedEndpoint) -> None:
    """With all but `FAST`; those of models in one dialect: the dialects do not depend on the template."""
    models = list_model_templates()
    results = await run(endpoint, templates=sorted({*list_templates()} - {*FAST}))
    results += await run(endpoint, templates=models, dialects=["chat"])
    assert not failures(results)
    assert len(models) >= 41
    for template in models:
        outcomes = [result.outcome for result in results if result.template == template]
        assert outcomes.count("ok") >= 15


ADD_TURN = MessageGraph.add_turn


def lose_last_token(self: MessageGraph, *arguments: Any, **options: Any) -> Any:
    for name in ("token_ids", "log_probs", "weight_versions"):
        options[name] = options[name][:-1]
    return ADD_TURN(self, *arguments, **options)


def forget_delivery(self: Session, replies: object) -> None:
    del replies


def ignore_reasoning(sent: object, stored: object) -> bool:
    del sent, stored
    return True


def demand_reasoning(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    return sent.get("reasoning_content") == stored.get("reasoning_content")


def write_arguments(arguments: object) -> str:
    return str(arguments)


def keep_call(request: object, call: Any) -> Any:
    del request
    return call


BREAKS: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "lost token": (MessageGraph, "add_turn", lose_last_token, "two-turns"),
    "no delivery": (Session, "mark_delivered", forget_delivery, "two-turns"),
    "retries are resamples": (gcore_agents.server, "_read_headers", keep_call, "retry-count"),
    "reasoning is ignored": (
        gcore_agents.graph,
        "has_equal_reasoning",
        ignore_reasoning,
        "reasoning-changed",
    ),
    "reasoning must be equal": (
        gcore_agents.graph,
        "has_equal_reasoning",
        demand_reasoning,
        "reasoning-dropped",
    ),
    "arguments are text": (
        gcore_agents.graph,
        "_parse_arguments",
        write_arguments,
        "arguments-rewritten",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_a_broken_endpoint_fails(
    endpoint: ScriptedEndpoint, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target, attribute, function, case = BREAKS[name]
    assert not failures(await run(endpoint, [BY_NAME[case]], dialects=["chat"]))
    monkeypatch.setattr(target, attribute, function)
    [result] = await run(endpoint, [BY_NAME[case]], dialects=["chat"])
    assert result.outcome == "FAIL"
    assert result.detail


async def test_rendering_conversations_again_fails(endpoint: ScriptedEndpoint) -> None:
    """It is another tokenization of the same text."""
    cases = [replace(BY_NAME[name], history="template") for name in ("two-turns", "tool-call")]
    results = await run(endpoint, cases, dialects=["chat"])
    assert len(failures(results)) == 2
    assert "turn 1 continues no turn" in results[0].detail


class TokenServer:
    """An endpoint as vLLM's: it shows tokens in replies, and has no sessions.

    Args:
        is_exact: it keeps the tokens of turns; otherwise it renders conversations as a whole.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._encoder = make_encoder(read_template("chatml"))
        self._turns: dict[str, list[int]] = {}
        turns = (ModelTurn(text="the first"), ModelTurn(text="the second"), ModelTurn(text="and"))
        self._engine = ScriptedEngine(
            encoder=self._encoder, turns=[write_turn(self._encoder, turn) for turn in turns]
        )

    async def start(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != "other":
            raise web.HTTPNotFound(text="there is no such model")
        prompt = self._encoder.first(body["messages"])
        if self._is_exact:
            prompt = self._write_exactly(body["messages"])
        turn = await self._engine.sample(prompt, session="", seed=0, max_tokens=100)
        text = self._encoder.text(turn.token_ids)
        self._turns[text] = turn.token_ids
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(turn.token_ids)}
        return web.json_response(
            {
                "id": f"chatcmpl-{len(self._engine.calls)}",
                "choices": [{**choice, "token_ids": turn.token_ids}],
                "prompt_token_ids": prompt,
                "usage": usage,
            }
        )

    def _write_exactly(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        first, *others = messages
        prompt = self._encoder.first([first])
        for message in others:
            if message["role"] == "assistant":
                prompt += self._turns[message["content"]]
            else:
                prompt += self._encoder.next([message], last_token=prompt[-1])
        return prompt


@pytest.mark.parametrize("is_exact", [True, False])
async def test_endpoints_that_show_tokens_in_replies(is_exact: bool) -> None:
    server = TokenServer(is_exact=is_exact)
    remote = RemoteEndpoint(await server.start(), key="EMPTY", model="other")
    names = ("two-turns", "question-changed", "tool-call", "hang-up", "agents-at-once")
    cases = [BY_NAME[name] for name in names]
    await remote.start()
    try:
        results = await run(remote, cases, dialects=["chat"])
    finally:
        await remote.close()
        await server.close()
    outcome = "ok" if is_exact else "FAIL"
    assert [result.outcome for result in results] == [outcome, outcome, "-", "-", "ok"]
    if not is_exact:
        assert "does not start with turn 0 as it was sampled" in results[0].detail
    assert "calls of tools" in results[2].detail


async def test_this_packages_endpoint_by_its_url() -> None:
    encoder = make_encoder(read_template("chatml"))
    turns = [write_turn(encoder, ModelTurn(text=f"number {number}")) for number in range(500)]
    engine = ScriptedEngine(encoder=encoder, turns=turns)
    budget = SessionBudget(max_tokens=1_000_000)
    session = Session(session_id="a", sampler=engine, encoder=encoder, budget=budget)
    server = AgentServer()
    await server.start()
    remote = RemoteEndpoint(server.open(session), key=session.key)
    await remote.start()
    try:
        results = await run(remote)
    finally:
        await remote.close()
        await server.close()
    assert not failures(results)
    assert sum(result.outcome == "ok" for result in results) >= 60


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["conformance", "--templates", "strict", "--cases", "tool-call", "reasoning-kept"]
    file = tmp_path / "results.json"
    assert command.main([*arguments, "--dialects", "chat", "google", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0].split() == ["case", "chat", "google"]
    assert output.splitlines()[1].split() == ["tool-call", "ok", "1", "ok", "1"]
    assert output.splitlines()[-1] == "2 ok, 0 failed, 2 do not apply"
    results = json.loads(file.read_text())
    assert [result["outcome"] for result in results] == ["ok", "-", "ok", "-"]


def test_the_command_reports_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Session, "mark_delivered", forget_delivery)
    arguments = ["conformance", "--templates", "chatml", "--cases", "two-turns"]
    assert command.main([*arguments, "--dialects", "chat"]) == 1
    output = capsys.readouterr().out
    assert "FAIL 1/1" in output
    assert "FAIL two-turns, chat, chatml: turn 1 counts as not delivered" in output


def test_the_command_lists_cases_and_templates(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["conformance", "--list"]) == 0
    output = capsys.readouterr().out
    for name in [*BY_NAME, *list_templates(), *list_model_templates()]:
        assert name in output


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--cases", "nothing"], "'nothing' is no case"),
        (["--templates", "nothing"], "the template is 'nothing'"),
        (["--base-url", "http://x", "--templates", "chatml"], "is its own"),
        (["--dialects", "nothing"], "invalid choice"),
    ],
)
def test_the_command_refuses(
    capsys: pytest.CaptureFixture[str], arguments: list[str], fault: str
) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(["conformance", *arguments])
    assert error.value.code == 2
    assert fault in capsys.readouterr().err


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    folder = tmp_path_factory.mktemp("model")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    model = PackedModel.from_pretrained(folder)
    model.model.double()
    model.compute_dtype = torch.float64
    return model


@pytest.mark.parametrize(
    "name", ["several-rounds", "question-changed", "sub-agent", "resample", "several-turns"]
)
@pytest.mark.parametrize("template", ["drops-thoughts", "next-mark"])
async def test_the_tree_of_a_session_has_the_log_probs_of_its_turns(
    endpoint: ScriptedEndpoint, packed: PackedModel, name: str, template: str
) -> None:
    """The trainer's scores of all turns in one sample are those of each turn after its own prompt."""
    session = await endpoint.run(BY_NAME[name], dialect="chat", template=template)
    tokens = collect_tokens(session.graph, trained=choose_trained(session))
    assert tokens is not None
    tree = Sample(
        prompt_ids=tokens.prompt_ids,
        response_ids=tokens.token_ids,
        response_mask=tokens.mask,
        forks=tokens.forks,
    )
    scores = await asyncio.to_thread(score, packed, tree)
    assert len(tokens.turns) == len(BY_NAME[name].parents)
    assert tokens.mask.sum() == sum(len(turn.token_ids) for turn in tokens.turns)
    for turn, start in zip(tokens.turns, tokens.turn_starts, strict=True):
        size = len(turn.token_ids)
        path = np.array(turn.path_tokens(), np.int64)
        alone = Sample(prompt_ids=path[:-size], response_ids=path[-size:])
        expected = await asyncio.to_thread(score, packed, alone)
        np.testing.assert_allclose(scores[start : start + size], expected, rtol=0, atol=1e-6)


def score(packed: PackedModel, sample: Sample) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return packed.score([sample]).log_probs.numpy()
