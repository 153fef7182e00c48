"""`gcore-llm train` with the schedule sync: every batch is by the present weights, for every batch size."""

import pytest
from command_line import Cli, assert_same_metrics, option_set, step_rows


def small_batches(own_args: list[str], size: int, *, filters: bool) -> list[str]:
    args = option_set(
        option_set(own_args, "--data.train-batch-size", str(size)),
        "--trainer.total-training-steps",
        "4",
    )
    return [*args, "--algorithm.filter-groups", str(filters)]


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_any_size(cli: Cli, own_args: list[str], size: int) -> None:
    """One wave of as many prompts as the batch has, and the same training for any number of controllers."""
    args = small_batches(own_args, size, filters=False)
    cli.ok(*args, "--name", "one")
    rows = step_rows(cli.cwd / "runs/one")
    assert [row["sampling/oldest_version"] for row in rows] == [0, 1, 2, 3]
    assert [row["sampling/epoch"] * 36 for row in rows] == pytest.approx(
        [size, 2 * size, 3 * size, 4 * size]
    )
    for row in rows:
        assert (row["sampling/waves"], row["sampling/groups"], row["sampling/acceptance"]) == (
            1,
            size,
            1,
        )
        assert row["sampling/stale_groups"] == 0
        assert "critic/score/mean" in row
    cli.ok(*args, "--name", "four", "--controllers", "4")
    assert_same_metrics(cli.cwd / "runs/four", cli.cwd / "runs/one")


def test_surplus_groups_are_not_trained_on(cli: Cli, own_args: list[str]) -> None:
    """Scores that differ within a third of the groups: waves that make up for rejected prompts find too many."""
    (cli.cwd / "some.py").write_text("""
def reward(prompt, completion, row):
    return sum(ord(c) % 2 == 0 for c in completion) if row["answer"] % 3 else 0.0
""")
    args = option_set(small_batches(own_args, 3, filters=True), "--reward", "some.py:reward")
    args = [
        *option_set(args, "--trainer.total-training-steps", "8"),
        "--algorithm.max-num-gen-batches",
        "8",
    ]
    cli.ok(*args, "--name", "one")
    rows = step_rows(cli.cwd / "runs/one")
    assert [row["sampling/oldest_version"] for row in rows] == list(range(8))
    assert all(row["sampling/groups"] == 3 and 0 < row["sampling/acceptance"] <= 1 for row in rows)
    assert all("critic/score/mean" in row for row in rows)
    assert sum(row["sampling/stale_groups"] for row in rows) > 0
    cli.ok(*args, "--name", "four", "--controllers", "4")
    assert_same_metrics(cli.cwd / "runs/four", cli.cwd / "runs/one")
