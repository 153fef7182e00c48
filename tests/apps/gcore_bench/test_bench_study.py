"""The study of `gcore-bench placement --parts study`, with few prompts and steps."""

import io
import json
import os
from functools import partial
from pathlib import Path

import pytest
import study_tables
from rich.console import Console

from gcore_bench.harness.report import BenchSession, Row
from gcore_bench.placement import study
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.study import (
    check_idle_aim,
    compare_all,
    list_broken_conditions,
    list_drifts,
    run_all,
    with_judge_error,
)
from gcore_bench.placement.tables import format_rows
from gcore_placement import Comparison, DynamicPartitionConfig, compare
from gcore_placement.simulation import scenarios
from gcore_placement.simulation.scenarios import JOBS, scenario


@pytest.fixture(autouse=True)
def small_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few prompts a step: the same program, in seconds."""
    few = {devices: (6, devices // 8) for devices in (32, 64)}
    few[37] = (6, 6)
    for module in (scenarios, study):
        monkeypatch.setattr(module, "SCALES", scenarios.SCALES | few)


def test_the_study_answers_all_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "list_drifts", partial(list_drifts, traces=("growing", "r1_zero")))
    monkeypatch.setattr(study, "ERRORS", (1 / 2, 2.0))
    output = io.StringIO()
    options = PlacementOptions(quick=True)
    with BenchSession(options, Console(file=output)) as session:
        drift, errors, broken = study.run(options, session)
    assert [table.title for table in (drift, errors, broken)] == [
        "Drift on 64 devices",
        "Wrong costs of the judge",
        "Conditions broken",
    ]
    assert output.getvalue() == "study: Drift on 64 devices is done\n"
    assert [cells[:3] for cells in format_rows(drift)] == [
        ["64", "growing", "2"],
        ["64", "r1_zero", "2"],
    ]
    assert drift.aims[0].startswith("aim: dynamic idles at most 3 points more than the clairvoyant")
    assert [cells[0] for cells in format_rows(errors)] == ["0.5", "2"]
    assert len(broken.rows) == 7


def test_the_aim_of_idle_devices_counts_the_worst_seed() -> None:
    cases = list_drifts(64, 3, ("judge_swap_back",))
    rows = compare_all(cases, (1, 2), processes=1)
    points: list[float] = []
    for seed in (1, 2):
        comparison = compare("judge_swap_back", cases[0][1](seed=seed))
        points.append(
            100 * (comparison["dynamic"].idle_share - comparison["clairvoyant"].idle_share)
        )
    aim = check_idle_aim(rows)
    assert f"most: {max(points):.1f} on judge_swap_back (" in aim
    assert aim.endswith("(met)" if max(points) <= 3 else "(not met: judge_swap_back)")


def test_the_page_has_all_tables_that_the_study_writes(tmp_path: Path) -> None:
    page = study_tables.PAGE.read_text()
    drifts = [f"Drift on {devices:,} devices" for devices in study.SIZES]
    others = ["Wrong costs of the judge", "Conditions broken"]
    assert sorted(study_tables.list_titles(page)) == sorted([*drifts, *others])
    assert study_tables.update_page(page, {}) == page
    rows: list[Row] = [{"error": 2.0, "corrected": "1.00", "uncorrected": "0.90"}]
    table = {
        "title": "Wrong costs of the judge",
        "columns": study.ERROR_COLUMNS,
        "rows": rows,
        "aims": ["aim: none (met)"],
    }
    (tmp_path / "figures.json").write_text(json.dumps({"parts": [table]}))
    sections = study_tables.read_sections(tmp_path / "figures.json")
    changed = study_tables.update_page(page, sections)
    head = "| believed / true | split / dynamic, corrected | split / dynamic, not corrected |\n"
    cells = "| --- | --- | --- |\n| 2 | 1.00 | 0.90 |\n"
    title = "<!-- table: Wrong costs of the judge -->"
    assert f"{title}\n\n{head}{cells}\naim: none (met)\n" in changed
    assert study_tables.update_page(changed, sections) == changed
    assert len(study_tables.list_titles(changed)) == len(study_tables.list_titles(page))


def test_the_page_has_the_columns_of_the_study() -> None:
    page = study_tables.PAGE.read_text()
    for columns in (study.COLUMNS, study.ERROR_COLUMNS):
        assert f"| {' | '.join(columns)} |" in page


def test_studies_are_the_same_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # other processes would not see the small scales
    cases = list_drifts(64, 1, ("steady", "fast_judge"))
    assert compare_all(cases, [0], processes=2) == compare_all(cases, [0], processes=1)
    assert run_all([partial(pow, 2, exponent) for exponent in range(5)], processes=2) == [
        1,
        2,
        4,
        8,
        16,
    ]
    assert os.getpid() not in run_all([os.getpid] * 3, processes=2)
    assert run_all([os.getpid] * 2, processes=1) == [os.getpid()] * 2


def test_conditions_are_broken_one_at_a_time() -> None:
    by_name: dict[str, Comparison] = {}
    for name, make in list_broken_conditions(4):
        by_name[name] = compare(name, make(seed=0))
    assert by_name["swaps take no time"]["colocated"].share("swap") == 0.0
    assert by_name["as it is"]["colocated"].share("swap") > 0.0
    assert (
        by_name["a move takes 20 minutes"]["dynamic"].num_moves
        <= by_name["as it is"]["dynamic"].num_moves
    )
    few = {
        p for step in by_name["four replicas in all"]["clairvoyant"].steps for p in step.partitions
    }
    assert all(sum(p.replicas) == 4 for p in few)


def test_wrong_costs_hurt_less_where_measurements_correct_them() -> None:
    simulator = scenario("slow_judge", "7B", 64, num_steps=12)
    believed = with_judge_error(JOBS["7B"], 1 / 16)
    corrected = simulator.dynamic(believed=believed)
    uncorrected = simulator.dynamic(
        believed=believed, config=DynamicPartitionConfig(is_corrected=False)
    )
    assert corrected.seconds <= uncorrected.seconds
