"""Record how SDKs write back what they got, for the cases sdk-* of `gcore-agents conformance`.

``python scripts/agents/record_traffic.py [NAME ...]`` runs agents of `sdk_agents.py` on the package's own endpoint,
behind a proxy that keeps the bodies of their calls. SDKs that the workspace does not have run in an environment of
their own, by ``uv run --with``.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

import gcore_agents.conformance
from gcore_agents import AgentServer, Session, SessionBudget
from gcore_agents.conformance.runner import CLIENTS
from gcore_agents.conformance.scripted import ScriptedEngine, write_turn
from gcore_agents.conformance.templates import make_encoder, read_template
from gcore_agents.conformance.traffic import label_ids, replace_ids
from gcore_agents.conformance.turns import ModelTurn
from gcore_agents.conformance.wire.client import WireClient, read_event_data

HERE = Path(__file__).parent
FOLDER = Path(gcore_agents.conformance.__file__).parent / "traffic"
NEWEST = "2026-11-15T00:00:00Z"
AGENTS = {
    "openai_chat": ("openai",),
    "openai_chat_stream": ("openai",),
    "openai_responses": ("openai",),
    "openai_responses_stream": ("openai",),
    "openai_responses_previous": ("openai",),
    "anthropic": ("anthropic",),
    "anthropic_stream": ("anthropic",),
    "openai_agents": ("openai-agents",),
    "openai_agents_stream": ("openai-agents",),
    "openai_agents_chat": ("openai-agents",),
    "google_genai": ("google-genai==2.14.0",),
    "google_genai_stream": ("google-genai==2.14.0",),
    "langgraph": ("langchain", "langgraph==1.2.22", "langchain-openai==1.7.4"),
    "pydantic_ai": ("pydantic-ai-slim[openai]",),
    "pydantic_ai_anthropic": ("pydantic-ai-slim[anthropic]",),
    "litellm": ("litellm",),
}
"""What each needs; a name alone: the workspace has it."""
HERE_ALREADY = ("openai", "anthropic", "openai-agents")
SCRIPT: list[dict[str, Any]] = [
    {
        "text": "Let me see.",
        "reasoning": "There are two things to find.",
        "calls": [
            {"name": "add", "arguments": {"first": 1, "second": 2}},
            {"name": "look_up", "arguments": {"word": "tree"}},
        ],
    },
    {"calls": [{"name": "look_up", "arguments": {"word": "three"}}]},
    {"text": "It is three.", "reasoning": "That is all there is."},
    {"text": "There is no more."},
]


class Recorder:
    """Forwards calls to an endpoint, and keeps their bodies and replies."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.calls: list[tuple[str, dict[str, object], str]] = []

    async def forward(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in ("host", "content-length", "accept-encoding")
        }
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method, self._url + request.path_qs, data=body, headers=headers
            ) as reply,
        ):
            text = await reply.text()
            if request.method == "POST":
                path = request.path_qs
                self.calls.append((path, json.loads(body), text))
            kind = reply.headers["Content-Type"].partition(";")[0]
            return web.Response(text=text, status=reply.status, content_type=kind)


async def record(name: str) -> None:
    encoder = make_encoder(read_template("chatml"))
    turns = [write_turn(encoder, ModelTurn(**turn)) for turn in SCRIPT]
    session = Session(
        session_id=name,
        sampler=ScriptedEngine(encoder=encoder, turns=turns),
        encoder=encoder,
        budget=SessionBudget(max_tokens=1_000_000),
    )
    server = AgentServer()
    await server.start()
    server.open(session)
    recorder = Recorder(server.url)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", recorder.forward)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    packages = AGENTS[name]
    versions = await asyncio.to_thread(run_agent, name, packages, url, session.key)
    await runner.cleanup()
    await server.close()
    write_recording(name, recorder, versions, list_parents(session))


def list_parents(session: Session) -> list[int]:
    """Return for each turn the one before it; look at the numbers before they are kept."""
    turns = list(session.graph.turns())
    parents: list[int] = []
    for turn in turns:
        before = [node for node in turn.path() if node.is_turn][:-1]
        parents.append(turns.index(before[-1]) if before else -1)
    return parents


def run_agent(name: str, packages: tuple[str, ...], url: str, key: str) -> str:
    """Run an agent to its end, and return the versions of its packages."""
    environment = os.environ | {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": url,
        "GEMINI_API_KEY": key,
    }
    names = [package.partition("[")[0].partition("=")[0] for package in packages]
    show = (
        "from importlib.metadata import version as v; print(*[f'{n} {v(n)}' for n in %r], sep=', ')"
    )
    if packages[0] in HERE_ALREADY:
        python = [sys.executable]
    else:
        python = ["uv", "run", "-q", "--no-project", "--exclude-newer", NEWEST]
        for package in packages:
            python += ["--with", package]
        python.append("python")
    agent = [*python, str(HERE / "sdk_agents.py"), name]
    subprocess.run(agent, env=environment, check=True, timeout=600, cwd=tempfile.gettempdir())
    shown = subprocess.run(
        [*python, "-c", show % names],
        check=True,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
    )
    return shown.stdout.strip()


def find_client(path: str) -> WireClient:
    """Return the client that writes calls of a path."""
    for client in CLIENTS.values():
        if client.route and path.startswith(client.route):
            return client
    return CLIENTS["google"]


def write_recording(name: str, recorder: Recorder, versions: str, parents: list[int]) -> None:
    dialect = ""
    labels: dict[str, str] = {}
    calls: list[dict[str, object]] = []
    for path, body, text in recorder.calls:
        client = find_client(path)
        dialect = client.name
        stream = not text.lstrip().startswith("{")
        reply = (
            client.join_events(read_event_data(text.splitlines())) if stream else json.loads(text)
        )
        calls.append({"path": path, "stream": stream, "body": replace_ids(body, labels)})
        ids = label_ids(len(calls) - 1, client.read_reply(reply))
        labels |= {value: label for label, value in ids.items()}
    record = {
        "client": f"{name}: {versions}",
        "dialect": dialect,
        "needs": ["results", "system"],
        "script": SCRIPT[: len(calls)],
        "parents": parents,
        "calls": calls,
    }
    file = FOLDER / f"{name.replace('_', '-')}.json"
    file.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(name, dialect, "parents", parents, versions)


if __name__ == "__main__":
    for agent_name in sys.argv[1:] or AGENTS:
        asyncio.run(record(agent_name))
