"""`gcore-llm train` with responses that take several steps, or several turns."""

from pathlib import Path

import pytest
from command_line import Cli, option_set, step_rows

PARTIAL = [
    *("--rollout.partial-rollout", "True", "--rollout.over-sample-rate", "1"),
    *("--data.max-response-length", "48", "--actor.optim.lr", "1e-2", "--trainer.save-freq", "1"),
]


def args_of(own_args: list[str], model: Path, num_steps: int) -> list[str]:
    args = option_set(own_args, "--model", str(model))
    for option, value in zip(PARTIAL[::2], PARTIAL[1::2], strict=True):
        args = option_set(args, option, value) if option in args else [*args, option, value]
    return option_set(args, "--trainer.total-training-steps", str(num_steps))


def test_long_responses_continue_in_later_steps(
    cli: Cli, own_args: list[str], chatty: Path
) -> None:
    """Unfinished samples are kept in checkpoints: an interrupted run continues as one that was not."""
    cli.ok(*args_of(own_args, chatty, 4), "--name", "whole")
    rows = step_rows(cli.cwd / "runs/whole")
    assert all(row["sampling/unfinished_groups"] > 0 for row in rows)
    assert all(row["sampling/groups"] == 8 for row in rows)
    # Generation in step s is by weights s - 1; some tokens are older.
    assert any(row["sampling/oldest_version"] < row["step"] - 1 for row in rows)
    assert all(row["response_length/max"] <= 48 for row in rows)
    # The engine's log-probs are those of the weights that made each token, so they differ from the present ones.
    assert rows[0]["training/rollout_probs_diff_mean"] < 1e-5
    assert rows[-1]["training/rollout_probs_diff_mean"] > 1e-4
    # Those by the present weights are compared, and those alone.
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)

    cli.ok(*args_of(own_args, chatty, 2), "--name", "parted")
    cli.ok(*args_of(own_args, chatty, 4), "--name", "parted")
    for row, expected in zip(step_rows(cli.cwd / "runs/parted"), rows, strict=True):
        same = [
            name
            for name in expected
            if not name.startswith(("timing_s/", "perf/", "ledger/", "forecast/"))
        ]
        assert {name: row[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.slow
def test_long_responses_wait_for_a_step_of_their_own(
    cli: Cli, own_args: list[str], chatty: Path
) -> None:
    """Deferred prompts are kept in checkpoints: an interrupted run continues as one that was not."""
    tail = [
        "--rollout.tail-batching",
        "True",
        "--rollout.over-sample-rate",
        "1",
        "--rollout.short-response-length",
        "24",
    ]
    args = [*args_of(own_args, chatty, 5), *tail]
    for name in ("--rollout.partial-rollout", "--rollout.over-sample-rate"):
        place = args.index(name)
        del args[place : place + 2]
    cli.ok(*args, "--name", "whole")
    rows = step_rows(cli.cwd / "runs/whole")
    assert all(row["sampling/groups"] == 8 for row in rows)
    assert any(row["sampling/long_round"] for row in rows)
    assert all(
        row["sampling/deferred_groups"] > 0 for row in rows if not row["sampling/long_round"]
    )
    assert all(row["sampling/oldest_version"] == row["step"] - 1 for row in rows)

    cli.ok(*option_set(args, "--trainer.total-training-steps", "2"), "--name", "parted")
    cli.ok(*args, "--name", "parted")
    for row, expected in zip(step_rows(cli.cwd / "runs/parted"), rows, strict=True):
        same = [
            name
            for name in expected
            if not name.startswith(("timing_s/", "perf/", "ledger/", "forecast/"))
        ]
        assert {name: row[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.slow
def test_stale_responses_are_generated_again(cli: Cli, own_args: list[str], chatty: Path) -> None:
    cli.ok(*args_of(own_args, chatty, 4), "--rollout.max-staleness", "1")
    rows = step_rows(cli.cwd / "runs/default")
    assert all(row["sampling/oldest_version"] >= row["step"] - 2 for row in rows)


WORLD = '''
from gcore_agents import Opening, Reply, Tool, ToolEnvironment


class Guessing:
    """Wants one character after the other, and says so."""

    def __init__(self, row):
        self.wanted = iter("abc")
        self.answer = str(row["answer"])

    async def reset(self):
        return Opening(messages=[{"role": "user", "content": f"{self.answer}: "}])

    async def step(self, completion):
        wanted = next(self.wanted, None)
        if wanted is None:
            return Reply(done=True)
        return Reply(messages=[{"role": "user", "content": f" {wanted}? "}], reward=float(wanted in completion))


def broken(row):
    class Broken(Guessing):
        async def step(self, completion):
            raise RuntimeError("the board fell over")

    return Broken(row)
'''


def multi_turn_args(cli: Cli, own_args: list[str], chatty: Path, function: str) -> list[str]:
    (cli.cwd / "world.py").write_text(WORLD)
    args = option_set(
        option_set(own_args, "--model", str(chatty)), "--data.max-response-length", "128"
    )
    return [*args, "--rollout.multi-turn.environment", f"world.py:{function}"]


@pytest.mark.parametrize("has_reward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_environment(cli: Cli, own_args: list[str], chatty: Path, has_reward: bool) -> None:
    args = multi_turn_args(cli, own_args, chatty, "Guessing")
    cli.ok(*(args if has_reward else option_set(args, "--reward", "")))
    rows = step_rows(cli.cwd / "runs/default")
    for row in rows:
        assert 1 < row["reward/turns/mean"] <= 4
        assert row["actor/grad_norm"] > 0
        # Log-probs of what the policy wrote, after the text of its environment, are the trainer's.
        assert row["training/rollout_probs_diff_mean"] < 1e-5
        assert row["training/rollout_log_probs_diff_max"] < 1e-4
        if not has_reward:
            assert row["critic/score/mean"] == pytest.approx(row["reward/environment/mean"])


@pytest.mark.slow
def test_episodes_go_on_in_the_next_step(cli: Cli, own_args: list[str], chatty: Path) -> None:
    args = multi_turn_args(cli, own_args, chatty, "Guessing")
    args = option_set(args, "--trainer.total-training-steps", "4")
    cli.ok(*args, "--rollout.partial-rollout", "True", "--rollout.over-sample-rate", "1")
    rows = step_rows(cli.cwd / "runs/default")
    assert all(row["sampling/unfinished_groups"] > 0 for row in rows)
    assert all(row["sampling/groups"] == 8 for row in rows)
    assert any(row["sampling/oldest_version"] < row["step"] - 1 for row in rows)
    for row in rows:
        assert 1 < row["reward/turns/mean"] <= 4
        assert row["training/rollout_log_probs_diff_max"] < 1e-4


@pytest.mark.slow
def test_long_episodes_wait_for_a_step_of_their_own(
    cli: Cli, own_args: list[str], chatty: Path
) -> None:
    args = multi_turn_args(cli, own_args, chatty, "Guessing")
    args = option_set(args, "--trainer.total-training-steps", "4")
    options = ["--rollout.tail-batching", "True", "--rollout.over-sample-rate", "1"]
    cli.ok(*args, *options, "--rollout.short-response-length", "100")
    rows = step_rows(cli.cwd / "runs/default")
    assert all(row["sampling/oldest_version"] == row["step"] - 1 for row in rows)
    is_long = [bool(row["sampling/long_round"]) for row in rows]
    assert set(is_long) == {True, False}
    for row in rows:
        if row["sampling/long_round"]:
            assert row["response_length/max"] >= 100
        else:
            assert row["sampling/deferred_groups"] > 0
            assert row["response_length/max"] < 100


def test_the_embedded_model_in_an_environment(cli: Cli) -> None:
    """It is warmed up on single turns, whose worked examples are known."""
    (cli.cwd / "world.py").write_text(WORLD)
    args = ["--warmup.max-steps", "2", "--warmup.batch-size", "8", "--task.num-train", "64"]
    args += ["--task.num-val", "8", "--data.train-batch-size", "2", "--rollout.n", "2"]
    args += ["--data.max-response-length", "64", "--trainer.total-training-steps", "1"]
    cli.ok("train", *args, "--rollout.multi-turn.environment", "world.py:Guessing")
    [row] = step_rows(cli.cwd / "runs/default")
    assert row["reward/turns/mean"] > 1


def test_turns_that_are_cut_off(cli: Cli, own_args: list[str], chatty: Path) -> None:
    """The shares of how episodes ended are metrics, and a large share of episodes that were cut off is a warning."""
    args = multi_turn_args(cli, own_args, chatty, "Guessing")
    out = cli.ok(*args, "--rollout.multi-turn.max-tokens-per-turn", "2")
    for row in step_rows(cli.cwd / "runs/default"):
        shares = {
            name.rpartition("/")[2]: share
            for name, share in row.items()
            if name.startswith("multi_turn/end/")
        }
        assert shares.keys() == {"done", "truncated_turn", "length", "max_turns", "timeout"}
        assert sum(shares.values()) == pytest.approx(1)
        assert shares["truncated_turn"] > 0.5
    assert (
        " ".join(out.split()).count(
            "of the episodes ended because a turn was cut off before its end"
        )
        == 1
    )


@pytest.mark.slow
def test_a_judge_whose_verdict_is_read(cli: Cli, own_args: list[str], chatty: Path) -> None:
    """Responses are handed back with the judge's words, and the last one's score counts."""
    args = option_set(
        option_set(own_args, "--model", str(chatty)), "--data.max-response-length", "96"
    )
    args = [*option_set(args, "--reward", ""), "--rollout.multi-turn.max-revisions", "2"]
    judge = ["--reward-model.kind", "judge", "--reward-model.path", str(chatty)]
    for name, value in {
        "pattern": r"(\d)",
        "unparsable-score": "0",
        "max-response-length": "16",
    }.items():
        judge += [f"--reward-model.judge.{name}", value]
    judge += ["--reward-model.judge.score-range", "0", "9"]
    cli.ok(*args, *judge)
    for row in step_rows(cli.cwd / "runs/default"):
        assert 1 < row["reward/turns/mean"] <= 3
        assert row["critic/score/mean"] == pytest.approx(row["reward/environment/mean"])
        assert -1e-9 < row["critic/score/min"] <= row["critic/score/max"] < 1 + 1e-9
        assert row["training/rollout_probs_diff_mean"] < 1e-5


@pytest.mark.slow
def test_a_broken_environment(cli: Cli, own_args: list[str], chatty: Path) -> None:
    args = multi_turn_args(cli, own_args, chatty, "broken")
    finished = cli(*args)
    assert finished.code == 2
    assert "step 1: RuntimeError: the board fell over" in " ".join(finished.err.split())
    args += ["--reward-calls.max-failed-share", "0.5"]
    assert "The most frequent error: RuntimeError at world.py:" in " ".join(
        cli.refused(*args).split()
    )
    finished = cli(*args, "--reward-calls.max-failed-share", "1", "--name", "dropped")
    assert (finished.code, finished.err) == (3, "")
    assert all(row["sampling/groups"] == 0 for row in step_rows(cli.cwd / "runs/dropped"))
    assert all(row["sampling/dropped_groups"] > 0 for row in step_rows(cli.cwd / "runs/dropped"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--rollout.multi-turn.environment", "none.py:f"],
            "rollout.multi_turn.environment is 'none.py:f': no such file",
        ),
        (
            ["--rollout.multi-turn.max-assistant-turns", "0"],
            "max_assistant_turns is 0; expected 1 or more",
        ),
        (
            ["--rollout.over-sample-rate", "-1"],
            "rollout.over_sample_rate is -1.0; expected a finite number, 0 or more",
        ),
        (["--rollout.max-staleness", "0"], "rollout.max_staleness is 0; expected 1 or more"),
        (
            [
                "--rollout.multi-turn.max-revisions",
                "2",
                "--rollout.multi-turn.environment",
                "x.py:f",
            ],
            "rollout.multi_turn.max_revisions is 2; expected 0 with",
        ),
        (
            ["--rollout.multi-turn.good-enough", "inf"],
            "good_enough is inf; expected a finite number",
        ),
        (
            ["--rollout.partial-rollout", "True", "--algorithm.adv-estimator", "remax"],
            "expected false with algorithm.adv_estimator 'remax'",
        ),
        *(
            (
                ["--rollout.tail-batching", "True", *options],
                f"rollout.tail_batching is true; expected false with {other}",
            )
            for other, options in (
                ("trainer.schedule 'async'", ["--trainer.schedule", "async"]),
                ("rollout.partial_rollout true", ["--rollout.partial-rollout", "True"]),
            )
        ),
        (
            ["--rollout.tail-batching", "True", "--rollout.over-sample-rate", "0"],
            "rollout.over_sample_rate is 0.0; expected above 0 with rollout.tail_batching",
        ),
        (
            ["--rollout.tail-batching", "True", "--rollout.short-response-length", "4096"],
            "rollout.short_response_length is 4096; expected below data.max_response_length=",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_settings(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())
    assert list(cli.cwd.iterdir()) == []
