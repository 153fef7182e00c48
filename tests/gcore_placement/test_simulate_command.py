"""`gcore-placement simulate`: what it prints, writes and refuses; and the studies behind `--study`."""

import os
import re
from functools import partial
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from recorded_run import recorded_run

from gcore_bench.placement.study.payloads import ControllerHost, payload_load
from gcore_bench.placement.study.studies import break_study, drift_study, with_judge_error
from gcore_placement import DynamicPartitionConfig, Trace, TraceRecipe
from gcore_placement.cli import main
from gcore_placement.cli.simulate_table import in_processes
from gcore_placement.simulation import scenarios, studies
from gcore_placement.simulation.scenarios import JOBS, PUBLISHED, SCENARIOS, Scale, scenario
from gcore_placement.workload.trace_recipes import steady


@pytest.fixture(autouse=True)
def small_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few prompts a step: the same program, in seconds."""
    few = {devices: Scale(num_devices=devices, train_batch_size=6, unit_devices=devices // 8) for devices in (32, 64)}
    for module in (scenarios, studies):
        monkeypatch.setattr(module, "SCALES", scenarios.SCALES | few)


class Tags(HTMLParser):
    """Which tags a page opens, and what it points to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.links: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def text_boxes(svg: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of a drawing's texts, of 12 px and about 0.6 em a letter."""
    boxes: list[tuple[float, float, float, float]] = []
    for text in svg.iter("text"):
        width, x, y = 7.2 * len(text.text or ""), float(text.get("x", "")), float(text.get("y", ""))
        left = x - width if text.get("text-anchor") == "end" else x
        boxes.append((left, left + width, y - 10, y + 3))
    return boxes


def test_no_label_of_the_page_hides_another_or_is_cut_off(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["simulate", "--scenario", "growing", "--steps", "3", "--html", str(page)]) == 0
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page.read_text(), flags=re.DOTALL)]
    for drawing in drawings:
        _, _, width, height = map(float, drawing.get("viewBox", "").split())
        boxes = text_boxes(drawing)
        for left, right, top, bottom in boxes:
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
        for one, other in combinations(boxes, 2):
            assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]


def test_it_prints_a_table_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.npz"
    command = ["simulate", "--scenario", "jump", "--steps", "4", "--html", str(page), "--save-trace", str(trace)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "jump: 64 devices, 4 steps" in printed
    rows = {line.split()[0]: line.split() for line in printed.splitlines() if line.startswith(("co", "sp", "dy", "cl"))}
    assert list(rows) == ["colocated", "split", "dynamic", "clairvoyant"]
    assert rows["colocated"][3] == "1.00"
    assert rows["split"][4] == "1.00"
    assert float(rows["clairvoyant"][1]) <= min(float(rows["split"][1]), float(rows["dynamic"][1]))

    tags = Tags(page.read_text())
    assert {"script", "link", "img", "iframe"}.isdisjoint(tags.opened)
    assert not tags.links
    assert tags.opened.count("svg") == 5
    assert tags.opened.count("polyline") == 7
    assert "long tail" in page.read_text()

    assert main(["simulate", "--trace", str(trace)]) == 0
    again = capsys.readouterr().out
    assert again.splitlines()[1:] == printed.splitlines()[1 : len(again.splitlines())]


def test_the_study_answers_all_questions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_placement.cli.simulate.STUDY_SIZES", ((64, 3, ("growing", "r1_zero")),))
    monkeypatch.setattr(studies, "ERRORS", (1 / 2, 2.0))
    command = ["simulate", "--study", str(tmp_path / "study"), "--steps", "3", "--processes", "1"]
    assert main(command) == 0
    text = (tmp_path / "study" / "tables.md").read_text()
    assert text.strip() == capsys.readouterr().out.strip()
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == [
        "Dynamic against the best static split",
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
    assert "<h2>growing, 64 devices, 3 steps</h2>" in (tmp_path / "study" / "study.html").read_text()


def test_studies_are_the_same_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # which other processes do not see
    sizes = [(64, 1, ["steady", "fast_judge"])]
    with in_processes(2) as run_all:
        assert drift_study(sizes, seeds=[0], run_all=run_all) == drift_study(sizes, seeds=[0])
        assert run_all([partial(pow, 2, exponent) for exponent in range(5)]) == [1, 2, 4, 8, 16]
        assert os.getpid() not in run_all([os.getpid] * 3)
    with in_processes(1) as run_all:
        assert run_all([os.getpid] * 2) == [os.getpid()] * 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--html", "nowhere/page.html"], "--html is 'nowhere/page.html'; expected a path in a folder that exists"),
        (["--steps", "0"], "--steps is 0; expected an integer of at least 1"),
        (["--processes", "0"], "--processes is 0; expected an integer of at least 1"),
        (["--trace", "no.npz"], "No such file"),
    ],
)
def test_wrong_use_is_said_in_a_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("job", JOBS)
def test_every_scenario_can_be_simulated_with_every_job(job: str) -> None:
    for name in (*SCENARIOS, *PUBLISHED):
        simulator = scenario(name, job, 64, num_steps=2)
        assert simulator.dynamic().step_s >= simulator.clairvoyant().step_s * (1 - 1e-12)


def test_conditions_are_broken_one_at_a_time() -> None:
    by_name = {seeded[0].name: seeded[0] for seeded in break_study(num_steps=4, seeds=[0])}
    assert by_name["swaps take no time"].colocated.share("swap") == 0.0
    assert by_name["as it is"].colocated.share("swap") > 0.0
    assert by_name["a move takes 20 minutes"].dynamic.num_moves <= by_name["as it is"].dynamic.num_moves
    few = {p for step in by_name["four replicas in all"].clairvoyant.steps for p in step.partitions}
    assert all(p.policy_replicas + p.reward_replicas == 4 for p in few)


def test_wrong_costs_hurt_less_where_measurements_correct_them() -> None:
    simulator = scenario("slow_judge", "7B", 64, num_steps=12)
    believed = with_judge_error(JOBS["7B"], 1 / 16)
    corrected = simulator.dynamic(believed=believed)
    uncorrected = simulator.dynamic(believed=believed, config=DynamicPartitionConfig(is_corrected=False))
    assert corrected.seconds <= uncorrected.seconds


def test_a_run_of_gcore_llm_is_simulated_and_a_wrong_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--from-run", str(recorded_run(tmp_path / "mine")), "--judge-length", "40"]) == 0
    assert "mine: 64 devices, 2 steps" in capsys.readouterr().out
    assert main(["simulate", "--from-run", str(tmp_path / "none")]) == 2
    assert "is no folder of a gcore-llm run, with config.toml and metrics.jsonl" in capsys.readouterr().err


def test_published_runs_grow_as_they_are_published(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--scenario", "r1_zero", "--steps", "2"]) == 0
    assert "responses: DeepSeek-R1-Zero" in capsys.readouterr().out
    r1_zero = PUBLISHED["r1_zero"].trace(num_steps=11, num_prompts=64)
    means = [float(r1_zero.response_length[r1_zero.step_slice(step)].mean()) for step in range(11)]
    assert means[::2] == pytest.approx([500, 2500, 4000, 6000, 9256, 15_000], rel=0.1)
    deepscaler = PUBLISHED["deepscaler"].trace(num_steps=3, num_prompts=64)
    assert deepscaler.response_length[deepscaler.step_slice(0)].max() == 8192


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
    host = ControllerHost(link_bytes_per_s=4e9, copy_bytes_per_s=1e9)
    total = float(trace.payload_bytes.sum())
    one = payload_load(trace, 0, num_controllers=1, host=host)
    assert one.seconds == pytest.approx(4 * total / 1e9)
    assert one.held_bytes == total
    assert one.max_over_mean == 1.0
    many = payload_load(trace, 0, num_controllers=16, host=host)
    shares = [float(trace.payload_bytes[first::16].sum()) for first in range(16)]
    assert many.held_bytes == max(shares)
    assert many.max_over_mean == pytest.approx(max(shares) / (total / 16))
