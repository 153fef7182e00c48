"""The service that scores: how many at one time, for how long, how often, and what becomes of failures."""

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gcore_rollout import (
    CompositeReward,
    NoScoreError,
    RetryPolicy,
    RewardConfigError,
    RewardError,
    RewardRunner,
    RewardRunnerConfig,
    Scored,
    evaluate,
    part_means,
    score,
)
from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward
from gcore_rollout.rewards.reward import ThreadedReward
from gcore_rollout.rewards.runner import evaluate_group

ROW: dict[str, Any] = {"answer": 4}
QUICK = RetryPolicy(max_retries=2, backoff_s=0.01)


class Flaky:
    """Fails the first ``failures`` times that it sees a completion."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.failures = failures
        self.error = error
        self.calls: list[str] = []

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt, row
        self.calls.append(completion)
        if self.calls.count(completion) <= self.failures:
            raise self.error
        return 1.0


async def run(
    runner: RewardRunner, completion: str = "c", prompt: str = "p"
) -> Scored | RewardError:
    return await runner.score(prompt=prompt, completion=completion, row=ROW)


async def test_a_reward_may_say_more_than_a_number() -> None:
    def reward(*_: object) -> Scored:
        return Scored(score=2, parts={"format": True, "length": 0.5}, feedback="too short")

    scored = await evaluate(reward, prompt="", completion="", row=ROW)
    assert scored == Scored(score=2.0, parts={"format": 1.0, "length": 0.5}, feedback="too short")
    assert {type(v) for v in (scored.score, *scored.parts.values())} == {float}
    assert await score(reward, prompt="", completion="", row=ROW) == 2.0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Scored(score=float("nan")), "returned a score of nan; expected a finite number"),
        (Scored(score="1"), "returned a score of '1'; expected one number"),  # pyright: ignore[reportArgumentType]
        (
            Scored(score=1, parts={"a": float("inf")}),
            "returned a part 'a' of inf; expected a finite number",
        ),
        (RewardError("x"), "returned RewardError.*; expected one number"),
    ],
)
async def test_each_number_is_checked(value: Any, message: str) -> None:
    def judge(*_: object) -> Any:
        return value

    with pytest.raises(
        RewardError, match=rf"reward 'judge' on prompt 'p', completion 'c': {message}"
    ):
        await evaluate(judge, prompt="p", completion="c", row=ROW)


@pytest.mark.slow
async def test_concurrency_is_bounded_and_time_in_the_line_does_not_run() -> None:
    running = most = 0

    async def reward(*_: object) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.5)
        running -= 1
        return 1.0

    runner = RewardRunner(reward, RewardRunnerConfig(max_concurrency=3, timeout_s=1.9))
    tasks = [asyncio.create_task(run(runner)) for _ in range(12)]
    await asyncio.sleep(0.05)
    assert (runner.stats().num_running, runner.stats().num_waiting) == (3, 9)
    assert await asyncio.gather(*tasks) == [Scored(score=1.0)] * 12
    assert most == 3
    stats = runner.stats()
    assert (stats.num_scored, stats.num_running, stats.num_waiting, stats.num_timeouts) == (
        12,
        0,
        0,
        0,
    )
    assert stats.busy_s > 5.9, "twelve times 0.5 s"


@pytest.mark.parametrize("error", [TimeoutError("slow"), ConnectionResetError("gone")])
async def test_what_may_pass_is_tried_again(error: Exception) -> None:
    reward = Flaky(2, error)
    runner = RewardRunner(reward, RewardRunnerConfig(retry=QUICK))
    assert await run(runner) == Scored(score=1.0)
    assert len(reward.calls) == 3
    assert (runner.stats().num_retries, runner.stats().num_failed) == (2, 0)


async def test_what_cannot_pass_is_not() -> None:
    reward = Flaky(1, KeyError("gold"))
    runner = RewardRunner(reward, RewardRunnerConfig(retry=QUICK))
    with pytest.raises(
        RewardError, match="reward 'Flaky' on prompt 'p', completion 'c': KeyError: 'gold'"
    ):
        await run(runner)
    assert len(reward.calls) == 1
    assert (runner.stats().num_retries, runner.stats().num_failed) == (0, 1)


async def test_retries_are_bounded_and_wait_longer_each_time() -> None:
    times: list[float] = []

    async def reward(*_: object) -> float:
        times.append(time.monotonic())
        raise ConnectionRefusedError("no listener")

    config = RewardRunnerConfig(retry=RetryPolicy(max_retries=3, backoff_s=0.1, max_backoff_s=0.2))
    with pytest.raises(RewardError, match="ConnectionRefusedError: no listener"):
        await run(RewardRunner(reward, config))
    waits = [b - a for a, b in itertools.pairwise(times)]
    assert len(waits) == 3
    assert all(w >= shortest for w, shortest in zip(waits, (0.05, 0.1, 0.1), strict=True))


async def test_a_waiting_retry_holds_no_place() -> None:
    reward = Flaky(1, ConnectionError("x"))
    config = RewardRunnerConfig(max_concurrency=1, retry=RetryPolicy(max_retries=1, backoff_s=0.4))
    runner = RewardRunner(reward, config)
    await asyncio.gather(run(runner, "a"), run(runner, "b"))
    assert reward.calls[:2] == ["a", "b"], "b did not wait for a's second attempt"


async def test_time_out() -> None:
    async def judge(*_: object) -> float:
        await asyncio.sleep(60)
        return 1.0

    runner = RewardRunner(judge, RewardRunnerConfig(timeout_s=0.05, retry=QUICK))
    with pytest.raises(
        RewardError,
        match=r"reward 'judge' on prompt 'p', completion 'c': TimeoutError: no answer within timeout_s=0.05",
    ):
        await run(runner)
    assert (runner.stats().num_timeouts, runner.stats().num_retries, runner.stats().num_failed) == (
        3,
        2,
        1,
    )


async def test_dropped_failures_are_given_and_counted() -> None:
    reward = Flaky(1, KeyError("gold"))
    runner = RewardRunner(reward, RewardRunnerConfig(on_error="drop"))
    outcomes = [await run(runner, c) for c in ("a", "a", "b")]
    assert [isinstance(o, RewardError) for o in outcomes] == [True, False, True]
    assert isinstance(outcomes[0], RewardError)
    assert str(outcomes[0]) == "reward 'Flaky' on prompt 'p', completion 'a': KeyError: 'gold'"
    assert (runner.stats().num_failed, runner.stats().num_scored) == (2, 1)


@pytest.mark.parametrize("on_error", ["raise", "drop"])
async def test_a_reward_without_a_score_drops_under_either_policy(on_error: Any) -> None:
    async def judge(*_: object) -> float:
        raise NoScoreError("no verdict")

    runner = RewardRunner(judge, RewardRunnerConfig(on_error=on_error, retry=QUICK))
    outcome = await run(runner)
    assert isinstance(outcome, RewardError)
    assert type(outcome) is NoScoreError
    assert "reward 'judge' on prompt 'p', completion 'c': no verdict" in str(outcome)
    stats = runner.stats()
    assert (stats.num_no_score, stats.num_failed, stats.num_retries) == (1, 0, 0)


@pytest.mark.slow
async def test_synchronous_rewards_leave_the_loop_free() -> None:
    main = threading.get_ident()
    where: list[int] = []
    all_four = threading.Barrier(4)

    def reward(*_: object) -> float:
        where.append(threading.get_ident())
        if threading.get_ident() != main:
            # Passed by four at one time only.
            all_four.wait(timeout=300)
            time.sleep(0.3)
        return 1.0

    runner = RewardRunner(reward, RewardRunnerConfig(max_concurrency=4))
    tasks = [asyncio.create_task(run(runner)) for _ in range(4)]
    ticks = 0
    while not all(t.done() for t in tasks):
        await asyncio.sleep(0.01)
        ticks += 1
    assert await asyncio.gather(*tasks) == [Scored(score=1.0)] * 4
    assert ticks > 5
    assert main not in where
    runner.close()

    where.clear()
    on_the_loop = RewardRunner(reward, RewardRunnerConfig(sync_in_threads=False))
    await run(on_the_loop)
    assert where == [main]
    on_the_loop.close()


async def test_a_synchronous_reward_is_held_to_its_time_too() -> None:
    release = threading.Event()

    def reward(*_: object) -> float:
        release.wait()
        return 1.0

    runner = RewardRunner(
        reward, RewardRunnerConfig(timeout_s=0.1, retry=RetryPolicy(max_retries=0))
    )
    with pytest.raises(RewardError, match="no answer within"):
        await run(runner)
    release.set()
    runner.close()


async def test_a_threaded_reward_keeps_its_name_and_may_give_an_awaitable() -> None:
    async def late() -> float:
        return 0.5

    def mine(*_: object) -> Any:
        return late()

    def broken(*_: object) -> float:
        return 1 / 0

    threaded = ThreadedReward(mine, max_workers=1)
    assert await score(threaded, prompt="", completion="", row=ROW) == 0.5
    with pytest.raises(RewardError, match=r"reward 'broken' .* ZeroDivisionError"):
        await score(ThreadedReward(broken), prompt="", completion="", row=ROW)
    threaded.close()


async def test_cancelling_a_call_gives_its_place_back() -> None:
    async def reward(*_: object) -> float:
        await asyncio.sleep(60)
        return 1.0

    runner = RewardRunner(reward, RewardRunnerConfig(max_concurrency=1))
    tasks = [asyncio.create_task(run(runner)) for _ in range(2)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (runner.stats().num_running, runner.stats().num_waiting) == (0, 0)


async def long(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    await asyncio.sleep(0)
    return len(completion) / 10


def polite(prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
    return Scored(score=float("please" in completion), parts={"words": 1.0}, feedback="be nice")


async def test_composite() -> None:
    rewards: dict[str, Any] = {
        "length": long,
        "polite": polite,
        "right": MathVerifyReward(),
        "again": long,
    }
    reward = CompositeReward(rewards, weights={"length": 0.5, "polite": -2, "right": 1, "again": 0})
    scored = await evaluate(reward, prompt="", completion="please 4", row=ROW)
    assert scored.score == pytest.approx(0.5 * 0.8 - 2 + 1)
    assert scored.parts == {
        "length": 0.8,
        "polite": 1.0,
        "polite/words": 1.0,
        "right": 1.0,
        "again": 0.8,
    }
    assert scored.feedback == "be nice"


async def test_the_parts_of_a_composite_run_at_the_same_time() -> None:
    both = asyncio.Barrier(2)

    async def meets(*_: object) -> float:
        await both.wait()
        return 1.0

    reward = CompositeReward({"a": meets, "b": meets}, weights={"a": 1, "b": 2})
    async with asyncio.timeout(300):
        assert await score(reward, prompt="", completion="", row=ROW) == 3.0


async def test_a_part_that_fails_is_named_and_ends_the_others() -> None:
    ended = asyncio.Event()

    async def slow(*_: object) -> float:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return 0.0

    flaky = Flaky(1, ConnectionError("reset"))
    reward = CompositeReward({"slow": slow, "net": flaky}, weights={"slow": 1, "net": 1})
    with pytest.raises(
        RewardError,
        match=r"reward 'CompositeReward' on prompt 'p', completion 'c': part 'net': ConnectionError: reset",
    ):
        await evaluate(reward, prompt="p", completion="c", row=ROW)
    assert ended.is_set()


async def test_a_composite_is_retried_and_dropped_like_its_parts() -> None:
    flaky = CompositeReward({"net": Flaky(1, ConnectionError("reset"))}, weights={"net": 1})
    assert await run(RewardRunner(flaky, RewardRunnerConfig(retry=QUICK))) == Scored(
        score=1.0, parts={"net": 1.0}
    )
    silent = CompositeReward({"judge": Flaky(9, NoScoreError("no verdict"))}, weights={"judge": 1})
    outcome = await run(RewardRunner(silent))
    assert isinstance(outcome, RewardError)
    assert "part 'judge': no verdict" in str(outcome)


@pytest.mark.parametrize(
    ("rewards", "weights", "message"),
    [
        ({}, {}, "rewards is empty"),
        ({"a": long}, {"b": 1}, r"weights has \['b'\]; expected the names of rewards, \['a'\]"),
        ({"a": long}, {"a": float("nan")}, r"weights\['a'\] is nan; expected a finite number"),
        ({"a": long}, {"a": 0}, r"weights are all 0 \(\['a'\]\)"),
    ],
)
def test_bad_composites(rewards: Any, weights: Any, message: str) -> None:
    with pytest.raises(RewardConfigError, match=message):
        CompositeReward(rewards, weights=weights)


async def shortest_wins(
    prompt: str, completions: Sequence[str], row: Mapping[str, Any]
) -> list[Scored]:
    if prompt == "slow":
        await asyncio.sleep(60)
    if prompt == "short":
        return []
    return [Scored(score=float(len(c) == min(map(len, completions)))) for c in completions]


async def test_groups() -> None:
    runner = RewardRunner(
        shortest_wins, RewardRunnerConfig(timeout_s=0.1, retry=QUICK, on_error="drop")
    )
    good = await runner.score_group(prompt="p", completions=["aa", "b"], row=ROW)
    assert good == [Scored(score=0.0), Scored(score=1.0)]
    for prompt, message in (
        ("short", "returned 0 scores; expected one for each of 2 completions"),
        ("slow", "no answer within timeout_s=0.1"),
    ):
        bad = await runner.score_group(prompt=prompt, completions=["aa", "b"], row=ROW)
        assert isinstance(bad, RewardError)
        assert f"reward 'shortest_wins' on prompt '{prompt}', completion 'aa': " in str(bad)
        assert message in str(bad)
    assert (runner.stats().num_scored, runner.stats().num_failed, runner.stats().num_timeouts) == (
        1,
        2,
        3,
    )
    with pytest.raises(RewardError, match="returned 0 scores"):
        await evaluate_group(shortest_wins, prompt="short", completions=["a"], row=ROW)


def test_means_of_parts() -> None:
    parts = [{"format": 1.0}, {}, {"format": 0.0, "rare": 3.0}]
    assert part_means(parts) == {"reward/format/mean": 0.5, "reward/rare/mean": 3.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RewardRunnerConfig(max_concurrency=0),
            "max_concurrency is 0; expected at least 1",
        ),
        (lambda: RewardRunnerConfig(timeout_s=0), "timeout_s is 0; expected more than 0"),
        (
            lambda: RewardRunnerConfig(on_error="skip"),  # pyright: ignore[reportArgumentType]
            "on_error is 'skip'; expected one of raise, drop",
        ),
        (lambda: RetryPolicy(max_retries=-1), "max_retries is -1; expected 0 or more"),
        (lambda: RetryPolicy(backoff_s=-1), "backoff_s is -1; expected 0 or more"),
        (
            lambda: RetryPolicy(backoff_s=2, max_backoff_s=1),
            "max_backoff_s is 1; expected at least backoff_s=2",
        ),
        (lambda: ThreadedReward(long, max_workers=0), "max_workers is 0; expected at least 1"),
    ],
)
def test_bad_settings(make: Any, message: str) -> None:
    with pytest.raises(RewardConfigError, match=message):
        make()
