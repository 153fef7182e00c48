"""Several held-out sets in a run, `gcore-llm eval` on runs and models, and the best policy of a run."""

import json
import re
import signal
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from command_line import Cli, option_set, read_rows, val_rows, write_rows

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.evaluation.config import ValConfig
from gcore_llm.evaluation.evaluate import val_sets
from gcore_llm.prompts import PromptSets
from gcore_llm.sampling import sampling_params
from gcore_llm.sections import DataConfig
from gcore_rollout import Prompt

VOTING = '''
from gcore_rollout import Scored


def reward(prompt, completion, row):
    """The first character is the answer; an even code is right."""
    even = sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
    return Scored(score=float(even > 0.5), answer=completion[:1] or None)
'''

SUMS = [
    {"prompt": f"{i}+{i}=", "answer": 2 * i, "data_source": "even" if i % 3 else "odd/3"}
    for i in range(7)
]
GSM8K = [
    {"question": f"What is {i} and {i}?", "answer": f"It is <<{i}+{i}={2 * i}>>.\n#### {2 * i}"}
    for i in range(3)
]


@pytest.fixture(scope="module")
def evaluated(shared_cli: Cli, own_args: list[str]) -> Path:
    """A run of two steps, evaluated after each on three sets, whose best policy by a vote is exported."""
    cwd = shared_cli.cwd
    (cwd / "voting.py").write_text(VOTING)
    write_rows(cwd / "val.jsonl", SUMS[:5])
    write_rows(cwd / "sums.jsonl", SUMS)
    write_rows(cwd / "gsm.jsonl", GSM8K)
    out = shared_cli.ok(
        *option_set(
            option_set(own_args, "--reward", "voting.py:reward"), "--data.max-prompt-length", "128"
        ),
        *(
            "--data.val-files",
            "val.jsonl",
            "sums=sums.jsonl",
            "gsm8k=gsm.jsonl",
            "--rollout.val-kwargs.n",
            "4",
        ),
        *(
            "--rollout.val-kwargs.sets.gsm8k",
            "{n = 2, temperature = 0.5}",
            "--trainer.test-freq",
            "1",
        ),
        *(
            "--trainer.export",
            "best",
            "--trainer.best-metric",
            "val/sums/odd/3/avg@4",
            "--actor.optim.lr",
            "2e-2",
        ),
    )
    assert "40 training prompts, 15 held out" in out
    assert re.search(r"step 2: gsm8k: greedy [\d.]+ ± [\d.]+, avg@2 [\d.]+ ± [\d.]+, pass@2 ", out)
    return cwd / "runs/default"


def test_evaluation_has_a_top_p_and_top_k_of_its_own() -> None:
    """A set may have others, too."""
    settings = ValConfig(top_p=0.95, top_k=20, sets={"x": {"top_k": 5}})
    rollout = RolloutConfig(val_kwargs=settings, stop=("</a>",), top_p=0.9, top_k=50)
    config = TrainConfig(
        rollout=rollout,
        data=DataConfig(train_files=("a.jsonl",), val_files=("x=b.jsonl", "c.jsonl")),
    )
    prompt = Prompt(text="1+1=", token_ids=(1,), row={})
    prompts = PromptSets(
        train=[], val=[prompt], val_by_name={"x": [prompt]}, num_too_long=0, longest=1
    )
    samplings = [own.sampling for own in val_sets(prompts, config, {})]
    assert [(own.top_p, own.top_k) for own in samplings] == [(0.95, 20), (0.95, 5)]
    trained = sampling_params(config)
    assert (trained.top_p, trained.top_k) == (0.9, 50)
    assert {own.stop for own in (trained, *samplings)} == {("</a>",)}


def by_hand(rows: list[dict[str, Any]], name: str) -> dict[str, float]:
    """Metrics of a set from its responses, by every subset of them."""
    found: dict[str, float] = {}
    for way, key in (("greedy", "greedy"), ("sampled", "avg@4")):
        means = [fmean(r["score"] for r in row["responses"]) for row in rows if row["way"] == way]
        found[f"{name}/{key}"], found[f"{name}/{key}/stderr"] = (
            fmean(means),
            stdev(means) / len(means) ** 0.5,
        )
    for k in (2, 4):
        best = [
            fmean(
                max(subset) >= 1
                for subset in combinations([r["score"] for r in row["responses"]], k)
            )
            for row in rows
            if row["way"] == "sampled"
        ]
        found[f"{name}/pass@{k}"] = fmean(best)
    return found


def results_of(out: str, cwd: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The estimates and the responses in the folder that an evaluation names."""
    [line] = [line for line in out.splitlines() if line.startswith("results:")]
    file = cwd / line.removeprefix("results:").strip()
    return json.loads(file.read_text()), read_rows(file.with_name("responses.jsonl"))


def test_sets_of_a_run(shared_cli: Cli, evaluated: Path) -> None:
    """`eval` repeats the last evaluation of the run, and its responses give the same metrics by hand."""
    first, *_, last = val_rows(evaluated)
    assert first["timing_s/val"] > 0
    out = shared_cli.ok("eval", evaluated)
    assert f"step 2: held-out score {last['val/greedy/score/mean']:.3f} greedy, " in out
    results, rows = results_of(out, shared_cli.cwd)
    assert {name: last[name] for name in results["metrics"]} == pytest.approx(results["metrics"])
    assert results["sets"]["sums"]["avg@4"]["num"] == 7
    assert [
        sum(row["set"] == name and row["way"] == "sampled" for row in rows)
        for name in ("", "sums", "gsm8k")
    ] == [*(5, 7, 3)]
    sums = [row for row in rows if row["set"] == "sums"]
    odd = [row for row in sums if SUMS[row["prompt"]]["data_source"] == "odd/3"]
    expected = by_hand(sums, "val/sums") | by_hand(odd, "val/sums/odd/3")
    assert {name: last[name] for name in expected} == pytest.approx(expected)
    assert 0 < last["val/sums/avg@4"] < last["val/sums/pass@4"], (
        "the votes and chances are not trivial"
    )
    everyone = [
        fmean(r["score"] for r in row["responses"]) for row in rows if row["way"] == "sampled"
    ]
    assert last["val/sampled/score/mean"] == pytest.approx(fmean(everyone))
    assert {
        "val/avg@4",
        "val/pass@2",
        "val/maj@4/stderr",
        "val/gsm8k/pass@2",
        "val/sums/even/maj@2",
    } <= last.keys()
    few, _ = results_of(
        shared_cli.ok("eval", evaluated, "--on", "sums=sums.jsonl", "--limit", "2"), shared_cli.cwd
    )
    assert few["sets"]["sums"]["avg@4"]["num"] == 2
    assert not {"val/gsm8k/maj@4", "val/greedy", "val/avg@1"} & last.keys()


def test_the_best_policy(shared_cli: Cli, evaluated: Path) -> None:
    """It is the one of the metric that is set, is exported, and is what `eval --checkpoint best` scores."""
    rows = val_rows(evaluated)
    name = "val/sums/odd/3/avg@4"
    best = max(rows, key=lambda row: row[name])
    assert rows[-1]["val/best"] == best[name]
    assert json.loads((evaluated / "best/step.json").read_text()) == {
        "step": best["step"],
        "score": best[name],
    }
    trained = (evaluated / "best/trained/model.safetensors").read_bytes()
    assert (evaluated / "export/model.safetensors").read_bytes() == trained
    assert (evaluated / "export/tokenizer.json").is_file()
    results, _ = results_of(
        shared_cli.ok("eval", evaluated, "--checkpoint", "best"), shared_cli.cwd
    )
    assert results["metrics"][name] == pytest.approx(best[name])
    # The export is a model of its own.
    args = (
        "eval",
        evaluated / "export",
        "--on",
        "sums=sums.jsonl",
        "--reward",
        "voting.py:reward",
        "--n",
        "4",
    )
    results, _ = results_of(shared_cli.ok(*args, "--max-tokens", "8"), shared_cli.cwd)
    assert results["metrics"][name] == pytest.approx(best[name])


def test_the_report_shows_the_sets(evaluated: Path) -> None:
    page = (evaluated / "report.html").read_text()
    for text in ("Held-out sets", "sums/odd/3", "gsm8k", "avg@4", "maj@4"):
        assert text in page
    last = val_rows(evaluated)[-1]
    cell = f"{last['val/sums/pass@4']:.3g} ± {last['val/sums/pass@4/stderr']:.3g}"
    assert '<td data-label="Metric">pass@4</td><td data-label="First">' in page
    assert f'<td data-label="Last">{cell}</td>' in page
    assert '"timing_s/val"' not in page


@pytest.mark.slow
def test_an_evaluation_that_was_killed_continues(cli: Cli, tiny: Path) -> None:
    """Nothing that is in the file is generated again, and the result is that of one that was not killed."""
    (cli.cwd / "slow.py").write_text(
        VOTING.replace("    even =", "    import time; time.sleep(0.05)\n    even =")
    )
    write_rows(cli.cwd / "sums.jsonl", [{"prompt": f"{i}+{i}="} for i in range(30)])
    args = (
        "eval",
        tiny,
        "--on",
        "sums.jsonl",
        "--n",
        "2",
        "--max-tokens",
        "4",
        "--reward",
        "slow.py:reward",
        "--out",
    )
    command = cli.start(*args, "killed")
    responses = cli.cwd / "killed/responses.jsonl"
    command.wait_until(lambda: responses.is_file() and len(read_rows(responses)) >= 10)
    command.send(signal.SIGKILL)
    command.wait()
    kept = read_rows(responses)
    with responses.open("a") as file:
        file.write('{"set": "", "way": "samp')
    assert 10 <= len(kept) < 60
    out = cli.ok(*args, "killed")
    assert f"continuing after {sum(len(row['responses']) for row in kept)} of 90 responses" in out
    results, rows = results_of(out, cli.cwd)
    assert rows[: len(kept)] == kept
    assert len(rows) == 60
    expected, _ = results_of(cli.ok(*args, "whole"), cli.cwd)
    assert results == expected
    assert (
        "out is killed; expected another folder: its results are of another max_tokens"
        in cli.refused(*option_set(list(map(str, args)), "--max-tokens", "5"), "killed")
    )


def test_wrong_arguments(cli: Cli, own_args: list[str], tiny: Path) -> None:
    write_rows(cli.cwd / "a.jsonl", [{"prompt": "1+1=", "answer": "none"}])
    assert (
        "on is not set; expected files of prompts with a model, or of gsm8k, math500"
        in cli.refused("eval", tiny)
    )
    assert (
        "model is 'nowhere'; expected a run's folder, a model's, or its name on the Hub"
        in cli.refused("eval", "nowhere")
    )
    on = ("eval", tiny, "--on", "a.jsonl")
    assert "reward is not set; expected PATH.py:function, math-verify, gsm8k, " in cli.refused(*on)
    assert "the row's 'answer' is 'none'; expected a text with a number" in cli.refused(
        *on, "--reward", "gsm8k"
    )
    assert "on has 'x' twice; expected sets of different names" in cli.refused(
        *on, "x=a.jsonl", "x=b.jsonl"
    )
    assert "max_tokens is 9999; expected 1 to" in cli.refused(
        *on, "--max-tokens", "9999", "--reward", "aime"
    )
    assert "n is -1; expected 0 or more" in cli.refused(*on, "--n", "-1")
    assert "checkpoint is 'best'; expected 'latest' with a model" in cli.refused(
        *on, "--checkpoint", "best"
    )
    assert "a.jsonl: row 1 has no column 'question'; it has 'prompt', 'answer'" in cli.refused(
        "eval", tiny, "--on", "gsm8k=a.jsonl"
    )
    sets = "--rollout.val-kwargs.sets"
    assert (
        "rollout.val_kwargs.sets has 'x'; expected a set of data.val_files: none has a name"
        in cli.refused(*own_args, f"{sets}.x.n", "3")
    )
    val = (*own_args, "--data.val-files", "x=a.jsonl")
    assert "rollout.val_kwargs.sets.x.n is -1; expected 0 or more" in cli.refused(
        *val, f"{sets}.x.n", "-1"
    )
    assert (
        "rollout.val_kwargs.sets.x has min_p; expected n, temperature, top_p, top_k, reward"
        in cli.refused(*val, f"{sets}.x.min_p", "1")
    )
    assert "rollout.val_kwargs.sets.x.top_p is 0.0; expected a number in (0, 1]" in cli.refused(
        *val, f"{sets}.x.top_p", "0"
    )
    assert "chat_template_kwargs is '[1]'; expected a JSON object" in cli.refused(
        *on, "--chat-template-kwargs", "[1]"
    )
    assert "top_k is -2; expected 1 or more, or -1 for all tokens" in cli.refused(
        *on, "--top-k", "-2"
    )
    assert (
        "trainer.best_metric is 'val/y'; expected a metric of evaluations: val/greedy/score"
        in cli.refused(*own_args, "--trainer.best-metric", "val/y", "--trainer.export", "best")
    )
