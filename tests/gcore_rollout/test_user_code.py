"""Rewards that block, or try to end the process: Ctrl-C and time limits reach them, and errors name them."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_rollout import (
    CompositeReward,
    FailureLog,
    ProcessLimits,
    RewardError,
    RewardRunner,
    RewardRunnerConfig,
    Scored,
    build_reward,
    evaluate_images,
    score,
)
from gcore_rollout.errors import RewardExitError
from gcore_rollout.rewards import reward as rewards_module
from gcore_rollout.rewards.process import ProcessReward
from gcore_rollout.rewards.registry import load_reward
from gcore_rollout.rewards.reward import ThreadedReward

LONG_S = 600.0


def runner_of(
    reward: Callable[..., Any], *, sync_in_threads: bool = False, timeout_s: float = 60.0
) -> RewardRunner:
    config = RewardRunnerConfig(
        on_error="drop", sync_in_threads=sync_in_threads, timeout_s=timeout_s
    )
    return RewardRunner(reward, config)


async def run(runner: RewardRunner) -> object:
    return await runner.score(prompt="p", completion="c", row={})


def leaving(*_: object) -> float:
    sys.exit(3)


async def leaving_later(*_: object) -> float:
    await asyncio.sleep(0)
    sys.exit(3)


def interrupting(*_: object) -> float:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("reward", "name", "reason"),
    [
        (leaving, "leaving", "SystemExit: 3"),
        (leaving_later, "leaving_later", "SystemExit: 3"),
        (interrupting, "interrupting", "KeyboardInterrupt"),
        (
            CompositeReward({"a": leaving, "b": interrupting}, weights={"a": 1.0, "b": 1.0}),
            "CompositeReward",
            "SystemExit: 3",
        ),
    ],
    ids=["sync", "async", "keyboard interrupt", "composite"],
)
@pytest.mark.parametrize("in_threads", [False, True])
async def test_a_reward_that_ends_the_process(
    reward: Any, name: str, reason: str, in_threads: bool
) -> None:
    """It is an error even where failures are dropped."""
    runner = runner_of(reward, sync_in_threads=in_threads)
    with pytest.raises(
        RewardExitError, match=f"reward '{name}' on .*tried to end the process: {reason}"
    ):
        await run(runner)
    runner.close()


async def test_a_reward_of_images_that_ends_the_process() -> None:
    with pytest.raises(
        RewardExitError,
        match=r"reward 'leaving' on 1 images: tried to end the process: SystemExit: 3",
    ):
        await evaluate_images(leaving, np.zeros((1, 2, 2, 3), np.uint8), ["p"], [{}])


def press_ctrl_c_when(blocked: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None

    def press() -> None:
        assert blocked.wait(60)
        time.sleep(0.1)
        signal.pthread_kill(main, signal.SIGINT)

    threading.Thread(target=press).start()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """Handle SIGINT as in a terminal: a process that a shell started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("handler", ["runner", "loop"])
def test_ctrl_c_interrupts_a_reward_that_blocks(handler: str) -> None:
    """The first one: the handler of asyncio is called after the reward has been left, and cancels the run."""
    blocked, log = threading.Event(), list[str]()

    def reward(*_: object) -> float:
        blocked.set()
        time.sleep(LONG_S)
        log.append("returned")
        return 1.0

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        if handler == "loop":
            task.get_loop().add_signal_handler(signal.SIGINT, task.cancel)
        try:
            # Those that are ready, too, would block.
            await asyncio.gather(*(run(runner_of(reward)) for _ in range(5)))
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    press_ctrl_c_when(blocked)
    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        asyncio.run(main())
    assert log == ["cancelled"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
async def test_a_trial_has_a_time_limit(handler: Any) -> None:
    """Of a synchronous reward, too, also where a script has started the run with `&`; later calls have none."""
    log: list[str] = []
    signal.signal(signal.SIGINT, handler)

    def reward(prompt: str, *_: object) -> float:
        time.sleep(LONG_S if prompt == "blocks" else 0.2)
        log.append(prompt)
        return 1.0

    runner = runner_of(reward, timeout_s=0.1)
    composite = runner_of(CompositeReward({"only": reward}, weights={"only": 1.0}), timeout_s=0.1)
    for one in (runner, composite):
        with pytest.raises(RewardExitError, match=r"on prompt 'blocks'.*no answer within 0.1 s"):
            await one.try_on(prompt="blocks", completion="", row={})
    await run(runner)
    assert log == ["p"]
    # The present pass of the loop ends with its handler as it was.
    await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGINT) is handler


async def test_a_call_that_never_returns_does_not_keep_threads_from_ending() -> None:
    """Threads of concurrent.futures are joined when Python ends."""
    started, release = threading.Event(), threading.Event()

    def reward(*_: object) -> float:
        started.set()
        assert threading.current_thread().daemon
        release.wait(60)
        return 1.0

    threaded = ThreadedReward(reward, max_workers=1)
    first = asyncio.create_task(threaded("", "", {}))
    while not started.is_set():
        await asyncio.sleep(0.01)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    # The one thread is held until the call that was given up returns.
    second = asyncio.create_task(threaded("", "", {}))
    await asyncio.sleep(0.05)
    assert not second.done()
    release.set()
    assert await second == 1.0
    threaded.close()


IN_A_PROCESS = """
import os, signal, sys, time

def reward(prompt, completion, row):
    match completion:
        case "hangs":
            9 ** 9**9**9
        case "waits":
            time.sleep(600)
        case "takes memory":
            bytearray(1 << 30)
        case "leaves":
            sys.exit(3)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fails":
            raise ValueError(prompt)
    return float(os.getpid())
"""


@pytest.mark.slow
async def test_a_reward_in_a_process_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that hangs, dies or takes too much memory fails alone: those before and after it have their scores."""
    limits = ProcessLimits(call_s=1.0, memory_bytes=1 << 28)
    spec = f"{tmp_path}/mine.py:reward"
    Path(tmp_path, "mine.py").write_text(IN_A_PROCESS)
    in_process: Any = build_reward(spec, process_limits=limits)
    # The time of calls that wait for others does not run: the last of them wait for two that take a second.
    runner = runner_of(in_process, timeout_s=1.8)
    ends = {
        "hangs": "did not answer within 1 s",
        "waits": "did not answer within 1 s",
        "takes memory": "took more than 0.25 GiB of memory",
        "dies": "ended its process, which was killed by SIGKILL",
        "fails": "ValueError: p",
    }
    first = await run(runner)
    assert isinstance(first, Scored)
    assert first.score != os.getpid()
    texts = ["a", "hangs", "b", "waits", "takes memory", "c", "dies", "fails", "d"]
    outcomes = await asyncio.gather(
        *(runner.score(prompt="p", completion=text, row={}) for text in texts)
    )
    for text, outcome in zip(texts, outcomes, strict=True):
        if text in ends:
            assert isinstance(outcome, RewardError)
            assert ends[text] in str(outcome)
        else:
            assert isinstance(outcome, Scored)
    assert runner.stats().num_timeouts == 0
    with pytest.raises(RewardExitError, match="tried to end the process: SystemExit: 3"):
        await runner.score(prompt="p", completion="leaves", row={})
    in_process.close()
    scoring = ProcessReward(partial(load_reward, spec), limits=limits, limit_score=0.0)
    assert await score(scoring, prompt="p", completion="hangs", row={}) == 0.0
    assert "did not answer within 1 s, and scores 0: 'hangs'" in caplog.text
    scoring.close()


@pytest.mark.slow
async def test_math_verify_survives_a_tower_of_powers() -> None:
    """By its name it has a process of its own."""
    reward: Any = build_reward("math-verify")
    reward.limits = ProcessLimits(call_s=1.0)
    texts = ["4", "\\boxed{9^{9^{9^{9}}}}", "\\boxed{4}"]
    calls = (score(reward, prompt="", completion=text, row={"answer": 4}) for text in texts)
    assert await asyncio.gather(*calls) == [1.0, 0.0, 1.0]
    reward.close()


async def test_a_slow_call_is_named_while_it_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewards_module, "SLOW_S", 0.05)
    monkeypatch.setattr(rewards_module, "CHECK_S", 0.01)

    def slow(*_: object) -> float:
        for _attempt in range(1000):
            if caplog.records:
                return 1.0
            time.sleep(0.01)
        return 0.0

    for in_threads in (False, True):
        caplog.clear()
        runner = runner_of(slow, sync_in_threads=in_threads)
        assert await run(runner) == Scored(score=1.0)
        assert (
            "reward 'slow' on prompt 'p', completion 'c' has been running for 0.05 s" in caplog.text
        )
        runner.close()


async def test_failures_are_counted_by_kind(caplog: pytest.LogCaptureFixture) -> None:
    def reward(prompt: str, completion: str, *_: object) -> float:
        if completion == "nan":
            return float("nan")
        if completion == "key":
            raise KeyError(prompt)
        raise ValueError(f"cannot score {prompt}")

    runner = runner_of(reward)
    with caplog.at_level("INFO", logger="gcore_rollout"):
        for prompt, completion in (
            ("1", "value"),
            ("2", "value"),
            ("3", "key"),
            ("4", "nan"),
            ("5", "value"),
        ):
            outcome = await runner.score(prompt=prompt, completion=completion, row={})
            assert isinstance(outcome, RewardError)
    num_calls, (value, key, nan) = runner.failures.drain()
    assert num_calls == 5
    assert (value.message, value.count) == ("cannot score 1", 3)
    assert value.kind.startswith("ValueError at test_user_code.py:")
    assert (key.message, key.count) == ("'3'", 1)
    assert nan.message == "returned nan; expected a finite number"
    assert runner.failures.drain() == (0, [])
    logged = [record for record in caplog.records if record.exc_info]
    assert len(logged) == 3, "one traceback of each kind"


def test_kinds_of_failures_are_bounded() -> None:
    failures = FailureLog()
    for i in range(300):
        failures.failed(
            RewardError(f"{i}").with_traceback(None)
            if i % 2
            else type(f"Error{i}", (Exception,), {})()
        )
    _, drained = failures.drain()
    assert len(drained) <= 101
    assert sum(failure.count for failure in drained) == 300
