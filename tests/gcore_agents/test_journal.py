"""Sessions on disk: those of a process that was killed are as they were."""

from pathlib import Path
from typing import Any

import numpy as np
from scripted import make_session

from gcore_agents import (
    ChatCall,
    Session,
    SessionJournal,
    SessionReward,
    choose_trained,
    collect_tokens,
    restore_session,
)

USER = {"role": "user", "content": "?"}


async def work(*texts: str) -> Session:
    """Return a finished session, whose turns are these texts, each with a reward."""
    session = make_session(*texts)
    messages: list[Any] = [USER]
    for _ in texts:
        [reply] = await session.respond(ChatCall(messages=messages, agent="solver"))
        session.mark_delivered([reply])
        messages += [reply.message, USER]
        session.add_reward(SessionReward(value=1.0, response_id=reply.response_id))
    session.add_reward(SessionReward(value=2.0, agent="solver"))
    session.end = "done"
    return session


async def test_sessions_are_given_back_as_they_were(tmp_path: Path) -> None:
    journal = SessionJournal(tmp_path, num_steps=5)
    sessions = {"a": await work("One.", "Two."), "b": await work("Three.")}
    for key, session in sessions.items():
        journal.add(key, session, step=7, version=7, turns=[key])
    journal.close()
    later = SessionJournal(tmp_path, num_steps=5)
    for key, session in sessions.items():
        record = later.find(key, step=7)
        assert record is not None
        restored = make_session()
        assert restore_session(restored, record, version=7) == [key]
        assert (restored.score, restored.end) == (session.score, "done")
        assert restored.agent_score("solver") == session.score
        assert {turn.agent for turn in restored.graph.turns()} == {"solver"}
        trees = [collect_tokens(s.graph, trained=choose_trained(s)) for s in (session, restored)]
        names = ("prompt_ids", "token_ids", "mask", "log_probs", "weight_versions", "forks")
        for name in (*names, "routed_experts"):
            first, second = (getattr(tree, name) for tree in trees)
            np.testing.assert_array_equal(first, second)
            assert first.dtype == second.dtype
    assert later.find("a", step=8) is None
    assert later.find("c", step=7) is None


async def test_a_line_that_was_cut_off_is_no_session(tmp_path: Path) -> None:
    journal = SessionJournal(tmp_path, num_steps=5)
    for key in ("a", "b"):
        journal.add(key, await work("One."), step=7, version=7, turns=[])
    journal.close()
    [file] = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-20])
    later = SessionJournal(tmp_path, num_steps=5)
    assert later.find("a", step=7) is not None
    assert later.find("b", step=7) is None
    # It writes to a file of its own.
    later.add("b", await work("Two."), step=7, version=7, turns=["again"])
    later.close()
    record = SessionJournal(tmp_path, num_steps=5).find("b", step=7)
    assert record is not None
    assert record["turns"] == ["again"]


async def test_sessions_of_old_steps_are_removed(tmp_path: Path) -> None:
    journal = SessionJournal(tmp_path, num_steps=2)
    for step in (1, 2, 3, 4):
        journal.add("a", await work("One."), step=step, version=step, turns=[])
    journal.close()
    assert sorted(int(file.name[:8]) for file in tmp_path.iterdir()) == [2, 3, 4]


async def test_sessions_may_have_begun_in_earlier_steps(tmp_path: Path) -> None:
    """The newest one counts, and files are kept for as much longer."""
    journal = SessionJournal(tmp_path, num_steps=1, max_age=2)
    for step in (4, 5, 8):
        journal.add("a", await work("One."), step=step, version=step, turns=[str(step)])
    journal.close()
    later = SessionJournal(tmp_path, num_steps=1, max_age=2)
    for step, expected in ((5, 5), (7, 5), (8, 8), (10, 8)):
        record = later.find("a", step=step)
        assert record is not None
        assert (record["step"], record["turns"]) == (expected, [str(expected)])
    assert later.find("a", step=11) is None
