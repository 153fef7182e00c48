"""What a run's page says and holds, for every state that a run's folder can be in."""

import json
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gcore_llm.report import KINDS
from gcore_runs import read_jsonl
from gcore_runs.loop.best import exported_evaluation
from gcore_runs.report.page import render_report

CONFIG = '[data]\ntask = "chain_sum"\n\n[trainer]\ntotal_training_steps = 40\n'
HOSTILE = "</pre><script>alert('x')</script>"


class Page(HTMLParser):
    """The page as a browser reads it: text, tags with their attributes, and the charts' data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[str] = []
        self._shown: list[str] = []
        self._figures = ""
        self._within = ""
        self._is_in_cell = False
        self.feed(path.read_text(encoding="utf-8"))
        self.text = " ".join(" ".join(self._shown).split())
        self.figures: dict[str, dict[str, list[dict[str, Any]]]] = json.loads(self._figures)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = "figures" if ("id", "figures") in attrs else tag
        if tag == "td":
            self._is_in_cell = True
            self.cells.append("")

    def handle_endtag(self, tag: str) -> None:
        self._within = ""
        if tag == "td":
            self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        if self._within == "figures":
            self._figures += data
        elif self._within not in ("script", "style"):
            self._shown.append(data)
            if self._is_in_cell:
                self.cells[-1] = " ".join((self.cells[-1] + " " + data).split())


def write_lines(path: Path, rows: Iterable[object], end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + end, encoding="utf-8")


def step_row(step: int) -> dict[str, float]:
    row = {
        "step": step,
        "critic/score/mean": step / 50,
        "actor/pg_loss": 0.01,
        "actor/grad_norm": 0.4,
        "actor/entropy": 0.5,
        "actor/ppo_kl": 0.0,
        "training/rollout_probs_diff_mean": 1e-7,
        "training/rollout_k3_kl": 1e-9,
        "response_length/mean": 7.2,
        "response_length/max": 21,
        "timing_s/step": 0.25,
        "timing_s/gen": 0.1,
        "timing_s/train": 0.1,
        "timing_s/save": 0.01,
        "perf/throughput": 20000.0,
        "sampling/acceptance": 0.7,
        "sampling/waves": 2,
    }
    if step % 20 == 0:
        row |= {"val/greedy/score/mean": 0.3 + step / 80, "val/sampled/score/mean": 0.2 + step / 80}
    return row


def step_spans(step: int, *, num_controllers: int = 2, **more: object) -> dict[str, object]:
    """Ten seconds: the last controller generates for longest, and then all of them train."""
    own = [[["gen", 0.0, 2.0 + rank], ["train", 6.0, 9.0]] for rank in range(num_controllers)]
    return {"step": step, "start_s": 100.0 + 10 * step, "controllers": own} | more


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 40 steps."""
    run = tmp_path / "chain-sum"
    evaluated = {"step": 0, "val/greedy/score/mean": 0.3, "val/sampled/score/mean": 0.2}
    write_lines(run / "metrics.jsonl", [evaluated, *map(step_row, range(1, 41))])
    write_lines(
        run / "warmup.jsonl",
        [
            {"step": 50 * i, "sft/loss": 2 / i, "val/sampled/score/mean": i / 20}
            for i in range(1, 5)
        ],
    )
    for name, scores in {"before": (0.0, 1.0), "after": (1.0, 1.0)}.items():
        rows = [
            {"prompt": f"{i}+2=", "completion": f"{name}-{i}", "score": score, "answer": str(i + 2)}
            for i, score in enumerate(scores)
        ]
        write_lines(run / "samples" / f"{name}.jsonl", rows)
    (run / "config.toml").write_text(CONFIG, encoding="utf-8")
    return run


def test_finished_run_shows_everything(run_dir: Path) -> None:
    path = render_report(run_dir, KINDS)
    page = Page(path)
    assert path == run_dir / "report.html"
    assert "chain-sum ✓ Finished, 40 of 40 steps" in page.text
    assert "Held-out accuracy, greedy 30% → 80% step 0 → step 40" in page.text
    assert "Reward, last step 0.8" in page.text
    assert "Throughput 20,000 tokens/s, median" in page.text
    assert "Step time 250 ms" in page.text
    assert "Wall time 10.0 s in 40 training steps" in page.text
    assert "From 0.04 over the first 3 steps to 0.78 over the last 3" in page.text
    assert "Held-out score, sampled: 0.05 → 0.2" in page.text
    assert "Not recorded" not in page.text
    assert 'task = "chain_sum"' in page.text
    assert set(page.figures) == {
        "reward",
        "warmup",
        "stages",
        *(f"signal-{i}" for i in range(1, 10)),
    }


def test_reward_chart_holds_steps_their_mean_and_evaluations(run_dir: Path) -> None:
    raw, mean, greedy, sampled = Page(render_report(run_dir, KINDS)).figures["reward"]["data"]
    assert raw["x"] == list(range(1, 41))
    assert raw["y"] == [step / 50 for step in range(1, 41)]
    assert mean["y"] == pytest.approx(raw["y"])
    assert (greedy["x"], greedy["y"]) == ([0, 20, 40], [0.3, 0.55, 0.8])
    assert (sampled["x"], sampled["y"]) == ([0, 20, 40], [0.2, 0.45, 0.7])


def test_stages_without_a_name_of_ours_are_summed(run_dir: Path) -> None:
    page = Page(render_report(run_dir, KINDS))
    assert [trace["name"] for trace in page.figures["stages"]["data"]] == [
        "gen",
        "train",
        "other",
        "whole step",
    ]
    assert "gen 40% train 40% other 4% whole step" in page.text


def bars_of(page: Page) -> dict[str, list[tuple[str, int, float, float]]]:
    """The timeline's bars by stage: row, step, start and end in seconds."""
    return {
        trace["name"]: [
            (row, step, start_s, start_s + seconds)
            for row, (step, _), start_s, seconds in zip(
                trace["y"], trace["customdata"], trace["base"], trace["x"], strict=True
            )
        ]
        for trace in page.figures["timeline"]["data"]
    }


def test_timeline_shows_every_span_and_the_gaps_between(run_dir: Path) -> None:
    write_lines(
        run_dir / "spans.jsonl",
        [step_spans(39), step_spans(40, devices={"trainer 0": [["train", 6.5, 8.5]]})],
    )
    page = Page(render_report(run_dir, KINDS))
    bars = bars_of(page)
    assert bars.keys() == {"gen", "train", "no stage"}
    assert bars["gen"] == [
        *(("controller 0", 39, 0.0, 2.0), ("controller 0", 40, 10.0, 12.0)),
        *(("controller 1", 39, 0.0, 3.0), ("controller 1", 40, 10.0, 13.0)),
    ]
    assert bars["train"][-1] == ("trainer 0", 40, 16.5, 18.5)
    gaps = [(row, start_s, end_s) for row, _, start_s, end_s in bars["no stage"]]
    assert gaps[3:] == [
        *(("controller 1", 3.0, 6.0), ("controller 1", 9.0, 10.0), ("controller 1", 13.0, 16.0)),
        *(("trainer 0", 0.0, 16.5), ("trainer 0", 18.5, 19.0)),
    ]
    assert "Steps 39 to 40." in page.text
    assert "Last step Last 2 steps" in page.text
    # 3 rows of 19 s: 2 * (2 + 3) s of gen, 4 * 3 s + 2 s of train.
    assert "gen 18% train 25% no stage 58%" in page.text


def test_timeline_hovers_tell_seconds(run_dir: Path) -> None:
    write_lines(run_dir / "spans.jsonl", [step_spans(1)])
    gen = Page(render_report(run_dir, KINDS)).figures["timeline"]["data"][0]
    assert (
        gen["hovertemplate"]
        == "<b>gen</b> %{customdata[1]}<br>%{y}, step %{customdata[0]}<extra></extra>"
    )
    assert gen["customdata"] == [[1, "2.0 s"], [1, "3.0 s"]]


def test_timeline_starts_with_the_last_steps(run_dir: Path) -> None:
    write_lines(run_dir / "spans.jsonl", map(step_spans, range(1, 41)))
    page = Page(render_report(run_dir, KINDS))
    views = [attrs for tag, attrs in page.tags if tag == "button"]
    ranges = [
        (float(a["data-start"] or ""), float(a["data-end"] or ""), a["aria-pressed"]) for a in views
    ]
    assert ranges == [(390.0, 399.0, "false"), (350.0, 399.0, "true"), (0.0, 399.0, "false")]
    assert "Last step Last 5 steps Last 40 steps" in page.text
    layout: Any = page.figures["timeline"]["own"]
    assert layout["xaxis"]["range"] == [350.0, 399.0]
    assert [line["x0"] for line in layout["shapes"]] == [10.0 * step for step in range(40)]


def test_timeline_of_a_run_that_went_back(run_dir: Path) -> None:
    again = step_spans(2) | {"start_s": 200.0, "controllers": [[["gen", 0.0, 1.0]]]}
    write_lines(
        run_dir / "spans.jsonl",
        [step_spans(1), step_spans(2), step_spans(3), again],
        end='\n{"step": 3, "con',
    )
    page = Page(render_report(run_dir, KINDS))
    assert "Steps 1 to 2." in page.text
    assert bars_of(page)["gen"] == [
        ("controller 0", 1, 0, 2),
        ("controller 0", 2, 90, 91),
        ("controller 1", 1, 0, 3),
    ]
    assert "unreadable" not in page.text


def test_stages_without_a_name_of_ours_are_other_in_the_timeline(run_dir: Path) -> None:
    row = step_spans(1) | {"controllers": [[[HOSTILE, 0.0, 1.0], ["eval", 1.0, 2.0]]]}
    write_lines(run_dir / "spans.jsonl", [row])
    page = Page(render_report(run_dir, KINDS))
    assert bars_of(page) == {"other": [("controller 0", 1, 0, 1), ("controller 0", 1, 1, 2)]}


def test_timeline_of_many_controllers_shows_some(run_dir: Path) -> None:
    devices = {f"engine {i}": [["gen", 0.0, 1.0]] for i in range(100)}
    write_lines(
        run_dir / "spans.jsonl",
        [step_spans(i, num_controllers=512, devices=devices) for i in range(1, 101)],
    )
    path = render_report(run_dir, KINDS)
    page = Page(path)
    rows = {row for bars in bars_of(page).values() for row, *_ in bars}
    assert rows == {f"controller {i}" for i in range(0, 512, 22)} | {
        f"engine {i}" for i in range(0, 100, 5)
    }
    assert "44 of 612 controllers and devices" in page.text
    assert "Steps 51 to 100" in page.text
    assert path.stat().st_size < 5_500_000


def test_timeline_rows_stand_by_kind_and_number(run_dir: Path) -> None:
    names = ["trainer 10", "engine 2", "sampling 0", "trainer 9", "cluster", "engine 10"]
    rows = [step_spans(i, devices={name: [["gen", 0.0, 1.0]]}) for i, name in enumerate(names)]
    write_lines(run_dir / "spans.jsonl", rows)
    axis: Any = Page(render_report(run_dir, KINDS)).figures["timeline"]["y"]
    assert axis["categoryarray"][::-1] == [
        *(
            "controller 0",
            "controller 1",
            "cluster",
            "engine 2",
            "engine 10",
            "sampling 0",
            "trainer 9",
            "trainer 10",
        )
    ]


def test_timeline_of_more_spans_than_a_page_bears_shows_fewer_steps(run_dir: Path) -> None:
    busy = [["gen" if i % 2 else "reward", float(i), i + 1.0] for i in range(900)]
    write_lines(
        run_dir / "spans.jsonl",
        [step_spans(i) | {"controllers": [busy, busy]} for i in range(1, 5)],
    )
    assert "Steps 3 to 4." in Page(render_report(run_dir, KINDS)).text
    write_lines(
        run_dir / "spans.jsonl", [step_spans(i) | {"controllers": [busy * 5]} for i in range(1, 5)]
    )
    assert "Step 4." in Page(render_report(run_dir, KINDS)).text


def test_controller_load_is_shown_where_it_is_recorded(run_dir: Path) -> None:
    loads = [
        {"controller/load/max": step / 1000, "controller/load/mean": step / 2000}
        for step in range(1, 11)
    ]
    write_lines(
        run_dir / "metrics.jsonl", [step_row(step) | loads[step - 1] for step in range(1, 11)]
    )
    page = Page(render_report(run_dir, KINDS))
    busiest, mean = page.figures["signal-10"]["data"]
    assert (busiest["name"], busiest["y"]) == (
        "busiest",
        [load["controller/load/max"] for load in loads],
    )
    assert (mean["name"], mean["y"]) == ("mean", [load["controller/load/mean"] for load in loads])
    assert "Controller load last 1%" in page.text


def test_ages_are_shown_where_they_are_recorded(run_dir: Path) -> None:
    shares = [{0: 1.0}, {0: 0.25, 2: 0.75}, {2: 1.0}]
    rows: list[dict[str, float]] = []
    for step, by_age in enumerate(shares, 1):
        ages = {f"sampling/age/share/{age}": share for age, share in by_age.items()}
        mean = sum(age * share for age, share in by_age.items())
        ages |= {"sampling/age/mean": mean, "sampling/age/max": float(max(by_age))}
        rows.append(step_row(step) | ages)
    write_lines(run_dir / "metrics.jsonl", rows)
    page = Page(render_report(run_dir, KINDS))
    fresh, _, old = page.figures["signal-10"]["data"]
    assert (fresh["name"], fresh["y"]) == ("0", [1, 0.25, 0])
    assert (old["name"], old["y"]) == ("2", [0, 0.75, 1])
    assert fresh["stackgroup"] == old["stackgroup"]
    assert "Age of samples last 2" in page.text


def test_samples_stand_side_by_side_with_a_verdict_in_words(run_dir: Path) -> None:
    page = Page(render_report(run_dir, KINDS))
    assert "1 of 2 right before training, 2 of 2 right after training." in page.text
    assert page.cells == [
        *("0+2= expected 2", "✗ wrong before-0", "✓ right after-0"),
        *("1+2= expected 3", "✓ right before-1", "✓ right after-1"),
    ]


def test_scores_of_a_reward_model_are_numbers_not_verdicts(run_dir: Path) -> None:
    write_lines(
        run_dir / "samples" / "after.jsonl", [{"prompt": "0+2=", "completion": "2", "score": 3.75}]
    )
    page = Page(render_report(run_dir, KINDS))
    assert "score 3.75" in page.cells[2]
    assert "right" not in page.text
    assert "wrong" not in page.text


def test_samples_of_different_prompts_are_not_paired(run_dir: Path) -> None:
    write_lines(
        run_dir / "samples" / "after.jsonl", [{"prompt": "9+9=", "completion": "18", "score": 1.0}]
    )
    page = Page(render_report(run_dir, KINDS))
    assert "different prompts" in page.text
    assert page.cells[-3:] == ["9+9=", "not sampled", "✓ right 18"]


@pytest.mark.parametrize(
    ("best", "expected"),
    [(20, "30% → 55% step 0 → step 20"), (0, "30% step 0, which is exported: none was better")],
)
def test_a_run_that_exports_its_best_step_shows_it(run_dir: Path, best: int, expected: str) -> None:
    """As the table on the screen does, whose evaluation `exported_evaluation` chooses, too."""
    (run_dir / "best").mkdir()
    (run_dir / "best/step.json").write_text(json.dumps({"step": best, "score": 0.5}))
    page = Page(render_report(run_dir, KINDS))
    assert f"Held-out accuracy, greedy {expected}" in page.text
    assert exported_evaluation(read_jsonl(run_dir / "metrics.jsonl")[::20], best)["step"] == best


def test_run_in_progress(run_dir: Path) -> None:
    write_lines(
        run_dir / "metrics.jsonl",
        [{"step": 0, "val/greedy/score/mean": 0.3}, step_row(1), step_row(2)],
    )
    (run_dir / "samples" / "after.jsonl").unlink()
    page = Page(render_report(run_dir, KINDS))
    assert "2 of 40 steps done" in page.text
    assert "Held-out accuracy, greedy 30% step 0; not evaluated again yet" in page.text
    assert "Too few steps for a trend yet: 2." in page.text
    assert page.cells[2] == "not there yet"


def test_what_was_not_recorded_is_named(run_dir: Path) -> None:
    write_lines(
        run_dir / "metrics.jsonl", [{"step": 1, "critic/score/mean": 0.5, "actor/entropy": 0.4}]
    )
    page = Page(render_report(run_dir, KINDS))
    assert (
        "Not recorded in this run: Policy loss, Gradient norm, KL to the sampling policy"
        in page.text
    )
    assert set(page.figures) == {"reward", "warmup", "signal-1"}


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "missing"])
def test_run_just_started(tmp_path: Path, is_empty: bool) -> None:
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    if is_empty:
        (tmp_path / "samples").mkdir()
        for name in (
            "metrics.jsonl",
            "warmup.jsonl",
            "samples/before.jsonl",
            "samples/after.jsonl",
        ):
            (tmp_path / name).touch()
    page = Page(render_report(tmp_path, KINDS))
    assert "Just started, no training step yet" in page.text
    assert "metrics.jsonl is missing or empty" in page.text
    assert "samples/before.jsonl and samples/after.jsonl are missing or empty" in page.text
    assert page.figures == {}


def test_run_in_warmup(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()
    page = Page(render_report(run_dir, KINDS))
    assert "In warm-up, no training step yet" in page.text
    assert set(page.figures) == {"warmup"}


def test_run_evaluated_but_not_trained(run_dir: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", [{"step": 0, "val/greedy/score/mean": 0.3}])
    page = Page(render_report(run_dir, KINDS))
    assert "Just started, no training step yet" in page.text
    assert "missing or empty" not in page.text
    assert [trace["y"] for trace in page.figures["reward"]["data"]] == [[0.3]]


def test_torn_last_line_is_ignored(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "critic/sc')
    page = Page(render_report(run_dir, KINDS))
    assert "40 of 40 steps" in page.text
    assert "unreadable" not in page.text


def test_unreadable_line_elsewhere_is_noted(run_dir: Path) -> None:
    lines = (run_dir / "metrics.jsonl").read_bytes().split(b"\n")
    (run_dir / "metrics.jsonl").write_bytes(
        b"\n".join([*lines[:7], b'{"step": \xe2\x82', *lines[7:]])
    )
    assert (
        "metrics.jsonl: 1 unreadable line(s) left out (line 8)."
        in Page(render_report(run_dir, KINDS)).text
    )


def test_resumed_run_drops_the_steps_that_were_rolled_back(run_dir: Path) -> None:
    again = [step_row(step) | {"critic/score/mean": 1.0} for step in (11, 12)]
    write_lines(run_dir / "metrics.jsonl", [*map(step_row, range(1, 16)), *again])
    raw = Page(render_report(run_dir, KINDS)).figures["reward"]["data"][0]
    assert raw["x"] == list(range(1, 13))
    assert raw["y"][9:] == [0.2, 1.0, 1.0]


def test_values_that_are_not_finite_leave_gaps(run_dir: Path) -> None:
    write_lines(
        run_dir / "metrics.jsonl",
        [step_row(1), step_row(2) | {"actor/grad_norm": float("nan")}, step_row(3)],
    )
    page = Page(render_report(run_dir, KINDS))
    assert page.figures["signal-2"]["data"][0]["x"] == [1, 3]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.toml is not there"),
        ("[trainer\n", "config.toml is not valid TOML"),
        ("seed = 1\n", None),
    ],
)
def test_total_steps_unknown(run_dir: Path, config: str | None, said: str | None) -> None:
    (run_dir / "config.toml").unlink()
    if config is not None:
        (run_dir / "config.toml").write_text(config, encoding="utf-8")
    page = Page(render_report(run_dir, KINDS))
    assert "chain-sum 40 steps done" in page.text
    assert (said or "Drawn") in page.text


def test_data_cannot_become_markup(run_dir: Path) -> None:
    hostile = {"prompt": HOSTILE, "completion": HOSTILE, "score": 1.0, "answer": HOSTILE}
    write_lines(run_dir / "samples" / "before.jsonl", [hostile])
    write_lines(run_dir / "samples" / "after.jsonl", [hostile])
    write_lines(run_dir / "metrics.jsonl", [step_row(1) | {f"timing_s/{HOSTILE}": 0.1, HOSTILE: 1}])
    (run_dir / "config.toml").write_text(f"# {HOSTILE}\n", encoding="utf-8")
    path = render_report(run_dir, KINDS)
    assert "<script>alert" not in path.read_text(encoding="utf-8")
    page = Page(path)
    assert page.text.count(HOSTILE) == 5
    assert sum(tag == "script" for tag, _ in page.tags) == 3


def sample_row(step: int, *, prompt: str = "1+2=", **more: object) -> dict[str, object]:
    return {
        "step": step,
        "prompt": prompt,
        "response": "3",
        "score": 1.0,
        "parts": {"format": 0.25},
        "stop": "stop",
    } | {
        **{
            "advantage": 0.5,
            "weight_version": step - 1,
            "oldest_version": step - 3,
            "is_filtered": False,
        },
        **{"prompt_tokens": 4, "response_tokens": 1},
        **more,
    }


def viewed(path: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """The samples of training in a page, by step."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('id="training-samples">')[1].split("</script>")[0])


def test_samples_of_training_can_be_looked_at_by_step(run_dir: Path) -> None:
    hostile = sample_row(
        2, prompt=HOSTILE, score=0, advantage=float("nan"), is_filtered=True, oldest_version=1
    )
    write_lines(
        run_dir / "samples.jsonl", [sample_row(1), sample_row(1, response="c" * 3000), hostile]
    )
    path = render_report(run_dir, KINDS)
    assert "<script>alert" not in path.read_text(encoding="utf-8")
    assert "3 random samples of 2 steps, filtered ones included." in Page(path).text
    (first, [right, long]), (second, [wrong]) = viewed(path)
    assert (first, second) == (1, 2)
    assert right == {
        **{"prompt": "1+2=", "response": "3", "filtered": False, "verdict": "right"},
        "facts": [
            *(
                ["score", "1"],
                ["format", "0.25"],
                ["advantage", "+0.5"],
                ["weights of step", "-2-0"],
            ),
            *(["tokens", "4 + 1"], ["ended by", "stop"]),
        ],
    }
    assert long["response"].endswith("1,000 more characters")
    assert (wrong["prompt"], wrong["verdict"], wrong["filtered"]) == (HOSTILE, "wrong", True)
    assert ["weights of step", "1"] in wrong["facts"]
    assert "advantage" not in dict(wrong["facts"])


def test_a_conversation_is_shown_in_pieces(run_dir: Path) -> None:
    """Each says who wrote it; a branch says what it follows, and is as deep as there are branches around it."""
    pieces = [
        {"text": "5", "is_sampled": True, "parent": -1, "version": 3}
        | {"agent": "helper", "credit": 0.5, "advantage": -0.25},
        {"text": HOSTILE, "is_sampled": False, "parent": 0, "version": -1},
        {"text": "c" * 3000, "is_sampled": True, "parent": 0, "version": 4},
        {"text": "d", "is_sampled": True, "parent": -1, "version": 4},
        {"text": "?", "is_sampled": False, "parent": -2, "version": -1},
    ]
    write_lines(run_dir / "samples.jsonl", [sample_row(1, pieces=pieces)])
    path = render_report(run_dir, KINDS)
    assert "<script>alert" not in path.read_text(encoding="utf-8")
    ((_, [sample]),) = viewed(path)
    shown = sample["pieces"]
    assert [piece["name"] for piece in shown] == ["sampled", "given", "sampled", "sampled", "given"]
    assert [piece["fork"] for piece in shown] == [
        "",
        "",
        "branch after piece 1",
        "branch after the prompt",
        "a conversation of its own",
    ]
    assert [piece["depth"] for piece in shown] == [0, 0, 1, 1, 0]
    assert (
        shown[0]["title"]
        == "piece 1, sampled by the weights of step 3, agent helper, credit 0.5, advantage -0.25"
    )
    assert shown[1]["text"] == HOSTILE
    assert shown[2]["text"].endswith("1,000 more characters")


def test_samples_of_a_long_run_are_those_of_some_steps(run_dir: Path) -> None:
    rows = [sample_row(step, prompt="p" * 2000, response="r" * 2000) for step in range(1, 2001)]
    write_lines(run_dir / "samples.jsonl", rows)
    path = render_report(run_dir, KINDS)
    assert path.stat().st_size < 10_000_000
    steps = [step for step, _ in viewed(path)]
    assert (steps[0], steps[-1]) == (1, 2000)
    assert (
        f"2,000 steps, filtered ones included; {len(steps):,} of the steps are shown"
        in Page(path).text
    )


def test_page_needs_no_network(run_dir: Path) -> None:
    path = render_report(run_dir, KINDS)
    page = Page(path)
    references = {"src", "href", "srcset", "action", "data", "poster"}
    assert not [(tag, attrs) for tag, attrs in page.tags if references & set(attrs)]
    style = path.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_long_run_stays_small(run_dir: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", map(step_row, range(1, 5001)))
    for name in ("before", "after"):
        rows = [
            {"prompt": f"{i} " + "p" * 5000, "completion": "c" * 20000, "score": 1.0}
            for i in range(40)
        ]
        write_lines(run_dir / "samples" / f"{name}.jsonl", rows)
    path = render_report(run_dir, KINDS)
    page = Page(path)
    assert path.stat().st_size < 5_500_000
    assert (
        "mean of 417 steps. In a run this long a point is the mean of neighbouring steps."
        in page.text
    )
    assert "18,000 more characters" in page.text
    assert "The first 32 are shown, 8 more" in page.text


def test_earlier_report_is_replaced_and_nothing_else_is_left(run_dir: Path) -> None:
    before = {path.name for path in run_dir.iterdir()}
    (run_dir / "report.html").write_text("earlier", encoding="utf-8")
    assert "Finished" in render_report(run_dir, KINDS).read_text(encoding="utf-8")
    assert {path.name for path in run_dir.iterdir()} == before | {"report.html"}


@pytest.mark.parametrize("name", ["", "not-there"], ids=["empty folder", "no folder"])
def test_folder_that_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        FileNotFoundError,
        match=r"is not a run's folder: expected one of config\.toml, metrics\.jsonl",
    ):
        render_report(tmp_path / name, KINDS)
    assert not list(tmp_path.iterdir())


def test_import_is_cheap() -> None:
    code = (
        "import sys, gcore_llm.report; print([m for m in ('plotly', 'jinja2') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_ledger_has_a_bar_for_each_role(run_dir: Path) -> None:
    devices = {
        "engine 0": [["gen", 0.0, 2.0]],
        "engine 1": [["gen", 0.0, 1.0]],
        "trainer 0": [["train", 6.0, 9.0]],
    }
    write_lines(
        run_dir / "spans.jsonl", [step_spans(1, devices=devices), step_spans(2, devices=devices)]
    )
    page = Page(render_report(run_dir, KINDS))
    bars = page.figures["ledger"]["data"]
    shares = {
        (bar["name"], role): share
        for bar in bars
        for role, share in zip(bar["y"], bar["x"], strict=True)
    }
    assert {role for _, role in shares} == {"engine", "trainer"}
    assert shares["generation", "engine"] == pytest.approx(3 / 18, abs=1e-4)
    assert shares["long tail", "engine"] == pytest.approx((1 + 2) / 18, abs=1e-4)
    assert shares["training", "trainer"] == pytest.approx(3 / 9, abs=1e-4)
    for role in ("engine", "trainer"):
        assert sum(share for (_, of), share in shares.items() if of == role) == pytest.approx(
            1, abs=1e-3
        )
    assert "Where the devices' time went" in page.text
    assert "share of each role's device time; steps 1 to 2" in page.text
