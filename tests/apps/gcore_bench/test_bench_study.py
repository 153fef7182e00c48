"""The study of `gcore-bench placement --parts study`, with few prompts and steps."""

import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import study_tables

from gcore_bench.harness.options import BenchError
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.simulations import study, sweep
from gcore_bench.placement.simulations.study import (
    STUDY_SIZES,
    break_study,
    drift_study,
    idle_aim,
    payload_load,
    run_study,
    with_judge_error,
)
from gcore_bench.placement.simulations.tasks import run_all
from gcore_placement import DynamicPartitionConfig, Trace, TraceRecipe
from gcore_placement.simulation import scenarios
from gcore_placement.simulation.scenarios import JOBS, Scale, scenario
from gcore_placement.workload.traces import steady


@pytest.fixture(autouse=True)
def small_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few prompts a step: the same program, in seconds."""
    few = {devices: Scale(num_devices=devices, train_batch_size=6, unit_devices=devices // 8) for devices in (32, 64)}
    few[37] = Scale(num_devices=37, train_batch_size=6, unit_devices=6)
    for module in (scenarios, study):
        monkeypatch.setattr(module, "SCALES", scenarios.SCALES | few)


def test_the_study_answers_all_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "STUDY_SIZES", {64: 3})
    monkeypatch.setattr(study, "STUDY_TRACES", ("growing", "r1_zero"))
    monkeypatch.setattr(study, "ERRORS", (1 / 2, 2.0))
    text = run_study(
        PlacementOptions(study_folder=tmp_path / "study", study_devices=(64,), study_steps=3, study_processes=1)
    )
    assert (tmp_path / "study" / "tables.md").read_text() == text
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == [
        "Drift on 64 devices",
        "Payloads through controllers",
        "Wrong costs of the judge",
        "Conditions broken",
    ]
    assert (
        len(
            re.findall(
                r"^\| 64 \| (growing|r1_zero) \| 3 \|.* \d\.\d\d \(\d\.\d\d to \d\.\d\d\)", text, flags=re.MULTILINE
            )
        )
        == 2
    )
    assert re.search(
        r"^aim: dynamic idles at most 3 points .*; most: -?\d+\.\d on (growing|r1_zero) \((not )?met",
        text,
        re.MULTILINE,
    )
    assert "<h2>growing, 64 devices, 3 steps</h2>" in (tmp_path / "study" / "study.html").read_text()


def test_the_sweep_compares_every_load_with_the_best_split(tmp_path: Path) -> None:
    options = PlacementOptions(
        study_folder=tmp_path / "study",
        study_steps=8,
        study_processes=1,
        sweep_devices=(37, 64),
        sweep_traces=("square_4", "no_change"),
        sweep_seeds=2,
    )
    said: list[str] = []
    figures = sweep.run(options, say=said.append)
    assert said == ["sweep: 8 runs under dynamic, seeds 1 to 2"]
    assert [(row["devices"], row["trace"]) for row in figures["rows"]] == [
        (devices, trace) for devices in (37, 64) for trace in ("square_4", "no_change")
    ]
    simulator = scenario("square_4", "7B", 37, num_steps=8, seed=2)
    loss = simulator.dynamic().seconds / min(simulator.split(p).seconds for p in simulator.space.partitions) - 1
    assert figures["rows"][0]["losses"][1] == pytest.approx(loss)
    assert sweep.table(figures).row_count == 4
    written = (tmp_path / "study" / "sweep.md").read_text()
    assert len(re.findall(r"^\| (?:37|64) \| (?:square_4|no_change) \|", written, flags=re.MULTILINE)) == 4
    assert sweep.aims(figures["rows"])[0] in written
    with pytest.raises(BenchError, match="sweep_traces holds 'saw'; expected names of square_2, "):
        sweep.run(replace(options, sweep_traces=("saw",)), say=said.append)


def test_the_aim_of_the_sweep_counts_the_worst_seed() -> None:
    rows = [
        {"devices": 64, "trace": trace, "losses": losses}
        for trace, losses in (("coin", (0.01, 0.03)), ("noise", (-0.2, 0.02)))
    ]
    (missed,), (met,) = sweep.aims(rows), sweep.aims(rows[1:])
    assert missed.endswith("most: +3.0% on coin with 64 devices (not met: coin on 64)")
    assert met.endswith("most: +2.0% on noise with 64 devices (met)")


def test_the_aim_of_idle_devices_counts_the_worst_seed() -> None:
    [seeded] = drift_study([(64, 3, ("judge_swap_back",))], seeds=(1, 2))
    over = max(100 * (c["dynamic"].idle_share - c["clairvoyant"].idle_share) for c in seeded)
    found = idle_aim([seeded])
    assert f"most: {over:.1f} on judge_swap_back (" in found
    assert found.endswith("(met)" if over <= 3 else "(not met: judge_swap_back)")


def test_the_page_has_all_tables_that_the_study_and_the_sweep_write(tmp_path: Path) -> None:
    page = study_tables.PAGE.read_text()
    drifts = [f"Drift on {devices:,} devices" for devices in STUDY_SIZES]
    others = ["Payloads through controllers", "Wrong costs of the judge", "Conditions broken", "The family"]
    assert sorted(study_tables.titles(page)) == sorted([*drifts, *others])
    assert study_tables.updated(page, {}) == page
    (tmp_path / "sweep.md").write_text("## The family\n\n| new |\n| --- |\n\naim: none (met)\n")
    found = study_tables.sections(tmp_path)
    changed = study_tables.updated(page, found)
    assert "<!-- table: The family -->\n\n| new |\n| --- |\n\naim: none (met)\n" in changed
    assert study_tables.updated(changed, found) == changed
    assert len(study_tables.titles(changed)) == len(study_tables.titles(page))


def test_studies_are_the_same_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # which other processes do not see
    sizes = [(64, 1, ["steady", "fast_judge"])]
    assert drift_study(sizes, seeds=[0], processes=2) == drift_study(sizes, seeds=[0])
    assert run_all([partial(pow, 2, exponent) for exponent in range(5)], processes=2) == [1, 2, 4, 8, 16]
    assert os.getpid() not in run_all([os.getpid] * 3, processes=2)
    assert run_all([os.getpid] * 2, processes=1) == [os.getpid()] * 2


def test_conditions_are_broken_one_at_a_time() -> None:
    by_name = {seeded[0].name: seeded[0] for seeded in break_study(num_steps=4, seeds=[0])}
    assert by_name["swaps take no time"]["colocated"].share("swap") == 0.0
    assert by_name["as it is"]["colocated"].share("swap") > 0.0
    assert by_name["a move takes 20 minutes"]["dynamic"].num_moves <= by_name["as it is"]["dynamic"].num_moves
    few = {p for step in by_name["four replicas in all"]["clairvoyant"].steps for p in step.partitions}
    assert all(sum(p.replicas) == 4 for p in few)


def test_wrong_costs_hurt_less_where_measurements_correct_them() -> None:
    simulator = scenario("slow_judge", "7B", 64, num_steps=12)
    believed = with_judge_error(JOBS["7B"], 1 / 16)
    corrected = simulator.dynamic(believed=believed)
    uncorrected = simulator.dynamic(believed=believed, config=DynamicPartitionConfig(is_corrected=False))
    assert corrected.seconds <= uncorrected.seconds


def test_payloads_through_controllers() -> None:
    trace: Trace = TraceRecipe(
        name="images",
        num_steps=1,
        train_batch_size=256,
        response_median=steady(100),
        judge_median=steady(100),
        acceptance=steady(1.0),
        payload_median_bytes=1e6,
    ).trace()
    total = float(trace.payload_bytes.sum())
    seconds, held_bytes, max_over_mean = payload_load(trace, num_controllers=1)
    assert seconds == pytest.approx(4 * total / study.PAYLOAD_BYTES_PER_S)
    assert held_bytes == total
    assert max_over_mean == 1.0
    _, held_bytes, max_over_mean = payload_load(trace, num_controllers=16)
    shares = [float(trace.payload_bytes[first::16].sum()) for first in range(16)]
    assert held_bytes == max(shares)
    assert max_over_mean == pytest.approx(max(shares) / (total / 16))
