"""`gcore-llm train` with batches sampled ahead of the training: which weights they are by, and that none is lost."""

import json
from pathlib import Path

import pytest
from command_line import Cli, metrics_of, option_set, read_rows, step_rows

# It may kill its process on the way.
REWARD = """
import os
import signal
from pathlib import Path

calls = 0


def reward(prompt, completion, row):
    global calls
    calls += 1
    if calls == {at} and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
"""


@pytest.fixture
def six_steps(own_args: list[str]) -> list[str]:
    return [
        *option_set(own_args, "--trainer.total-training-steps", "6"),
        "--algorithm.filter-groups",
        "False",
    ]


def scheduled(cli: Cli, args: list[str], schedule: str, *, kills_at: int = 0) -> list[str]:
    (cli.cwd / "killing.py").write_text(REWARD.replace("{at}", str(kills_at)))
    return [*option_set(args, "--reward", "killing.py:reward"), "--trainer.schedule", schedule]


def oldest_versions(run: Path) -> list[float]:
    return [row["sampling/oldest_version"] for row in step_rows(run)]


@pytest.mark.slow
def test_one_step_off_is_by_the_weights_before(cli: Cli, six_steps: list[str]) -> None:
    """However many controllers there are, and wherever the engine is; the first batch has no weights before."""
    args = scheduled(cli, six_steps, "one_step_off")
    cli.ok(*args, "--name", "one")
    cli.ok(*args, "--name", "two", "--controllers", "2")
    cli.ok(*args, "--name", "process", "--rollout.num-processes", "1")
    one, two, process = (cli.cwd / "runs" / name for name in ("one", "two", "process"))
    assert oldest_versions(one) == [0, 0, 1, 2, 3, 4]
    for other in (two, process):
        for row, expected in zip(metrics_of(other), metrics_of(one), strict=True):
            if other == two:
                # Two controllers divide the batch in another way, and so how many prompts are computed twice.
                assert row.keys() == expected.keys()
                for values in (row, expected):
                    values.pop("perf/computed_tokens", None)
            assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)
    rows = [json.loads(line) for line in (two / "spans.jsonl").read_text().splitlines()]
    assert all(
        {"sampling 0", "sampling 1", "engine 0", "trainer 0"} == row["devices"].keys()
        for row in rows
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("max_staleness", "partial_rollout"), [(1, "False"), (3, "False"), (2, "True"), (2, "wait")]
)
def test_async_is_no_staler_than_it_may_be(
    cli: Cli, six_steps: list[str], max_staleness: int, partial_rollout: str
) -> None:
    """Its engine samples while this process trains."""
    args = [*scheduled(cli, six_steps, "async"), "--rollout.max-staleness", str(max_staleness)]
    args += ["--rollout.partial-rollout", partial_rollout, "--trainer.log-samples", "1000"]
    cli.ok(*args, "--rollout.num-processes", "1", "--controllers", "2")
    run = cli.cwd / "runs/default"
    staleness = [step - version for step, version in enumerate(oldest_versions(run))]
    assert staleness[0] == 0
    assert 1 <= max(staleness) <= max_staleness
    assert [row["sampling/age/max"] for row in step_rows(run)] == staleness
    trained = [(row["prompt_index"], row["index"]) for row in read_rows(run / "samples.jsonl")]
    assert len(set(trained)) == len(trained) == 6 * 8 * 4
    assert "Age of samples" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("schedule", "partial_rollout"),
    [
        ("one_step_off", "False"),
        pytest.param("async", "False", marks=pytest.mark.slow),
        pytest.param("async", "True", marks=pytest.mark.slow),
    ],
)
def test_what_was_ahead_is_made_again(
    cli: Cli, six_steps: list[str], schedule: str, partial_rollout: str
) -> None:
    """A run that is killed trains on every prompt that it drew, in order, and on none twice."""
    calls_a_step = 8 * 4
    args = scheduled(cli, six_steps, schedule, kills_at=3 * calls_a_step + 5)
    args += [
        "--trainer.save-freq",
        "1",
        "--trainer.test-freq",
        "100",
        "--rollout.max-staleness",
        "2",
        *("--rollout.partial-rollout", partial_rollout, "--trainer.log-samples", "1000"),
    ]
    assert cli(*args).code == -9
    num_steps = len(step_rows(cli.cwd / "runs/default"))
    assert 0 <= num_steps <= 3
    cli.ok(*args)
    rows = step_rows(cli.cwd / "runs/default")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    samples = read_rows(cli.cwd / "runs/default/samples.jsonl")
    trained = {(row["prompt_index"], row["index"]) for row in samples}
    assert len(trained) == len(samples) == 6 * 8 * 4
    if partial_rollout == "True":
        return
    # Batches of one size: the position in the data set shows which prompts a step had.
    assert [row["sampling/epoch"] for row in rows] == pytest.approx(
        [8 * n / 36 for n in range(1, 7)]
    )


@pytest.mark.parametrize(
    "options", [[], ["--algorithm.old-log-probs", "trainer", "--actor.ppo-mini-batch-size", "4"]]
)
def test_engine_and_trainer_are_compared(cli: Cli, own_args: list[str], options: list[str]) -> None:
    """At every step, in every schedule in which a response is by the trainer's present weights."""
    for schedule in ("sync", "one_step_off", "async"):
        cli.ok(
            *scheduled(cli, own_args, schedule), *options, "--name", schedule, "--controllers", "2"
        )
        rows = step_rows(cli.cwd / "runs" / schedule)
        # The first batch is by the first weights in any schedule.
        compared = [row for row in rows if row["training/rollout_probs_diff_valid"]]
        assert compared == (rows if schedule != "async" else rows[: len(compared)]) != []
        for row in compared:
            assert (
                0
                < row["training/rollout_log_probs_diff_mean"]
                < row["training/rollout_log_probs_diff_max"]
                < 1e-4
            )
            assert 0 <= row["training/rollout_k3_kl"] < 1e-8
        steps = {row["step"]: row.get("training/rollout_distribution_kl") for row in compared}
        probed = [step for step, kl in steps.items() if kl is not None]
        assert probed == {"sync": [1, 2], "one_step_off": [*steps], "async": []}[schedule]
        assert all(abs(steps[step] or 0) < 1e-5 for step in probed)
