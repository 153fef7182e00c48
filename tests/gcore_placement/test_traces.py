"""Traces: what they hold, how they are made up, recorded, saved and refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, strategies as st
from recorded_run import recorded_run

from gcore_placement import Drift, PlacementError, RecordedStep, Trace, TraceRecipe, recorded_trace
from gcore_placement.simulation.scenarios import resize
from gcore_placement.workload.recorded_runs import run_trace
from gcore_placement.workload.traces import lengths_from_quantiles, steady

SHAPES: tuple[Literal["square", "pulse", "sine"], ...] = ("square", "pulse", "sine")
RECIPE = TraceRecipe(
    name="made up",
    num_steps=20,
    train_batch_size=64,
    n=4,
    response_median=Drift(first=500, last=2000),
    judge_median=Drift(first=300, last=1200, jump_step=10),
    acceptance=Drift(first=0.9, last=0.4),
    payload_median_bytes=1e6,
)


def test_what_jumps_may_go_back() -> None:
    drift = Drift(first=1, last=5, jump_step=2, back_step=4)
    assert drift.over(6).tolist() == [1, 1, 5, 5, 1, 1]


def test_what_has_a_period_swings_however_long_the_run() -> None:
    square, pulse, sine = (Drift(first=1, last=16, period=4, shape=shape) for shape in SHAPES)
    assert square.over(6).tolist() == [1, 1, 16, 16, 1, 1]
    assert pulse.over(6).tolist() == [1, 1, 1, 16, 1, 1]
    assert sine.over(6).tolist() == pytest.approx([1, 4, 16, 4, 1, 4])
    assert Drift(first=1, last=16, period=3).over(4).tolist() == [1, 1, 16, 1]
    recipe = replace(
        RECIPE, response_median=square, judge_median=Drift(first=1, last=2, jump_step=10)
    )
    short = resize(recipe, num_steps=6, train_batch_size=8, seed=0)
    assert (short.response_median, short.judge_median.jump_step) == (square, 3)


def test_shuffled_steps_keep_both_roles_together() -> None:
    swing = Drift(first=100, last=1000, period=2)
    recipe = replace(
        RECIPE, num_steps=12, response_median=swing, judge_median=swing, is_shuffled=True
    )
    trace = recipe.trace()
    medians = [
        [float(np.median(lengths[trace.step_slice(step)])) > 300 for step in range(12)]
        for lengths in (trace.response_length, trace.judge_length)
    ]
    assert medians[0] == medians[1]
    assert sum(medians[0]) == 6
    assert medians[0] != [False, True] * 6
    again = [
        np.median(recipe.trace().response_length[trace.step_slice(step)]) > 300
        for step in range(12)
    ]
    assert again == medians[0]


def test_noise_of_few_degrees_of_freedom_has_heavy_tails() -> None:
    still = replace(
        RECIPE,
        num_steps=400,
        train_batch_size=4,
        judge_median=steady(300),
        acceptance=steady(1.0),
        noise=0.2,
    )

    def largest(recipe: TraceRecipe) -> float:
        trace = recipe.trace()
        medians = [
            float(np.median(trace.judge_length[trace.step_slice(step)])) for step in range(400)
        ]
        return float(np.abs(np.log(np.array(medians) / 300)).max())

    assert largest(still) < 1.2 < largest(replace(still, noise_freedom=2.0))


def test_a_first_wave_may_have_more_prompts_than_a_step_trains_on() -> None:
    trace = replace(
        RECIPE, num_steps=3, gen_batch_ratio=3.0, acceptance=Drift(first=0.6, last=0.6)
    ).trace()
    for step in range(3):
        assert [len(wave.prompt_length) for wave in trace.waves(step)] == [192]
        assert trace.accepted[trace.step_slice(step)].sum() == 64


def test_lengths_drift_and_jump_as_the_recipe_says() -> None:
    trace = RECIPE.trace()
    medians = [
        float(np.median(trace.response_length[trace.step_slice(step)])) for step in (0, 10, 19)
    ]
    expected = [500, 500 * 4 ** (10 / 19), 2000]
    assert medians == pytest.approx(expected, rel=0.15)
    judges = [float(np.median(trace.judge_length[trace.step_slice(step)])) for step in (9, 10)]
    assert judges == pytest.approx([300, 1200], rel=0.15)
    deviation = float(np.log(trace.judge_length[trace.step_slice(0)]).std())
    assert deviation == pytest.approx(RECIPE.judge_sigma, rel=0.15)
    assert trace.response_length.max() <= RECIPE.max_response_length


@given(seed=st.integers(0, 1000), acceptance=st.floats(0.05, 1.0))
def test_waves_continue_until_the_batch_is_full(seed: int, acceptance: float) -> None:
    share = Drift(first=acceptance, last=acceptance)
    trace = replace(RECIPE, num_steps=3, train_batch_size=16, acceptance=share, seed=seed).trace()
    for step in range(3):
        waves = list(trace.waves(step))
        accepted = int(trace.accepted[trace.step_slice(step)].sum())
        assert accepted <= 16
        assert accepted == 16 or len(waves) == 4
        assert all(1 <= len(wave.prompt_length) <= 16 for wave in waves)
        assert sum(len(wave.prompt_length) for wave in waves) == len(
            trace.step[trace.step_slice(step)]
        )


def test_a_seed_gives_a_trace() -> None:
    one, again, other = RECIPE.trace(), RECIPE.trace(), replace(RECIPE, seed=1).trace()
    np.testing.assert_array_equal(one.response_length, again.response_length)
    assert (
        one.response_length.shape != other.response_length.shape
        or (one.response_length != other.response_length).any()
    )


def test_what_is_trained_on() -> None:
    trace = replace(RECIPE, num_steps=1).trace()
    lengths = (trace.prompt_length[:, None] + trace.response_length)[trace.accepted].ravel()
    tokens, pairs = trace.training_tokens(0)
    assert tokens == lengths.sum()
    assert pairs == sum(length * (length + 1) / 2 for length in lengths)


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    trace = RECIPE.trace()
    trace.save(tmp_path / "trace.npz")
    again = Trace.load(tmp_path / "trace.npz")
    assert again.name == trace.name
    for name in (
        "step",
        "wave",
        "accepted",
        "prompt_length",
        "response_length",
        "judge_length",
        "payload_bytes",
    ):
        np.testing.assert_array_equal(getattr(again, name), getattr(trace, name))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no trace")
    with pytest.raises(PlacementError, match="is not a trace; expected an"):
        Trace.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", x=np.ones(3))
    with pytest.raises(PlacementError, match=r"holds \['x'\]; expected a trace of format 1"):
        Trace.load(tmp_path / "other.npz")


@given(
    lengths=st.lists(st.integers(1, 10_000), min_size=2, max_size=6).map(sorted),
    count=st.integers(2, 200),
    seed=st.integers(0, 99),
)
def test_quantiles_come_back(lengths: list[int], count: int, seed: int) -> None:
    probabilities = np.linspace(0, 1, len(lengths))
    drawn = np.sort(
        lengths_from_quantiles(
            np.column_stack([probabilities, lengths]), count, np.random.default_rng(seed)
        )
    )
    assert drawn[0] == lengths[0]
    assert drawn[-1] == lengths[-1]
    shares = np.linspace(0, 1, count)
    np.testing.assert_allclose(
        drawn, np.exp(np.interp(shares, probabilities, np.log(lengths))), atol=0.5
    )


def test_a_run_that_was_recorded() -> None:
    steps = [
        RecordedStep(
            num_prompts=10,
            num_accepted=7,
            prompt_quantiles=((0, 5), (1, 50)),
            response_quantiles=((0, 12), (0.5, 100 * (step + 1)), (1, 900)),
            judge_quantiles=((0.5, 200),),
            payload_bytes=3e6,
        )
        for step in range(3)
    ]
    trace = recorded_trace("run", steps, n=8)
    assert trace.num_steps == 3
    for step in range(3):
        part = trace.step_slice(step)
        assert trace.accepted[part].sum() == 7
        assert np.median(trace.response_length[part]) == pytest.approx(100 * (step + 1), rel=0.05)
        assert trace.response_length[part].max() == 900
        assert (trace.judge_length[part] == 200).all()
        assert (trace.payload_bytes[part] == 3e6).all()


def test_a_run_of_gcore_llm(tmp_path: Path) -> None:
    trace = run_trace(recorded_run(tmp_path / "mine"), n=4, judge_median=40, max_judge_length=96)
    assert trace.name == "mine"
    assert trace.num_steps == 2
    first, second = trace.step_slice(0), trace.step_slice(1)
    assert trace.response_length.shape == (12 + 8, 4)
    assert [len(wave.prompt_length) for wave in trace.waves(0)] == [9, 3]
    assert [len(wave.prompt_length) for wave in trace.waves(1)] == [8]
    assert [int(trace.accepted[part].sum()) for part in (first, second)] == [8, 8]
    assert trace.response_length[first].mean() == pytest.approx(30.5, rel=0.05)
    assert trace.response_length[second].mean() == pytest.approx(20.0, rel=0.05)
    assert (trace.response_length[first] == 64).mean() == pytest.approx(0.125, abs=0.03)
    assert trace.response_length[second].max() == 51
    assert np.median(trace.judge_length) == pytest.approx(40, rel=0.05)
    assert trace.judge_length.max() <= 96
    with pytest.raises(
        PlacementError, match=r"judge_median is .*; expected a finite number above 0"
    ):
        run_trace(tmp_path / "mine", n=4, judge_median=0, max_judge_length=96)
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(PlacementError, match="has no step with responses"):
        run_trace(tmp_path / "mine", n=4, judge_median=40, max_judge_length=96)


def test_wrong_traces_are_refused() -> None:
    trace = RECIPE.trace()
    with pytest.raises(PlacementError, match=r"prompt_length\.shape is .*; expected"):
        replace(trace, prompt_length=trace.prompt_length[:-1])
    with pytest.raises(PlacementError, match=r"judge_length is .*; expected at least 1 token each"):
        replace(trace, judge_length=np.zeros_like(trace.judge_length))
    with pytest.raises(PlacementError, match="step and wave are out of order"):
        replace(trace, step=trace.step + 1)
    with pytest.raises(PlacementError, match=r"acceptance\.last is .*; expected"):
        replace(RECIPE, acceptance=Drift(first=1.0, last=1.5))
    with pytest.raises(
        PlacementError, match=r"noise_freedom is 0; expected a finite number above 0"
    ):
        replace(RECIPE, noise_freedom=0)
    for period, jump_step in ((1, None), (4, 2)):
        with pytest.raises(
            PlacementError, match=rf"period is {period}; expected at least 2, and no jump_step"
        ):
            Drift(first=1, last=2, period=period, jump_step=jump_step)
    shape: Any = "saw"
    with pytest.raises(PlacementError, match="shape is 'saw'; expected square, sine or pulse"):
        Drift(first=1, last=2, period=4, shape=shape)
    with pytest.raises(PlacementError, match=r"quantiles is .*; expected probabilities rising"):
        lengths_from_quantiles([(0.5, 10), (0.2, 20)], 3, np.random.default_rng(0))
    with pytest.raises(PlacementError, match=r"steps is .*; expected at least 1"):
        recorded_trace("run", [], n=8)
    few = RecordedStep(
        num_prompts=2,
        num_accepted=1,
        num_waves=3,
        prompt_quantiles=((0.5, 5),),
        response_quantiles=((0.5, 5),),
        judge_quantiles=((0.5, 5),),
    )
    with pytest.raises(
        PlacementError, match=r"steps\[0\]\.num_waves is .*; expected at most num_prompts \(2\)"
    ):
        recorded_trace("run", [few], n=8)
