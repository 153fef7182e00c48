"""Episodes of agents: failures, rewards, the credit of turns, and how a session ends."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import END, make_session, make_tokenizer

from gcore_agents import (
    AgentFailedError,
    AgentTask,
    CallError,
    ChatCall,
    ChatEncoder,
    Opening,
    Reply,
    Session,
    SessionReward,
    choose_trained,
    run_episode,
    run_function,
)
from gcore_agents.calls import ChatReply
from gcore_agents.session import SessionStatus
from gcore_llm.agents.config import AgentConfig, MultiTurnConfig
from gcore_llm.agents.episodes import AgentRunner, EpisodePlayer, agent_returns, turn_returns
from gcore_rollout import (
    Completion,
    EpisodeError,
    Prompt,
    Request,
    RolloutError,
    SamplingParams,
)

USER = {"role": "user", "content": "?"}
MORE = {"role": "user", "content": "And?"}


class DyingEngine:
    """Answers some turns."""

    weight_version = 0

    def __init__(self, num_turns: int = 1) -> None:
        self.num_requests = 0
        self.num_turns = num_turns

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.num_requests += 1
        if self.num_requests > self.num_turns:
            raise RolloutError("the engine is gone")
        tokens = np.array(make_tokenizer()(f"One.{END}")["input_ids"])
        yield Completion(
            request_id=requests[0].request_id,
            index=0,
            token_ids=tokens,
            log_probs=np.zeros(tokens.size, np.float32),
            weight_versions=np.zeros(tokens.size, np.int32),
            finish_reason="stop",
        )


def make_player(drive: Any, credit: Any = None) -> EpisodePlayer:
    return EpisodePlayer(
        drive=drive,
        encoder=ChatEncoder(make_tokenizer()),
        multi_turn=MultiTurnConfig(),
        max_context=0,
        timeout_s=0.0,
        needs_score=True,
        is_agent=True,
        credit=credit,
    )


async def ask(
    session: Session, *messages: Mapping[str, Any], is_delivered: bool = True, **fields: Any
) -> ChatReply:
    replies = await session.respond(ChatCall(messages=messages, **fields))
    if is_delivered:
        session.mark_delivered(replies)
    return replies[0]


async def test_a_failure_of_the_engine_is_the_run_s_even_if_the_agent_handles_it() -> None:
    async def answer_in_any_case(session: Session, prompt: Prompt) -> list[str]:
        del prompt
        first = await ask(session, USER)
        with pytest.raises(CallError, match="the engine is gone"):
            await ask(session, USER, first.message, MORE)
        session.add_reward(SessionReward(value=0.0))
        return ["One."]

    player = make_player(answer_in_any_case)
    engine: Any = DyingEngine()
    prompt = Prompt(text="?", token_ids=(1,), row={})
    with pytest.raises(RolloutError, match="the engine is gone"):
        await player.play(engine, prompt, "0/0", SamplingParams(max_tokens=100), 0)


async def test_a_turn_has_the_discounted_mean_of_the_turns_that_continue_it() -> None:
    session = make_session("One.", "Two.", "Three.")
    first = await ask(session, USER)
    second = await ask(session, USER, first.message, MORE)
    third = await ask(session, USER, first.message, {"role": "user", "content": "Or?"})
    for reply, value in ((first, 1.0), (second, 2.0), (third, 4.0)):
        session.add_reward(SessionReward(value=value, response_id=reply.response_id))
    session.add_reward(SessionReward(value=8.0))
    assert turn_returns(session, discount=0.5) == [1.0 + 0.5 * 11.0, 10.0, 12.0]


async def test_a_turn_that_the_agent_did_not_get_is_worth_nothing_to_the_one_before() -> None:
    session = make_session("One.", "Two.", "Three.")
    first = await ask(session, USER)
    await ask(session, USER, first.message, MORE, is_delivered=False)
    # The client asks for fewer tokens after its timeout, so that the call is another one.
    last = await ask(session, USER, first.message, MORE, max_tokens=50)
    session.add_reward(SessionReward(value=1.0, response_id=last.response_id))
    returns = turn_returns(session, discount=1.0)
    assert (returns[0], returns[2]) == (1.0, 1.0)


async def test_a_turn_has_the_score_of_its_agent_or_else_of_the_session() -> None:
    session = make_session("One.")
    turns = [await ask(session, USER, agent=name) for name in ("a", "b", "", "c")]
    session.add_reward(SessionReward(value=1.0, agent="a", name="win"))
    session.add_reward(SessionReward(value=0.5, response_id=turns[0].response_id))
    session.add_reward(SessionReward(value=-1.0, response_id=turns[1].response_id))
    with pytest.raises(EpisodeError, match=r"agent '' of episode 'session' has no reward"):
        agent_returns(session)
    session.add_reward(SessionReward(value=3.0))
    assert agent_returns(session) == [1.5, -1.0, 3.0, 3.0]


async def test_an_agent_without_a_reward_fails_its_session_only_if_it_has_a_turn() -> None:
    session = make_session("One.")
    await ask(session, USER, agent="a")
    await ask(session, USER, agent="b", is_delivered=False)
    session.add_reward(SessionReward(value=1.0, agent="a"))
    assert agent_returns(session)[0] == 1.0
    await ask(session, MORE, agent="b")
    with pytest.raises(EpisodeError, match="agent 'b' of episode"):
        agent_returns(session)


async def test_agents_that_ask_the_same_each_have_their_turn_and_continue_it() -> None:
    session = make_session("Yes.")
    first = await ask(session, USER, agent="a")
    second = await ask(session, USER, agent="b")
    await ask(session, USER, agent="b")
    await ask(session, USER, first.message, MORE, agent="a")
    graph = session.graph
    last = list(graph.turns())[-1]
    assert last.path()[1].response_id == first.response_id
    # The third asks again what the second had asked.
    unwanted = graph.find_turn(second.response_id)
    assert choose_trained(session) == set(graph.turns()) - {unwanted}


async def test_a_sample_has_the_agents_of_its_turns() -> None:
    async def play(session: Session, prompt: Prompt) -> list[str]:
        del prompt
        first = await ask(session, USER, agent="b")
        await ask(session, USER, first.message, MORE, agent="a")
        session.add_reward(SessionReward(value=2.0, agent="a"))
        session.add_reward(SessionReward(value=-2.0, agent="b"))
        return ["One."]

    player = make_player(play, credit=agent_returns)
    engine: Any = DyingEngine(num_turns=2)
    prompt = Prompt(text="?", token_ids=(1,), row={})
    response = await player.play(engine, prompt, "0/0", SamplingParams(max_tokens=100), 0)
    assert response.credit is not None
    for agent, value in (("a", 2.0), ("b", -2.0)):
        [[start, stop]] = response.agents[agent]
        assert make_tokenizer().decode(response.token_ids[start:stop]) == f"One.{END}"
        assert response.credit[start:stop].tolist() == [value] * 5
    assert response.agents["b"][0, 0] < response.agents["a"][0, 0]
    assert response.score == 0.0
    assert response.parts["agent/a/return"] == 2.0
    assert response.parts["agent/b/return"] == -2.0
    assert "agent/return" not in response.parts


@pytest.mark.parametrize(
    ("status", "end"),
    [("completed", "done"), ("truncated", "max_turns"), ("failed", "the status failed")],
)
async def test_an_agent_says_how_its_work_ended(
    tmp_path: Path, status: SessionStatus, end: str
) -> None:
    path = tmp_path / "agent.py"
    path.write_text(f"def work(task):\n    task.session.close({status!r})\n    return 1.0\n")
    runner = AgentRunner(AgentConfig(run=f"{path}:work"))
    session = make_session("One.")
    await ask(session, USER)
    prompt = Prompt(text="?", token_ids=(1,), row={})
    if status == "failed":
        with pytest.raises(AgentFailedError, match=end):
            await runner.run(session, prompt)
    else:
        assert await runner.run(session, prompt) == ["One."]
        assert session.end == end
    await runner.close()


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, "1"])
async def test_rewards_that_are_no_finite_numbers_fail_their_session(value: object) -> None:
    def score_so(task: AgentTask) -> Any:
        del task
        return value

    task = AgentTask(row={}, base_url="", api_key="", session=make_session())
    with pytest.raises(
        AgentFailedError, match=r"value of 'reward' is .*; expected a finite number"
    ):
        await run_function(score_so, task, timeout_s=60)


async def test_a_function_returns_rewards_of_single_agents() -> None:
    session = make_session("One.")
    await ask(session, USER, agent="planner")
    await ask(session, USER, agent="helper")

    def score(task: AgentTask) -> Any:
        return task.row["rewards"]

    async def run(*rewards: object) -> None:
        task = AgentTask(row={"rewards": list(rewards)}, base_url="", api_key="", session=session)
        await run_function(score, task, timeout_s=60)

    await run(
        SessionReward(value=1, agent="planner"),
        SessionReward(value=0.5, agent="planner", name="style"),
        SessionReward(value=-1.0, agent="helper"),
    )
    assert session.agent_score("planner") == 1.5
    assert session.agent_score("helper") == -1.0
    unknown = "score: CallError: agent is 'judge'; expected one of: helper, planner"
    with pytest.raises(AgentFailedError, match=unknown):
        await run(SessionReward(value=1.0, agent="judge"))
    with pytest.raises(
        AgentFailedError, match=r"returned 1\.0 in a list; expected a SessionReward"
    ):
        await run(1.0)
    with pytest.raises(AgentFailedError, match="value of 'reward' is nan; expected a finite"):
        await run(SessionReward(value=math.nan, agent="helper"))


async def test_a_sample_has_at_most_a_conversation_and_the_tokens_of_a_response() -> None:
    """As the configuration expects of micro-batches: here of 100 tokens and 60 more."""
    session = make_session("x" * 200, max_tokens=60, max_context=100, max_tokens_per_turn=5)
    await ask(session, {"role": "user", "content": "y" * 60})
    for number in range(5):
        await ask(session, {"role": "user", "content": f"{number}"})
    assert session.end == "length"
    num_tokens = sum(len(node.token_ids) for node in session.graph.nodes)
    assert 100 < num_tokens <= 160


async def test_an_episode_that_is_cancelled_ends_its_turn() -> None:
    """The run may end because of another episode, and closes its engine."""

    class Question:
        async def reset(self) -> Opening:
            return Opening(messages=[USER])

        async def step(self, completion: str) -> Reply:
            return Reply(done=bool(completion))

    session = make_session("One.", delay_s=60)
    episode = asyncio.create_task(run_episode(session, Question(), timeout_s=60))
    await asyncio.sleep(0.01)
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}
