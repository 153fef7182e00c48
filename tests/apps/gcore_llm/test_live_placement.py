"""Engines that move between the policy and the judge while a run continues, or are both in turns."""

import asyncio
import itertools
import json
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from command_line import Cli, assert_same_metrics, option_set, read_rows
from hypothesis import HealthCheck, given, settings, strategies as st

from gcore_controller import DeviceWork, Round, Sizes, Span
from gcore_rollout import LendingEngines
from gcore_runs.actor_engines import role_shares
from gcore_runs.live_placement import LivePlacement
from gcore_runs.on_ray import arrange_as_noticed
from gcore_runs.settings.sections import PlacementConfig

DYNAMIC, AUTO = PlacementConfig(strategy="dynamic"), PlacementConfig(strategy="auto")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a placement keeps its state."""
    return tmp_path / "partition.json"


WHOLE = Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=1)


def span(stage: str, start_s: float, end_s: float) -> Span:
    return Span(stage=stage, start_s=start_s, end_s=end_s)


def observe(
    placement: LivePlacement, metrics: dict[str, float], devices: dict[str, list[Span]]
) -> None:
    """A step of one round."""
    generated = {
        name.removeprefix("perf/generated/"): int(value) for name, value in metrics.items()
    }
    work = DeviceWork(spans=devices, generated=Counter(generated))
    placement.observe(metrics, Round(number=1, num_prompts=8, work=work))


def step_of(placement: LivePlacement, *, gen_s: float, reward_s: float) -> None:
    """A step in which all generation takes so many engine-seconds, and all verdicts so many judge-seconds."""
    sizes = placement.sizes
    gen_end_s = gen_s / sizes.engines
    # Verdicts begin as responses end, and the last comes soon after the last response at the earliest.
    reward_end_s = max(reward_s / sizes.num_judges, gen_end_s * 1.01)
    devices = {
        f"engine {i}": [span("sync", 0.0, 0.1), span("gen", 1.0, 1.0 + gen_end_s)]
        for i in range(sizes.engines)
    }
    for i in range(sizes.num_judges):
        busy_s = reward_s / sizes.num_judges
        devices[f"judge {i}"] = [span("reward", 1.0 + reward_end_s - busy_s, 1.0 + reward_end_s)]
    observe(placement, {"timing_s/step": reward_end_s}, devices)


@pytest.mark.parametrize(
    ("gen_s", "reward_s", "engines", "judges"),
    [(100.0, 100.0, 4, 4), (700.0, 100.0, 7, 1), (100.0, 700.0, 2, 6), (300.0, 100.0, 6, 2)],
)
def test_engines_follow_the_load(
    gen_s: float, reward_s: float, engines: int, judges: int, file: Path
) -> None:
    """Two controllers keep two engines of the policy."""
    placement = LivePlacement(
        Sizes(controllers=2, engines=4, judges={"judge": 4}, ranks=3), DYNAMIC, file
    )
    for _ in range(12):
        step_of(placement, gen_s=gen_s, reward_s=reward_s)
    assert placement.sizes == Sizes(
        controllers=2, engines=engines, judges={"judge": judges}, ranks=3
    )
    # And back.
    for _ in range(12):
        step_of(placement, gen_s=400.0, reward_s=400.0)
    assert placement.sizes.engines == 4


@pytest.mark.parametrize("busy", ["gen", "reward", "reward/style"])
def test_engines_of_three_roles_follow_the_load(busy: str, file: Path) -> None:
    """Ten go to the role that has 8 of 10 parts of the work, and back; each judge keeps one."""
    whole = Sizes(controllers=1, engines=4, judges={"judge": 3, "judge_style": 3}, ranks=1)
    placement = LivePlacement(whole, DYNAMIC, file)

    def step(work_s: dict[str, float]) -> list[int]:
        sizes = placement.sizes
        counts = [sizes.engines, *sizes.judges.values()]
        of_each = dict(zip(work_s, counts, strict=True))
        devices = {
            f"{stage} {i}": [span(stage, 1.0, 1.0 + seconds / of_each[stage])]
            for stage, seconds in work_s.items()
            for i in range(of_each[stage])
        }
        observe(placement, {"timing_s/step": 1.0}, devices)
        return [placement.sizes.engines, *placement.sizes.judges.values()]

    stages, found = ("gen", "reward", "reward/style"), [0, 0, 0]
    for _ in range(12):
        found = step({stage: 800.0 if stage == busy else 100.0 for stage in stages})
    assert found == [8 if stage == busy else 1 for stage in stages]
    assert placement.metrics()["placement/judges/judge_style"] == found[2]
    for _ in range(12):
        found = step({"gen": 400.0, "reward": 300.0, "reward/style": 300.0})
    assert found == [4, 3, 3]


def test_an_engine_that_is_hardly_full_does_little(file: Path) -> None:
    """A judge that serves one verdict of four is busy all the time, and still one of two is enough."""
    placement = LivePlacement(
        Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=1), DYNAMIC, file
    )
    stages = {"engine": "gen", "judge": "reward"}
    full = {
        f"{role} {i}": [span(stage, 0.0, 10.0)] for role, stage in stages.items() for i in range(2)
    }

    def measured(*, gen: float, reward: float) -> dict[str, float]:
        return {"timing_s/step": 20.0, "perf/generated/gen": gen, "perf/generated/reward": reward}

    observe(placement, measured(gen=4000.0, reward=1000.0), full)
    for _ in range(8):
        sizes = placement.sizes
        gen_s = 40.0 / sizes.engines
        devices = {f"engine {i}": [span("gen", 0.0, gen_s)] for i in range(sizes.engines)}
        devices |= {
            f"judge {i}": [span("reward", 0.5, gen_s + 0.3)] for i in range(sizes.num_judges)
        }
        observe(placement, measured(gen=8000.0, reward=500.0), devices)
    assert placement.sizes == Sizes(controllers=1, engines=3, judges={"judge": 1}, ranks=1)


@given(st.lists(st.integers(3, 6), min_size=1, max_size=5), st.data())
def test_each_controller_keeps_engines_of_all_roles(
    num_places: list[int], data: st.DataObject
) -> None:
    num_controllers = len(num_places)
    first = data.draw(st.integers(num_controllers, sum(num_places) - 2 * num_controllers))
    second = data.draw(st.integers(num_controllers, sum(num_places) - first - num_controllers))
    counts = [first, second, sum(num_places) - first - second]
    shares = [role_shares(counts, num_places, rank) for rank in range(num_controllers)]
    assert [sum(own) for own in zip(*shares, strict=True)] == counts
    assert [sum(share) for share in shares] == num_places
    assert min(map(min, shares)) >= 1


def test_a_step_without_verdicts_is_not_evidence(file: Path) -> None:
    placement = LivePlacement(
        Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=1), DYNAMIC, file
    )
    for _ in range(5):
        devices = {"engine 0": [span("gen", 0.0, 1.0)], "trainer 0": [span("train", 1.0, 2.0)]}
        observe(placement, {"timing_s/step": 1.0}, devices)
    assert placement.sizes.engines == 2


def turns_of(placement: LivePlacement, *, gen_s: float, reward_s: float, swap_s: float) -> None:
    """A step in which all devices generate, then all judge."""
    count = placement.sizes.engines
    times_s = [
        1.0,
        1.0 + gen_s / count,
        1.0 + gen_s / count + swap_s,
        1.0 + (gen_s + reward_s) / count + swap_s,
    ]
    row = [span("gen", *times_s[:2]), span("swap", *times_s[1:3]), span("reward", *times_s[2:])]
    devices = {f"engine {i}": row for i in range(count)}
    observe(placement, {"timing_s/step": times_s[3], "sampling/waves": 1.0}, devices)


def test_two_devices_take_turns_where_one_role_has_most_to_do(file: Path) -> None:
    placement = LivePlacement(
        Sizes(controllers=1, engines=1, judges={"judge": 1}, ranks=1), AUTO, file
    )
    placement.swap_s = 2.0
    for _ in range(3):
        assert not placement.sizes.in_turns
        step_of(placement, gen_s=90.0, reward_s=10.0)
    assert placement.sizes == Sizes(
        controllers=1, engines=2, judges={"judge": 2}, ranks=1, in_turns=True
    )
    # The law was right, and while swaps are short, it stays; when they take longer, it does not.
    for _ in range(6):
        turns_of(placement, gen_s=90.0, reward_s=10.0, swap_s=2.0)
    assert placement.sizes.in_turns
    for _ in range(3):
        turns_of(placement, gen_s=90.0, reward_s=10.0, swap_s=70.0)
    assert placement.sizes == Sizes(controllers=1, engines=1, judges={"judge": 1}, ranks=1)
    assert placement.swap_s == pytest.approx(70.0)


def test_swaps_before_sampling_are_not_those_of_the_placement(file: Path) -> None:
    """Where ranks have the devices between two steps, engines sleep and wake with any placement."""
    whole = Sizes(controllers=1, engines=1, judges={"judge": 1}, ranks=2, ranks_in_turns=True)
    placement = LivePlacement(whole, AUTO, file)
    placement.swap_s = 2.0
    for _ in range(3):
        step_of(placement, gen_s=90.0, reward_s=10.0)
    assert placement.sizes == replace(whole, engines=2, judges={"judge": 2}, in_turns=True)
    row = [
        span("swap", 0, 50),
        span("gen", 100, 145),
        span("swap", 145, 147),
        span("reward", 147, 152),
    ]
    observe(
        placement,
        {"timing_s/step": 200.0, "sampling/waves": 1.0},
        {f"device {i}": row for i in range(2)},
    )
    assert placement.swap_s == pytest.approx(2.0)


@pytest.mark.parametrize("config", [DYNAMIC, AUTO], ids=lambda config: config.strategy)
def test_a_resumed_run_has_the_placement_that_it_was_left_with(
    config: PlacementConfig, tmp_path: Path
) -> None:
    """Made again after each step, it decides as one that went on; the load changes on the way."""
    sizes = (
        replace(WHOLE, engines=1, judges={"judge": 1})
        if config == AUTO
        else replace(WHOLE, engines=3)
    )

    def made(name: str) -> LivePlacement:
        placement = LivePlacement(sizes, config, tmp_path / name)
        placement.swap_s = 2.0 if placement.swap_s is None else placement.swap_s
        return placement

    lasting, seen = made("one.json"), list[Sizes]()
    for gen_s, reward_s in [(90.0, 10.0)] * 6 + [(50.0, 60.0)] * 6:
        resumed = made("other.json")
        for placement in (lasting, resumed):
            if placement.sizes.in_turns:
                turns_of(placement, gen_s=gen_s, reward_s=reward_s, swap_s=2.0)
            else:
                step_of(placement, gen_s=gen_s, reward_s=reward_s)
        assert resumed.sizes == lasting.sizes
        seen.append(lasting.sizes)
    assert any(sizes != seen[0] for sizes in seen)
    assert made("other.json").sizes == lasting.sizes


def wave_of(
    placement: LivePlacement,
    number: int,
    *,
    num_prompts: int,
    gen_s: float,
    reward_s: float,
    swap_s: float = 0.0,
) -> Round:
    """A wave, or the last round of a step, in which each prompt takes so many engine-seconds and judge-seconds.

    A device that changes its role while it lasts needs ``swap_s``.
    """
    sizes, start_s = placement.sizes, 100.0 * number
    work_s = {"gen": (gen_s, sizes.engines), "reward": (reward_s, sizes.num_judges)}
    spans = {
        f"{stage} {i}": [span(stage, start_s, start_s + num_prompts * seconds / count)]
        for stage, (seconds, count) in work_s.items()
        for i in range(count)
    }
    if swap_s:
        spans["reward 0"].append(span("swap", start_s - 1.0, start_s - 1.0 + swap_s))
    return Round(number=number, num_prompts=num_prompts, work=DeviceWork(spans=spans))


def test_engines_move_between_the_waves_of_a_step(file: Path) -> None:
    """After a jump of the load the second wave of its first step runs on another partition, and the third on the best.

    Placement starts again from its file after each round, as after a failure, and decides the same.
    """
    whole = Sizes(controllers=1, engines=4, judges={"judge": 4}, ranks=1)
    placement, metrics = LivePlacement(whole, DYNAMIC, file), {"timing_s/step": 10.0}
    for _ in range(4):
        placement.observe_wave(wave_of(placement, 1, num_prompts=8, gen_s=1.0, reward_s=3.0))
        placement.observe(metrics, wave_of(placement, 2, num_prompts=4, gen_s=1.0, reward_s=3.0))
    assert placement.sizes.engines == 2
    found: list[int] = []
    for number in (1, 2):
        placement.observe_wave(
            wave_of(placement, number, num_prompts=8, gen_s=9.0, reward_s=3.0, swap_s=0.5)
        )
        found.append(placement.sizes.engines)
        assert LivePlacement(whole, DYNAMIC, file).sizes == placement.sizes
    assert 2 < found[0] <= found[1] == 6
    placement.observe(metrics, wave_of(placement, 3, num_prompts=2, gen_s=9.0, reward_s=3.0))
    assert placement.sizes.engines == 6
    assert placement.metrics()["placement/move_within_s"] == pytest.approx(0.5)


def test_a_move_within_a_step_must_earn_itself_in_the_next_round(file: Path) -> None:
    """The first jump is followed after its wave, the second only after its step, because a change took 20 s."""
    placement = LivePlacement(
        Sizes(controllers=1, engines=4, judges={"judge": 4}, ranks=1), DYNAMIC, file
    )
    seen: list[int] = []
    for gen_s, swap_s in [(1.0, 0.0), (3.0, 20.0), (1.0, 0.0)]:
        for number in (1, 2):
            placement.observe_wave(
                wave_of(
                    placement, number, num_prompts=8, gen_s=gen_s, reward_s=4 - gen_s, swap_s=swap_s
                )
            )
            seen.append(placement.sizes.engines)
        placement.observe(
            {"timing_s/step": 30.0},
            wave_of(placement, 3, num_prompts=8, gen_s=gen_s, reward_s=4 - gen_s),
        )
        seen.append(placement.sizes.engines)
    assert seen[:3] == [2, 2, 2]
    assert seen[3] > 2
    assert seen[5] == seen[6] == seen[7] == 6 > seen[8]
    assert placement.metrics()["placement/move_within_s"] == pytest.approx(20.0)


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_prompt_of_a_step_counts_once(
    tmp_path: Path, steps: list[list[int]], share: bool
) -> None:
    """Where controllers share a judge, nothing can move within a step, which is then one round."""
    whole = Sizes(controllers=2, engines=2, judges={"judge": 1 if share else 4}, ranks=1)
    (tmp_path / "partition.json").unlink(missing_ok=True)
    placement = LivePlacement(whole, DYNAMIC, tmp_path / "partition.json")
    for waves in steps:
        *reported, last = (
            wave_of(placement, number, num_prompts=count, gen_s=2.0, reward_s=1.0)
            for number, count in enumerate(waves, start=1)
        )
        for wave in reported:
            placement.observe_wave(wave)
        placement.observe({"timing_s/step": 10.0}, last)
    history = json.loads((tmp_path / "partition.json").read_text())["dynamic"]["history"]
    assert all(work == pytest.approx([2.0, 1.0]) for work, *_ in history), "of a prompt"
    expected = (
        [sum(waves) for waves in steps] if share else [count for waves in steps for count in waves]
    )
    assert [sizes[0] for *_, sizes, _ in history] == expected[-len(history) :]


def test_a_change_that_outlasts_a_wave_is_measured_whole(file: Path) -> None:
    placement = LivePlacement(
        Sizes(controllers=1, engines=2, judges={"judge": 2}, ranks=1), DYNAMIC, file
    )
    wave = wave_of(placement, 1, num_prompts=2, gen_s=1.0, reward_s=1.0)
    wave.work.spans["engine 0"] = [span("swap", 90.0, 99.0), span("swap", 100.5, 101.0)]
    placement.observe_wave(wave)
    last = wave_of(placement, 2, num_prompts=2, gen_s=1.0, reward_s=1.0)
    last.work.spans["engine 0"] = [span("swap", 101.0 + 1e-5, 103.0)]
    placement.observe({"timing_s/step": 10.0}, last)
    assert placement.metrics()["placement/move_within_s"] == pytest.approx(2.5, abs=1e-4)


def test_nothing_moves_within_a_step_of_turns(file: Path) -> None:
    placement = LivePlacement(
        Sizes(controllers=1, engines=1, judges={"judge": 1}, ranks=1), AUTO, file
    )
    placement.swap_s = 2.0
    for _ in range(3):
        step_of(placement, gen_s=90.0, reward_s=10.0)
    assert placement.sizes.in_turns
    before = placement.sizes
    for number in (1, 2):
        placement.observe_wave(
            wave_of(placement, number, num_prompts=4, gen_s=10.0, reward_s=1.0, swap_s=70.0)
        )
        assert placement.sizes == before
    assert placement.swap_s == 2.0
    last = wave_of(placement, 3, num_prompts=4, gen_s=10.0, reward_s=1.0, swap_s=1.0)
    placement.observe({"timing_s/step": 10.0, "sampling/waves": 3.0}, last)
    # All turns of the step.
    assert placement.swap_s == pytest.approx((70.0 + 70.0 + 1.0) / 3)


def test_a_placement_of_other_sizes_or_settings_is_not_resumed(file: Path) -> None:
    placement = LivePlacement(WHOLE, DYNAMIC, file)
    for _ in range(12):
        step_of(placement, gen_s=300.0, reward_s=100.0)
    assert LivePlacement(WHOLE, DYNAMIC, file).sizes.engines == 3
    fewer = replace(WHOLE, ranks=2)
    assert LivePlacement(fewer, DYNAMIC, file).sizes == fewer
    assert LivePlacement(WHOLE, replace(DYNAMIC, lend_ranks="auto"), file).sizes == WHOLE


class Lending:
    """Keeps how many engines each role was to have."""

    is_sampling = False

    def __init__(self) -> None:
        self.arranged: list[list[int]] = []

    def arrange(self, counts: list[int]) -> None:
        self.arranged.append(counts)


async def test_what_was_lent_returns_after_each_step() -> None:
    """Where the next step samples already, engines move for a new partition alone."""
    lending, actors = Lending(), SimpleNamespace(engines=[0, 1, 2], judges={"judge": [3]})
    ctx: Any = SimpleNamespace(roles=actors, rank=0, world_size=1, notices=asyncio.Queue[Sizes]())
    task = asyncio.create_task(arrange_as_noticed(ctx, cast(LendingEngines, lending)))

    async def after(engines: int, judges: int) -> list[list[int]]:
        ctx.notices.put_nowait(
            Sizes(controllers=1, engines=engines, judges={"judge": judges}, ranks=1)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return lending.arranged

    lending.is_sampling = True
    assert await after(3, 1) == []
    lending.is_sampling = False
    assert await after(3, 1) == [[3, 1]]
    assert await after(3, 1) == [[3, 1]] * 2
    lending.is_sampling = True
    assert await after(3, 1) == [[3, 1]] * 2
    assert await after(2, 2) == [[3, 1], [3, 1], [2, 2]]
    task.cancel()


SLOW = """
import time

from gcore_rollout import HFEngine

class SlowEngine(HFEngine):
    def _step(self):
        time.sleep(0.01)
        super()._step()

def make(model, **options):
    options["max_num_seqs"] = 2
    return SlowEngine.from_pretrained(model, **options)
"""


@pytest.fixture
def judged(own_args: list[str], tiny: Path) -> list[str]:
    """Verdicts that take much longer than responses."""
    judge = [
        "--reward-model.kind",
        "judge",
        "--reward-model.path",
        str(tiny),
        "--reward-model.judge.pattern",
        r"(\d)",
    ]
    options = [
        "--reward-model.judge.max-response-length",
        "32",
        "--reward-model.judge.unparsable-score",
        "0.25",
    ]
    args = [
        *own_args,
        *judge,
        *options,
        "--reward-model.judge.n",
        "4",
        "--trainer.tensorboard",
        "False",
    ]
    return option_set([*args, "--trainer.test-freq", "1000"], "--trainer.total-training-steps", "5")


@pytest.mark.slow
def test_engines_of_a_run_go_where_they_are_needed(cli: Cli, judged: list[str]) -> None:
    """To the judge, or to both roles in turns; samples and training are those of a run in one process.

    To the judge between two waves of the first step: no verdict waits for a place, so that no engine is lent before.
    """
    rare = option_set(judged, "--reward-model.judge.pattern", r"([37])\d")
    rare = option_set(
        option_set(rare, "--reward-model.judge.n", "1"), "--trainer.total-training-steps", "2"
    )
    reward = rare.index("--reward")
    rare = rare[:reward] + rare[reward + 2 :]
    cli.ok(*rare, "--name", "inline")
    ray = ["--runtime", "ray", "--placement.horizon-steps", "1000", "--placement.strategy"]
    sizes = [
        "--controllers",
        "2",
        "--rollout.num-processes",
        "3",
        "--reward-model.judge.num-processes",
        "2",
    ]
    finished = cli(*rare, *ray, "dynamic", *sizes)
    assert finished.code == 0, finished
    assert (
        "1 engine moved from the policy to the judge: 2 generate and 3 judge now\n" in finished.out
    )
    assert "continuing after" not in finished.out
    assert_same_metrics(cli.cwd / "runs/default", cli.cwd / "runs/inline")
    rows = [
        row
        for row in read_rows(cli.cwd / "runs/default/metrics.jsonl")
        if "placement/judges" in row
    ]
    assert rows[0]["sampling/waves"] > 1
    assert [(row["placement/engines"], row["placement/judges"]) for row in rows] == [(2, 3)] * 2, (
        "from 3 and 2"
    )
    first, *_, last = [step["devices"] for step in read_rows(cli.cwd / "runs/default/spans.jsonl")]
    gen = {
        name: [own for own in spans if own[0] == "gen"]
        for name, spans in first.items()
        if name[:6] == "engine"
    }
    assert any(stage == "swap" for stage, *_ in first["engine 2"])
    others_start_s = min(
        max(start_s for _, start_s, _ in gen[name]) for name in ("engine 0", "engine 1")
    )
    assert max(stop_s for *_, stop_s in gen["engine 2"]) < others_start_s, "in the first wave alone"
    assert rows[-1]["placement/move_within_s"] > 0
    stages = {
        name: {stage for stage, *_ in own}
        for name, own in last.items()
        if not name.startswith("trainer")
    }
    assert [name for name, own in sorted(stages.items()) if own == {"gen", "sync"}] == [
        "engine 0",
        "engine 1",
    ]
    assert [name for name, own in sorted(stages.items()) if own == {"reward"}] == [
        "engine 2",
        "judge 0",
        "judge 1",
    ]

    # Resumed, it starts as it was left.
    longer = option_set([*rare, *ray, "dynamic", *sizes], "--trainer.total-training-steps", "3")
    finished = cli(*longer, "--resume", "auto")
    assert finished.code == 0, finished
    rows = [
        row
        for row in read_rows(cli.cwd / "runs/default/metrics.jsonl")
        if "placement/judges" in row
    ]
    assert (rows[-1]["step"], rows[-1]["placement/engines"], rows[-1]["placement/judges"]) == (
        3,
        2,
        3,
    )
    assert "moved" not in finished.out

    # Of two devices one would idle, so both soon do both.
    cli.ok(*judged, "--name", "inline-turns")
    finished = cli(*judged, *ray, "auto", "--rollout.num-processes", "1", "--name", "turns")
    assert finished.code == 0, finished
    assert "2 devices generate and judge in turns now; continuing after step 3" in finished.out
    assert_same_metrics(cli.cwd / "runs/turns", cli.cwd / "runs/inline-turns")
    for row in read_rows(cli.cwd / "runs/turns/spans.jsonl")[3:]:
        engines = {
            name: spans for name, spans in row["devices"].items() if not name.startswith("trainer")
        }
        assert engines.keys() == {"engine 0", "engine 1"}
        for spans in engines.values():
            assert {"gen", "reward", "swap"} <= {stage for stage, _, _ in spans}
            # Nothing else happens in a turn.
            ends = [(start, stop) for _, start, stop in sorted(spans, key=lambda span: span[1])]
            assert all(stop <= start + 1e-6 for (_, stop), (start, _) in itertools.pairwise(ends))


@pytest.mark.slow
def test_engines_of_three_roles_go_where_a_run_needs_them(
    cli: Cli, judged: list[str], tiny: Path
) -> None:
    """From the policy and a judge of short verdicts to one of long ones, between steps and within them."""
    style = {
        "path": tiny,
        "pattern": r"(\d)",
        "max-response-length": 4,
        "unparsable-score": 0.5,
        "weight": 0.5,
    }
    args = [
        *judged,
        *(f"--reward-model.judges.style.{name}={value}" for name, value in style.items()),
    ]
    cli.ok(*args, "--name", "inline")
    sizes = ["--rollout.num-processes", "2", "--reward-model.judge.num-processes", "1"]
    sizes += ["--reward-model.judges.style.num-processes", "2", "--placement.horizon-steps", "1000"]
    finished = cli(*args, "--runtime", "ray", "--placement.strategy", "dynamic", *sizes)
    assert finished.code == 0, finished
    assert re.search(
        r"moved from the [\w ]+ to the judge: \d generate and [2-3] \+ \d judge now", finished.out
    )
    assert "continuing after" not in finished.out
    assert_same_metrics(cli.cwd / "runs/default", cli.cwd / "runs/inline")
    rows = [
        row
        for row in read_rows(cli.cwd / "runs/default/metrics.jsonl")
        if "placement/judges" in row
    ]
    names = ("placement/engines", "placement/judges/judge", "placement/judges/judge_style")
    assert [rows[0][name] for name in names] == [2, 1, 2]
    assert rows[-1][names[1]] > 1
    assert all(sum(row[name] for name in names) == 5 for row in rows)
    last = read_rows(cli.cwd / "runs/default/spans.jsonl")[-1]["devices"]
    assert {stage for own in last.values() for stage, *_ in own} >= {
        "gen",
        "reward",
        "reward/style",
    }
    assert any(row["reward/style/mean"] != row["reward/model/mean"] for row in rows)


@pytest.mark.slow
def test_idle_engines_judge_within_a_step(cli: Cli, judged: list[str]) -> None:
    """Engines of the policy help a slow judge while its queue lasts; one is killed there, and no verdict is lost.

    Those of the policy sleep meanwhile, and none is made again.
    """
    (cli.cwd / "slow.py").write_text(SLOW)
    args = option_set(
        option_set(judged, "--trainer.total-training-steps", "1"), "--reward-model.judge.n", "3"
    )
    # No evaluation: loans in it are of no step.
    args = [*args, "--data.val-size", "0"]
    cli.ok(*args, "--name", "inline")
    args = [*args, "--reward-model.judge.engine", f"{cli.cwd / 'slow.py'}:make"]
    run = cli.cwd / "runs/lent"
    sizes = ["--rollout.num-processes", "3", "--reward-model.judge.num-processes", "1"]
    placement = ["--placement.strategy", "dynamic", "--rollout.colocated", "true"]
    command = cli.start(*args, "--runtime", "ray", *sizes, *placement, "--name", "lent")
    log = run / "logs/controller-0.log"

    def lent() -> list[str]:
        return re.findall(
            r"(engine \d) has changed its model", log.read_text() if log.exists() else ""
        )

    command.wait_until(lambda: len(lent()) > 0)
    its_log = run / f"logs/{lent()[0].replace('engine ', 'engine_as_judge-')}.log"
    os.kill(int(re.findall(r"process (\d+) on", its_log.read_text())[-1]), signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 0, finished
    assert re.search(rf"{lent()[0]} is gone: .*engine process \d+ was killed", finished.out)
    for number in range(3):
        log_of_policy = (run / f"logs/engine-{number}.log").read_text()
        assert len(re.findall(r"process \d+ on \S+ begins", log_of_policy)) == 1
    assert_same_metrics(run, cli.cwd / "runs/inline")
    assert sum(row.get("placement/lent", 0.0) for row in read_rows(run / "metrics.jsonl")) >= 2
    stages = [
        {stage for stage, *_ in spans}
        for spans in read_rows(run / "spans.jsonl")[0]["devices"].values()
    ]
    assert sum({"gen", "reward"} <= found for found in stages) >= 2, (
        "devices of both roles in a step"
    )
