"""Sessions that have ended leave nothing in the process that served them."""

import asyncio
import gc
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from scripted import make_tokenizer

from gcore_agents import AgentTask, ChatEncoder, Session, SessionJournal
from gcore_agents.graph import MessageGraph, MessageNode
from gcore_llm.agents.config import AgentConfig, MultiTurnConfig
from gcore_llm.agents.episodes import AgentRunner, EngineSampler, EpisodePlayer
from gcore_rollout import Prompt, SamplingParams

# Without the certificates of TLS, which take most of a client's start.
AGENT = """
import httpx
import openai


def connect(kind, http_client, task):
    return kind(base_url=task.base_url, api_key=task.api_key, max_retries=0, http_client=http_client)


def talk(task):
    with connect(openai.OpenAI, httpx.Client(verify=False), task) as client:
        question = [{"role": "user", "content": str(task.row["number"])}]
        client.chat.completions.create(model="any", messages=question, max_tokens=4)
        stream = client.chat.completions.create(
            model="any", messages=question, max_tokens=4, stream=True
        )
        return float(len(list(stream)))


async def talk_at_once(task):
    async with connect(openai.AsyncOpenAI, httpx.AsyncClient(verify=False), task) as client:
        question = [{"role": "user", "content": str(task.row["number"])}]
        reply = await client.chat.completions.create(
            model="any", messages=question, max_tokens=4, n=2
        )
        return float(len(reply.choices))


def agent(task):
    if task.row["number"] % 2:
        return talk(task)
    return talk_at_once(task)
"""
KINDS = (Session, MessageGraph, MessageNode, EngineSampler, AgentTask)


def count_all(server: Any) -> dict[str, int]:
    """Count what a session has: objects, threads, open files and connections, and entries of the server."""
    gc.collect()
    # `type`, because `isinstance` asks an object, and some of torch's warn that they are deprecated.
    counts = Counter(type(value).__name__ for value in gc.get_objects() if type(value) in KINDS)
    return {
        **counts,
        "tasks": len(asyncio.all_tasks()),
        "threads": count_threads(),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "served": len(server._sessions),
    }


def count_threads() -> int:
    """Count threads but for those of asyncio, which are few, and stay."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


@pytest.mark.slow
async def test_500_sessions_leave_nothing(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    runner: Any = AgentRunner(AgentConfig(run=f"{path}:agent", max_concurrency=20))
    engine: Any = FakeEngine()
    journal = SessionJournal(tmp_path / "sessions", num_steps=1)
    player = EpisodePlayer(
        drive=runner.run,
        encoder=ChatEncoder(make_tokenizer()),
        multi_turn=MultiTurnConfig(),
        max_context=0,
        credit=None,
        timeout_s=60.0,
        needs_score=True,
        is_agent=True,
        journal=journal,
    )

    async def play(number: int) -> None:
        prompt = Prompt(text="?", token_ids=(1,), row={"number": number})
        sampling = SamplingParams(max_tokens=100)
        completion = await player.play(engine, prompt, f"{number}/0", sampling, number)
        assert completion.score > 0

    async def play_all(first: int, last: int) -> dict[str, int]:
        async with asyncio.TaskGroup() as group:
            for number in range(first, last):
                group.create_task(play(number))
        await asyncio.sleep(0.5)
        return count_all(runner._server)

    # Libraries of earlier tests may have threads of their own.
    num_threads = count_threads()
    early = await play_all(0, 20)
    late = await play_all(20, 500)
    assert late == early
    assert early.keys() == {"tasks", "threads", "files", "served"}
    assert (early["tasks"], early["served"]) == (1, 0)
    assert early["threads"] <= num_threads, "threads of earlier tests may end"
    await runner.close()
    journal.close()
    assert len(list(Path("/proc/self/fd").iterdir())) < early["files"]
