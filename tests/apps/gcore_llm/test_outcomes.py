"""How `gcore-llm train` ends where the reward fails, says nothing, blocks, or leaves."""

import signal
from pathlib import Path

import pytest
from command_line import Cli, Finished, option_set, read_rows, step_rows

REWARDS = """
import sys
import time
from pathlib import Path

calls = 0


def evens(prompt, completion, row):
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)


def broken(prompt, completion, row):
    raise ValueError(f"no score for {prompt}")


def fragile(prompt, completion, row):
    if completion and row["answer"] % 4 == 0:
        raise ValueError(f"no score for {prompt}")
    return evens(prompt, completion, row)


def constant(prompt, completion, row):
    return 0.5


def of_the_prompt(prompt, completion, row):
    return row["answer"] / 100


def leaving(prompt, completion, row):
    sys.exit(3)


def leaving_later(prompt, completion, row):
    if completion:
        sys.exit()
    return 0.0


def blocking(prompt, completion, row):
    Path("blocked").touch()
    time.sleep(600)


def blocking_later(prompt, completion, row):
    global calls
    calls += 1
    # Behind the evaluation and the first step.
    if calls > 45:
        blocking(prompt, completion, row)
    return evens(prompt, completion, row)
"""


def with_reward(cli: Cli, own_args: list[str], name: str, *options: str) -> list[str]:
    (cli.cwd / "rewards.py").write_text(REWARDS)
    return [*option_set(own_args, "--reward", f"rewards.py:{name}"), *options]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_a_reward_that_always_fails(cli: Cli, own_args: list[str]) -> None:
    args = with_reward(
        cli, own_args, "broken", "--reward-calls.max-failed-share", "0.5", "--name", "one"
    )
    finished = cli(*args)
    assert finished.code == 2
    message = flat(finished.err)
    assert (
        "rewards failed; expected at most a share of reward_calls.max_failed_share = 0.5."
        in message
    )
    assert "ValueError at rewards.py:14: no score for " in message
    assert "Traceback" not in finished.err
    out = flat(finished.out)
    assert (
        out.count(
            "a reward failed and its group was dropped: ValueError at rewards.py:14: no score for"
        )
        == 1
    )
    assert "warning: the trial gave no score: reward 'broken' on prompt" in out
    assert "nan" not in out
    run = cli.cwd / "runs/one"
    assert (run / "logs/main.log").read_text().count(
        'raise ValueError(f"no score for {prompt}")'
    ) == 1


def test_a_reward_that_fails_now_and_then(cli: Cli, own_args: list[str]) -> None:
    args = with_reward(
        cli, own_args, "fragile", "--reward-calls.max-failed-share", "0.5", "--controllers", "2"
    )
    out = flat(cli.ok(*args))
    assert (
        out.count(
            "a reward failed and its group was dropped: ValueError at rewards.py:19: no score for"
        )
        == 1
    )
    run = cli.cwd / "runs/default"
    rows = step_rows(run)
    assert all(0 < row["reward/failed_fraction"] < 0.5 for row in rows)
    warnings = read_rows(run / "warnings.jsonl")
    assert {row["step"] for row in warnings} == {0, 1, 2}
    page = flat((run / "report.html").read_text())
    assert f"{sum(row['count'] for row in warnings)} times in 3 steps, to step 2" in page


@pytest.mark.parametrize(
    ("reward", "filters", "reason"),
    [
        ("constant", True, "every response scored 0.5; look at the reward"),
        ("of_the_prompt", False, "in every group all responses scored alike; look at the reward"),
        pytest.param(
            "constant",
            False,
            "every response scored 0.5; look at the reward",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "of_the_prompt",
            True,
            "in every group all responses scored alike, so none was kept; look at the reward",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_reward_that_says_nothing(
    cli: Cli, own_args: list[str], reward: str, filters: bool, reason: str
) -> None:
    args = option_set(with_reward(cli, own_args, reward), "--trainer.total-training-steps", "6")
    args += ["--algorithm.filter-groups", str(filters), "--data.train-batch-size", "2"]
    finished = cli(*args)
    assert (finished.code, finished.err) == (3, "")
    out = flat(finished.out)
    assert f"warning: step 5: the last 5 steps had nothing to learn from: {reason}" in out
    whole = f"tep 6: the run trained nothing: no step had anything to learn from: {reason}"
    assert f"warning: s{whole}" in out
    assert "nan" not in out
    assert whole in flat((cli.cwd / "runs/default/report.html").read_text())
    assert all(row["training/has_signal"] == 0 for row in step_rows(cli.cwd / "runs/default"))
    assert cli(*args).code == 3, "also of a run that is complete"


@pytest.mark.parametrize(
    ("reward", "exit_of"), [("leaving", "SystemExit: 3"), ("leaving_later", "SystemExit")]
)
def test_a_reward_that_exits(cli: Cli, own_args: list[str], reward: str, exit_of: str) -> None:
    """Where failures are dropped, too."""
    message = cli.refused(
        *with_reward(cli, own_args, reward, "--reward-calls.max-failed-share", "0.5")
    )
    assert f"error: reward '{reward}' on prompt" in flat(message)
    assert flat(message).endswith(f"tried to end the process: {exit_of}")


@pytest.mark.slow
def test_a_trial_that_blocks(cli: Cli, own_args: list[str]) -> None:
    finished = cli(*with_reward(cli, own_args, "blocking", "--reward-calls.timeout-s", "0.5"))
    assert finished.code == 2
    assert "trying the reward on an empty response, for at most 0.5 s" in flat(finished.out)
    assert "error: reward 'blocking' on prompt" in flat(finished.err)
    assert flat(finished.err).endswith("no answer within 0.5 s")
    assert not (cli.cwd / "runs").exists()


def interrupted(cli: Cli, args: list[str]) -> Finished:
    """A command whose reward blocks, and that gets one Ctrl-C."""
    command = cli.start(*args)
    while not (cli.cwd / "blocked").exists():
        assert not command.has_ended(timeout_s=0.05), command.wait()
    command.send(signal.SIGINT)
    return command.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--reward-calls.run-in", "thread"]], ids=["sync", "in threads"]
)
@pytest.mark.parametrize("reward", ["blocking", "blocking_later"])
def test_one_ctrl_c_ends_a_reward_that_blocks(
    cli: Cli, own_args: list[str], reward: str, options: list[str]
) -> None:
    finished = interrupted(cli, with_reward(cli, own_args, reward, *options))
    assert finished.code == 130
    assert "interrupted" in finished.err
    assert "Traceback" not in finished.err
    if reward == "blocking_later":
        assert "trying the reward" in finished.out
        assert checkpoints(cli.cwd / "runs/default")


def checkpoints(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir()]


def test_a_run_whose_evaluations_are_no_better_ends_early(cli: Cli, own_args: list[str]) -> None:
    """With a rate so small that the model stays as it is; its last policy is exported."""
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "50"),
        "--actor.optim.lr",
        "1e-12",
    ]
    out = cli.ok(*args, "--trainer.test-freq", "1", "--trainer.early-stopping-patience", "2")
    assert (
        "step 2: no improvement in 2 evaluations: the run ends early (trainer.early_stopping_patience)"
        in out
    )
    assert (cli.cwd / "runs/default/export/config.json").is_file()
    page = " ".join((cli.cwd / "runs/default/report.html").read_text().split())
    assert "Ended early, after 2 of 50 steps" in page
