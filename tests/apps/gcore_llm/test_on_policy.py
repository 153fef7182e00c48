"""`gcore-llm train` with the schedule sync: every batch is by the present weights, for every batch size."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from command_line import Cli, assert_same_metrics, option_set, step_rows

from gcore_controller import Context, run_inline
from gcore_llm.config import TrainConfig
from gcore_llm.groups import Group, Response
from gcore_llm.prompts import Prompt, PromptSets
from gcore_llm.sampling import Sampling


def small_batches(own_args: list[str], size: int, *, filters: bool) -> list[str]:
    args = option_set(option_set(own_args, "--data.train-batch-size", str(size)), "--trainer.total-training-steps", "4")
    return [*args, "--algorithm.filter-groups", str(filters)]


@pytest.mark.parametrize("size", [1, 3])
def test_batches_of_any_size(cli: Cli, own_args: list[str], size: int) -> None:
    """One wave of as many prompts as the batch has, and the same training for any number of controllers."""
    args = small_batches(own_args, size, filters=False)
    cli.ok(*args, "--name", "one")
    rows = step_rows(cli.cwd / "runs/one")
    assert [row["sampling/oldest_version"] for row in rows] == [0, 1, 2, 3]
    assert [row["sampling/epoch"] * 36 for row in rows] == pytest.approx([size, 2 * size, 3 * size, 4 * size])
    for row in rows:
        assert (row["sampling/waves"], row["sampling/groups"], row["sampling/acceptance"]) == (1, size, 1)
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
    args = [*option_set(args, "--trainer.total-training-steps", "8"), "--algorithm.max-num-gen-batches", "8"]
    cli.ok(*args, "--name", "one")
    rows = step_rows(cli.cwd / "runs/one")
    assert [row["sampling/oldest_version"] for row in rows] == list(range(8))
    assert all(row["sampling/groups"] == 3 and 0 < row["sampling/acceptance"] <= 1 for row in rows)
    assert all("critic/score/mean" in row for row in rows)
    assert sum(row["sampling/stale_groups"] for row in rows) > 0
    cli.ok(*args, "--name", "four", "--controllers", "4")
    assert_same_metrics(cli.cwd / "runs/four", cli.cwd / "runs/one")


def group(ticket: int, version: int) -> Group:
    responses = [
        Response(
            token_ids=np.arange(3),
            log_probs=np.zeros(3, np.float32),
            weight_versions=np.full(3, version, np.int32),
            truncated=False,
            score=float(score),
        )
        for score in range(2)
    ]
    return Group(ticket=ticket, prompt_ids=np.arange(4), responses=responses)


async def harvested(config: TrainConfig, present: int, versions: list[int]) -> dict[str, float]:
    """The metrics of a batch that an engine with weights ``present`` answers with samples of these versions."""
    prompts = PromptSets(train=[Prompt(text="", token_ids=(1,), row={})] * 8, val=[], num_too_long=0)

    async def program(ctx: Context[Any]) -> dict[str, float]:
        sampling = Sampling(ctx, config, prompts, cast(Any, None), None)

        async def sample_wave(count: int) -> list[Group]:
            assert count == len(versions)
            return [group(ticket, version) for ticket, version in enumerate(versions)]

        async def exchanged(groups: list[Group], **_: object) -> list[Group]:
            return groups

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling, "_sample_wave", sample_wave)
            patch.setattr("gcore_llm.sampling.exchange", exchanged)
            return (await sampling.next()).metrics

    roles = SimpleNamespace(policy=SimpleNamespace(weight_version=present), policy_slots=None, comparison=None)
    [metrics] = await run_inline(program, roles=roles, world_size=1)
    return metrics


def test_a_sample_of_other_weights_is_an_error() -> None:
    config = TrainConfig()
    config = replace(config, data=replace(config.data, train_batch_size=2))
    assert asyncio.run(harvested(config, 5, [5, 5]))["sampling/oldest_version"] == 5
    message = r"prompt 1 has tokens by weights of version 4; expected version 5, the present one, alone"
    with pytest.raises(RuntimeError, match=message):
        asyncio.run(harvested(config, 5, [5, 4]))
    ahead = replace(config, trainer=replace(config.trainer, schedule="one_step_off"))
    assert asyncio.run(harvested(ahead, 5, [5, 4]))["sampling/oldest_version"] == 4
