"""The command `gcore-placement simulate`: its table, its page and its errors."""

import re
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from recorded_run import recorded_run

from gcore_placement.cli import main
from gcore_placement.simulation import scenarios
from gcore_placement.simulation.scenarios import JOBS, PUBLISHED, SCENARIOS, scenario


@pytest.fixture(autouse=True)
def small_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few prompts a step: the same program, in seconds."""
    few = {devices: (6, devices // 8) for devices in (32, 64)}
    monkeypatch.setattr(scenarios, "SCALES", scenarios.SCALES | few)


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
    drawings = [
        ElementTree.fromstring(svg)
        for svg in re.findall(r"<svg.*?</svg>", page.read_text(), flags=re.DOTALL)
    ]
    for drawing in drawings:
        _, _, width, height = map(float, drawing.get("viewBox", "").split())
        boxes = text_boxes(drawing)
        for left, right, top, bottom in boxes:
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
        for one, other in combinations(boxes, 2):
            assert (
                one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]
            )


def test_it_prints_a_table_and_writes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.npz"
    command = [
        "simulate",
        "--scenario",
        "jump",
        "--steps",
        "4",
        "--html",
        str(page),
        "--save-trace",
        str(trace),
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "jump: 64 devices, 4 steps" in printed
    rows = {
        line.split()[0]: line.split()
        for line in printed.splitlines()
        if line.startswith(("co", "sp", "dy", "cl"))
    }
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--html", "nowhere/page.html"],
            "--html is 'nowhere/page.html'; expected a path in a folder that exists",
        ),
        (["--steps", "0"], "--steps is 0; expected an integer of at least 1"),
        (["--trace", "no.npz"], "No such file"),
    ],
)
def test_wrong_use_is_said_in_a_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("job", JOBS)
def test_every_scenario_can_be_simulated_with_every_job(job: str) -> None:
    for name in (*SCENARIOS, *PUBLISHED):
        simulator = scenario(name, job, 64, num_steps=2)
        assert simulator.dynamic(lends=False).step_s >= simulator.clairvoyant().step_s * (1 - 1e-12)


def test_a_run_of_gcore_llm_is_simulated_and_a_wrong_one_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["simulate", "--from-run", str(recorded_run(tmp_path / "mine")), "--judge-length", "40"]
        )
        == 0
    )
    assert "mine: 64 devices, 2 steps" in capsys.readouterr().out
    assert main(["simulate", "--from-run", str(tmp_path / "none")]) == 2
    assert "expected a gcore-llm run, with config.toml and metrics.jsonl" in capsys.readouterr().err


def test_published_runs_grow_as_they_are_published(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["simulate", "--scenario", "r1_zero", "--steps", "2"]) == 0
    assert "responses: DeepSeek-R1-Zero" in capsys.readouterr().out
    monkeypatch.setitem(scenarios.SCALES, 64, (64, 8))
    r1_zero = scenario("r1_zero", "32B", 64, num_steps=11).trace
    means = [float(r1_zero.response_length[r1_zero.step_slice(step)].mean()) for step in range(11)]
    assert means[::2] == pytest.approx([500, 2500, 4000, 6000, 9256, 15_000], rel=0.1)
    deepscaler = scenario("deepscaler", "32B", 64, num_steps=3).trace
    assert deepscaler.response_length[deepscaler.step_slice(0)].max() == 8192
