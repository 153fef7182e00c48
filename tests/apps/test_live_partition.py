"""Engines that move between the policy and the judge while a run goes on."""

from pathlib import Path

import pytest
from command_line import Cli, assert_same_metrics, option_set, read_rows

from gcore_controller import Span
from gcore_llm.on_ray.live_partition import LivePartition
from gcore_llm.on_ray.room import Sizes


def span(stage: str, start_s: float, end_s: float) -> Span:
    return Span(stage=stage, start_s=start_s, end_s=end_s)


def step_of(partition: LivePartition, *, gen_s: float, reward_s: float) -> None:
    """A step in which all generation takes so many engine-seconds, and all verdicts so many judge-seconds."""
    sizes = partition.sizes
    gen_end_s = gen_s / sizes.engines
    # Verdicts begin as responses end, and the last comes soon after the last response at the earliest.
    reward_end_s = max(reward_s / sizes.judges, gen_end_s * 1.01)
    devices = {f"engine {i}": [span("sync", 0.0, 0.1), span("gen", 1.0, 1.0 + gen_end_s)] for i in range(sizes.engines)}
    for i in range(sizes.judges):
        busy_s = reward_s / sizes.judges
        devices[f"judge {i}"] = [span("reward", 1.0 + reward_end_s - busy_s, 1.0 + reward_end_s)]
    partition.observe(reward_end_s, devices)


@pytest.mark.parametrize(
    ("gen_s", "reward_s", "engines", "judges"),
    [(100.0, 100.0, 4, 4), (700.0, 100.0, 7, 1), (100.0, 700.0, 2, 6), (300.0, 100.0, 6, 2)],
)
def test_engines_follow_the_load(gen_s: float, reward_s: float, engines: int, judges: int) -> None:
    """Two controllers keep two engines of the policy."""
    partition = LivePartition(Sizes(controllers=2, engines=4, judges=4, ranks=3), horizon_steps=20)
    for _ in range(12):
        step_of(partition, gen_s=gen_s, reward_s=reward_s)
    assert partition.sizes == Sizes(controllers=2, engines=engines, judges=judges, ranks=3)
    # And back.
    for _ in range(12):
        step_of(partition, gen_s=400.0, reward_s=400.0)
    assert partition.sizes.engines == 4


def test_a_step_without_verdicts_tells_nothing() -> None:
    partition = LivePartition(Sizes(controllers=1, engines=2, judges=2, ranks=1), horizon_steps=20)
    for _ in range(5):
        partition.observe(1.0, {"engine 0": [span("gen", 0.0, 1.0)], "trainer 0": [span("train", 1.0, 2.0)]})
    assert partition.sizes.engines == 2


def test_a_run_gives_an_engine_to_its_judge(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """Verdicts that take much longer than responses; samples and training are those of a run in one process."""
    judge = ["--reward-model.kind", "judge", "--reward-model.path", str(tiny), "--reward-model.judge.pattern", r"(\d)"]
    options = ["--reward-model.judge.max-response-length", "96", "--reward-model.judge.unparsable-score", "0.25"]
    args = option_set([*own_args, *judge, *options], "--trainer.total-training-steps", "6")
    args = [*args, "--reward-model.judge.n", "4", "--trainer.tensorboard", "False", "--trainer.test-freq", "1000"]
    cli.ok(*args, "--name", "inline")
    engines = ["--rollout.num-processes", "2", "--reward-model.judge.num-processes", "1"]
    finished = cli(
        *args, "--runtime", "ray", *engines, "--placement.strategy", "dynamic", "--placement.horizon-steps", "1000"
    )
    assert finished.code == 0, finished
    assert (
        "1 engine moved from the policy to the judge: 1 generate and 2 judge now; going on after step" in finished.out
    )
    assert_same_metrics(cli.cwd / "runs/default", cli.cwd / "runs/inline")
    last = read_rows(cli.cwd / "runs/default/spans.jsonl")[-1]["devices"]
    assert {"engine 0", "judge 0", "judge 1"} == {name for name in last if not name.startswith("trainer")}
