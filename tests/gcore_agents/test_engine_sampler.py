"""Turns of sessions on engines whose weights change, and that die, in the middle of a turn."""

import asyncio
from typing import Any

import numpy as np
import openai
import pytest
from engine_oracles import TinyModel, reference_log_probs, until_sampled
from fake_engine import FakeEngine
from scripted import make_tokenizer

from gcore_agents import AgentServer, ChatEncoder, Session, SessionBudget
from gcore_llm.agents.episodes import EngineSampler
from gcore_rollout import EngineReplicas, HFEngine, Request, RunningEpisodes, SamplingParams

PROMPT = (7, 30, 8, 41)


@pytest.mark.parametrize("paused", ["engine", "episodes"])
async def test_a_turn_through_which_weights_change(tied: TinyModel, paused: str) -> None:
    """Each token has the version and the log-prob of the weights that sampled it."""
    engine: Any = HFEngine.from_pretrained(tied.path, eos_token_ids=[])
    episodes: Any = RunningEpisodes(engine)
    sampler = EngineSampler(
        engine=engine if paused == "engine" else episodes, sampling=SamplingParams(max_tokens=1)
    )
    turn = asyncio.create_task(sampler.sample(PROMPT, session="a", seed=3, max_tokens=40))
    await until_sampled(engine, 12)
    if paused == "engine":
        await engine.pause()
        await engine.abort()
    else:
        await episodes.pause()
        # The engine is free: it may sleep, and serves others meanwhile.
        await engine.sleep()
        await engine.wake()
        other = Request(request_id="b", prompt_token_ids=PROMPT, sampling=sampler.sampling)
        assert [c.finish_reason async for c in engine.generate([other])] == ["length"]
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    assert not turn.done()
    if paused == "engine":
        await engine.resume()
    else:
        episodes.resume()
    sampled = await turn
    num_old = list(sampled.weight_versions).count(0)
    assert 12 <= num_old < 40
    assert list(sampled.weight_versions) == [0] * num_old + [1] * (40 - num_old)
    assert sampled.finish_reason == "length"
    request = Request(
        request_id="a", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=40)
    )
    token_ids = np.array(sampled.token_ids)
    old = reference_log_probs(tied.old, request, token_ids)
    new = reference_log_probs(tied.new, request, token_ids)
    expected = np.append(old[:num_old], new[num_old:])
    np.testing.assert_allclose(sampled.log_probs, expected, atol=1e-4, rtol=0)
    await engine.close()


async def converse(engine: Any, *, dies: bool) -> tuple[list[str], Session]:
    """Return the turns that a client of three calls gets; the engine of the second call dies in the middle of it."""
    sampling = SamplingParams(max_tokens=20)
    session = Session(
        session_id="a",
        sampler=EngineSampler(engine=engine, sampling=sampling),
        encoder=ChatEncoder(make_tokenizer()),
        budget=SessionBudget(max_tokens=10_000),
    )
    server = AgentServer()
    await server.start()
    messages: list[Any] = []
    texts: list[str] = []
    async with openai.AsyncOpenAI(
        base_url=server.open(session), api_key=session.key, max_retries=0
    ) as client:
        for number in range(3):
            messages.append({"role": "user", "content": f"{number}?"})
            call = asyncio.create_task(
                client.chat.completions.create(model="any", messages=messages, max_tokens=20)
            )
            if dies and number == 1:
                [home] = [replica for replica in engine.engines if replica.served]
                await until_sampled(home, 10)
                home.die()
            reply = (await call).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            texts.append(reply.content or "")
    await server.close()
    return texts, session


async def test_a_replica_that_dies_in_a_turn_is_a_slower_answer() -> None:
    """The other one makes the turn again, and has those that follow."""
    expected, whole = await converse(FakeEngine(step_s=0.001), dies=False)
    engines = [FakeEngine(step_s=0.001) for _ in range(2)]
    texts, session = await converse(EngineReplicas(engines), dies=True)
    assert texts == expected
    assert [node.token_ids for node in session.graph.nodes] == [
        node.token_ids for node in whole.graph.nodes
    ]
    served = sorted([name for name, _, _ in engine.served] for engine in engines)
    assert served == [["a/0", "a/1"], ["a/1", "a/2"]]
    assert all(texts)
