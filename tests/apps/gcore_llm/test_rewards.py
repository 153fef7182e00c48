"""`gcore-llm train` with every kind of reward: judges, classifiers, servers, programs in a sandbox."""

import asyncio
import json
import math
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, option_set, read_rows, step_rows, val_rows, write_rows
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from gcore_llm.cli import parse_train
from gcore_llm.sampling import TextRewards
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import JudgeReward, RewardError, Scored
from gcore_runs.settings.resources import resolve

# A random model writes any character: its last digit is its verdict, and if it writes none, that is one, too.
JUDGE = [
    *(
        "--reward-model.kind",
        "judge",
        "--reward-model.judge.pattern",
        r"(\d)",
        "--reward-model.judge.score-range",
        "0",
        "9",
    ),
    *("--reward-model.judge.max-response-length", "24", "--reward-model.judge.n", "2"),
]


def rows_of(cli: Cli, own_args: list[str], *options: str) -> list[dict[str, float]]:
    cli.ok(*own_args, *options)
    rows = step_rows(cli.cwd / "runs/default")
    assert len(rows) == 2
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", ["0", "1"])
def test_a_judge_next_to_a_function(
    cli: Cli, own_args: list[str], tiny: Path, num_processes: str
) -> None:
    """A tiny policy learns from a rule and, half as much, from a tiny judge, in its process or in another."""
    options = ["--reward-model.path", str(tiny), "--reward-model.weight", "0.5"]
    options += [
        "--reward-model.judge.unparsable-score",
        "0.25",
        "--reward-model.judge.num-processes",
        num_processes,
    ]
    rows = rows_of(cli, own_args, *JUDGE, *options)
    for row in rows:
        total = row["reward/function/mean"] + 0.5 * row["reward/model/mean"]
        assert row["critic/score/mean"] == pytest.approx(total)
        assert 0 < row["reward/model/parsed/mean"] < 1
        assert row["sampling/dropped_groups"] == 0
        assert row["actor/grad_norm"] > 0


STYLE = [
    "--reward-model.judges.style.pattern",
    r"(\d)",
    "--reward-model.judges.style.max-response-length",
    "16",
]


@pytest.mark.slow
def test_two_judges_next_to_a_function(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """Each with its own question, weight and process; what they say is known by their names."""
    (cli.cwd / "style.txt").write_text("{completion} ")
    options = ["--reward-model.path", str(tiny), "--reward-model.judge.unparsable-score", "0.25"]
    style = {
        "path": tiny,
        "weight": 2,
        "template": "style.txt",
        "unparsable-score": 0.5,
        "num-processes": 1,
    }
    options += [f"--reward-model.judges.style.{name}={value}" for name, value in style.items()]
    rows = rows_of(cli, own_args, *JUDGE, *STYLE, *options)
    for row in rows:
        parts = [row[f"reward/{name}/mean"] for name in ("function", "model", "style")]
        assert row["critic/score/mean"] == pytest.approx(np.dot(parts, [1, 1, 2]), abs=1e-5)
        assert 0 < row["reward/style/parsed/mean"] < 1
        assert parts[1] != parts[2]
    assert all(
        read["parts"].keys() >= {"function", "model", "style"}
        for read in read_rows(cli.cwd / "runs/default/samples.jsonl")
    )


def test_a_judge_by_name_is_enough(cli: Cli, own_args: list[str], tiny: Path) -> None:
    rows = rows_of(
        cli, own_args, *STYLE, "--reward-model.judges.style.path", str(tiny), "--reward", ""
    )
    for row in rows:
        assert row["critic/score/mean"] == pytest.approx(row["reward/style/mean"], abs=1e-5)


def test_groups_without_a_verdict_are_not_trained_on(
    cli: Cli, own_args: list[str], tiny: Path
) -> None:
    """By the judge's own question, which it fills in with the row."""
    (cli.cwd / "question.txt").write_text("{prompt}{completion} of {answer}?")
    options = [
        "--reward-model.path",
        str(tiny),
        "--reward-model.judge.template",
        "question.txt",
        "--reward",
        "",
    ]
    rows = rows_of(cli, own_args, *JUDGE, *options)
    assert any(row["sampling/dropped_groups"] > 0 for row in rows)
    for row in rows:
        assert row["reward/model/parsed/mean"] <= 1
        assert row["critic/score/mean"] == pytest.approx(row["reward/model/mean"])


RUBRIC = [
    {"name": "digits", "description": "has a digit", "weight": 3},
    {"title": "Signs", "description": "has a sign", "weight": 1},
]


def rubric_options(cli: Cli, own_args: list[str], tiny: Path, rubrics: list[Any]) -> list[str]:
    """A run on rows with these rubrics, whose questions are short enough for the tiny judge."""
    rows = [{"prompt": f"{i}+1=", "rubric": rubric} for i, rubric in enumerate(rubrics)]
    data = write_rows(cli.cwd / "rubrics.jsonl", rows)
    (cli.cwd / "question.txt").write_text("{completion} {criterion} ")
    args = option_set(option_set(own_args, "--data.train-files", str(data)), "--reward", "")
    judge = {"path": tiny, "judge.template": "question.txt", "judge.method": "rubric"}
    return [*args, *JUDGE, *(f"--reward-model.{name}={value}" for name, value in judge.items())]


def test_rubrics_in_rows(cli: Cli, own_args: list[str], tiny: Path) -> None:
    options = rubric_options(cli, own_args, tiny, [RUBRIC] * 20)
    for row in rows_of(cli, options, "--reward-model.judge.unparsable-score", "0.25"):
        parts = [row[f"reward/model/criterion/{name}/mean"] for name in ("digits", "2")]
        assert parts[0] != parts[1]
        assert row["critic/score/mean"] == pytest.approx(np.dot(parts, [0.75, 0.25]), abs=1e-5)
        assert 0 < row["reward/model/parsed/mean"] < 1
        assert row["actor/grad_norm"] > 0


def test_a_bad_rubric_is_found_before_the_run_starts(
    cli: Cli, own_args: list[str], tiny: Path
) -> None:
    rubrics = [RUBRIC, RUBRIC, [RUBRIC[0], {"description": "has a sign", "weight": "low"}]]
    refused = " ".join(cli.refused(*rubric_options(cli, own_args, tiny, rubrics)).split())
    expected = "rubrics.jsonl: prompt of row 3: part 'model': weight of criterion 2 of the row's 'rubric' is 'low'"
    assert f"{expected}; expected one number" in refused
    assert not (cli.cwd / "runs").exists()


class Votes:
    """In place of a `JudgeModel`: each sample has other principles, and a score by them."""

    async def ask(self, questions: Any, images: Any = None) -> list[list[str]]:
        del images
        self.questions = questions
        return [[f"1. Score: {i} (60%): brevity. It is short. Score: {i + 2}" for i in range(8)]]


async def test_a_judge_of_the_page_writes_its_own_principles(tmp_path: Path, tiny: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/own-reward.md").read_text()
    _, _, rest = page.partition("**Principles of the judge's own.**")
    section, _, _ = rest.partition("\n## ")
    [template, settings] = re.findall(r"^```\w+\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    (tmp_path / "principles.txt").write_text(template)
    settings = settings.replace("principles.txt", str(tmp_path / "principles.txt"))
    (tmp_path / "run.toml").write_text(settings.replace("MODEL", str(tiny)))
    judge = parse_train(["--config", str(tmp_path / "run.toml")]).reward_model.judge
    votes: Any = Votes()
    reward = JudgeReward(
        model=votes, template=judge.question(), parse=judge.scores(), reduce=judge.reduce
    )
    scored = await reward("Greet.", "Hi", {})
    assert scored.score == pytest.approx(np.mean([(i + 1) / 9 for i in range(8)]))
    assert "Request:\nGreet.\n\nAnswer:\nHi\n\nFirst write down" in votes.questions[0]
    assert judge.n == 8


# As for a score, a random model's last a or b is its verdict; most have none, and are ties.
PAIRWISE = [
    *(
        "--reward-model.kind",
        "judge",
        "--reward-model.judge.method",
        "all_pairs",
        "--reward-model.judge.pattern",
        "([ab])",
    ),
    *(
        "--reward-model.judge.max-response-length",
        "12",
        "--reward-model.judge.unparsable-score",
        "0.5",
    ),
]


@pytest.mark.parametrize(("method", "has_function"), [("all_pairs", True), ("swiss", False)])
def test_a_judge_that_compares(
    cli: Cli, own_args: list[str], tiny: Path, method: str, has_function: bool
) -> None:
    """Each group's shares of wins have the mean of a tie; groups of ties alone have nothing to learn from."""
    args = own_args if has_function else option_set(own_args, "--reward", "")
    (cli.cwd / "question.txt").write_text("{answer}: {prompt}{completion_a}, or {completion_b}?")
    options = [
        *option_set(PAIRWISE, "--reward-model.judge.method", method),
        "--reward-model.path",
        str(tiny),
        "--reward-model.judge.template",
        "question.txt",
    ]
    for row in rows_of(cli, args, *options, "--reward-model.weight", "2"):
        assert row["reward/model/mean"] == pytest.approx(0.5)
        assert 0 < row["reward/model/parsed/mean"] < 1
        assert row["critic/score/mean"] == pytest.approx(row.get("reward/function/mean", 0.0) + 1.0)
        assert row["critic/score/max"] > row["critic/score/min"]
        assert ("reward/function/mean" in row) == has_function
        assert row["actor/grad_norm"] > 0
    # Held out, the greedy and the sampled answer are compared with each other, also by `gcore-llm eval`.
    rows = val_rows(cli.cwd / "runs/default")
    if not has_function:
        for row in rows:
            assert row["val/greedy/score/mean"] + row["val/sampled/score/mean"] == pytest.approx(
                2.0
            )
    scores = [f"{rows[-1][f'val/{kind}/score/mean']:.3f} {kind}" for kind in ("greedy", "sampled")]
    assert f"step 2: held-out score {', '.join(scores)}\n" in cli.ok("eval", "runs/default")


@pytest.mark.slow
def test_comparison_of_responses_that_took_several_steps(
    cli: Cli, own_args: list[str], chatty: Path, tiny: Path
) -> None:
    """A group is compared once all of it is there, whichever steps that took."""
    args = option_set(
        option_set(own_args, "--model", str(chatty)), "--data.max-response-length", "48"
    )
    partial = ["--rollout.partial-rollout", "True", "--rollout.over-sample-rate", "1"]
    rows = rows_of(cli, args, *PAIRWISE, *partial, "--reward-model.path", str(tiny))
    assert all(row["sampling/unfinished_groups"] > 0 for row in rows)
    assert all(row["reward/model/mean"] == pytest.approx(0.5) for row in rows)


def test_groups_that_cannot_be_compared(cli: Cli, own_args: list[str], tiny: Path) -> None:
    """A random model never says who wins: no group is left."""
    options = ["--reward-model.path", str(tiny), "--algorithm.max-num-gen-batches", "1"]
    finished = cli(*own_args, *PAIRWISE[:4], *PAIRWISE[6:8], *options)
    assert (finished.code, finished.err) == (3, "")
    assert "the run trained nothing" in finished.out
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["sampling/groups"] == 0
        assert row["sampling/dropped_groups"] > 0


def test_a_classifier(cli: Cli, own_args: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    others: dict[str, Any] = {"num_labels": 1, "pad_token_id": 0, "bos_token_id": None}
    config = Qwen3Config(vocab_size=128, **sizes, **heads, **others)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    tiny_tokenizer().save_pretrained(tmp_path / "scorer")
    options = [
        "--reward-model.kind",
        "classifier",
        "--reward-model.path",
        str(tmp_path / "scorer"),
        "--reward",
        "",
    ]
    rows = rows_of(cli, own_args, *options)

    async def score() -> float:
        rewards = await TextRewards.start(resolve(parse_train([*own_args[1:], *options])))
        scored = await rewards.runner.score(prompt="1+1=", completion="2", row={})
        await rewards.close()
        assert isinstance(scored, Scored)
        return scored.score

    model = Qwen3ForSequenceClassification.from_pretrained(tmp_path / "scorer")
    ids = tiny_tokenizer()("1+1=2<eos>", return_tensors="pt")["input_ids"]
    assert asyncio.run(score()) == pytest.approx(model(input_ids=ids).logits.item(), abs=1e-5)
    assert all(row["critic/score/mean"] == pytest.approx(row["reward/model/mean"]) for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


SCORER_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"


def test_a_classifier_of_another_family(own_args: list[str], tmp_path: Path) -> None:
    """It sees prompt and answer in its own markup up to the token that ends the answer, which pads its batches, too."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    settings: dict[str, Any] = {
        **sizes,
        **heads,
        "num_labels": 1,
        "pad_token_id": eos,
        "eos_token_id": eos,
    }
    config = Qwen3Config(vocab_size=128, **settings)
    model: Any = Qwen3ForSequenceClassification(config)
    model.save_pretrained(tmp_path / "scorer")
    tokenizer.chat_template = SCORER_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "scorer")
    options = [
        "--reward-model.kind",
        "classifier",
        "--reward-model.path",
        str(tmp_path / "scorer"),
        "--reward",
        "",
    ]
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "1+1="}]

    async def scores(*calls: tuple[str, str, Any]) -> list[float]:
        rewards = await TextRewards.start(resolve(parse_train([*own_args[1:], *options])))
        runner = rewards.runner
        scored = await asyncio.gather(
            *(runner.score(prompt=p, completion=c, row={"prompt": r}) for p, c, r in calls)
        )
        await rewards.close()
        return [one.score for one in scored if isinstance(one, Scored)]

    calls = [
        ("[user]1+1=[a]", "2", "1+1="),
        ("[system]short[user]1+1=[a]", "", messages),
        ("1+1=", "22", "1+1="),
    ]
    texts = [
        "<user>1+1=<eos>\n<assistant>2<eos>",
        "<system>short<eos>\n<user>1+1=<eos>\n<assistant><eos>",
        "1+1=22<eos>",
    ]
    expected: list[float] = []
    for text in texts:
        hidden = model.model(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state
        expected.append(model.score(hidden)[0, -1, 0].item())
    assert asyncio.run(scores(*calls)) == pytest.approx(expected, abs=1e-5)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "scorer")
    (tmp_path / "scorer/chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(RewardError, match=r"reward_model\.path has no chat template; expected one"):
        asyncio.run(scores(calls[0]))


class _Scorer(BaseHTTPRequestHandler):
    """Scores by length; answers that begin with a digit are refused."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        refuses = asked["completion"][:1].isdigit()
        body = (
            b"no digits"
            if refuses
            else json.dumps({"score": len(asked["completion"]) / 8}).encode()
        )
        self.send_response(400 if refuses else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Scorer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_a_server_whose_failures_drop_groups(cli: Cli, own_args: list[str], url: str) -> None:
    options = ["--reward-model.kind", "server", "--reward-model.path", url, "--reward", ""]
    rows = rows_of(cli, own_args, *options, "--reward-calls.max-failed-share", "0.5")
    assert any(row["sampling/dropped_groups"] > 0 for row in rows)


def test_a_server_whose_failure_ends_the_run(cli: Cli, own_args: list[str], url: str) -> None:
    finished = cli(
        *own_args, "--reward-model.kind", "server", "--reward-model.path", url, "--reward", ""
    )
    assert finished.code == 2
    assert "answered 400 Bad Request: 'no digits'" in " ".join(finished.err.split())


@pytest.mark.slow
def test_programs_are_run(cli: Cli, own_args: list[str]) -> None:
    """A model that writes no programs scores 0, and no step finds anything to learn."""
    data = write_rows(
        cli.cwd / "code.jsonl", ({"prompt": f"{i}", "tests": ["assert True"]} for i in range(20))
    )
    args = option_set(option_set(own_args, "--data.train-files", str(data)), "--reward", "code")
    finished = cli(*args, "--algorithm.max-num-gen-batches", "1")
    assert (finished.code, finished.err) == (3, "")
    for row in step_rows(cli.cwd / "runs/default"):
        assert row["critic/score/mean"] == row["reward/has_code/mean"] == 0
        assert row["sampling/groups"] == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--reward-model.kind", "judge"],
            "reward_model.kind is 'judge' and reward_model.path is ''; expected a kind with a path",
        ),
        (
            ["--reward-model.kind", "judge", "--reward-model.path", "nowhere"],
            "reward_model.path is 'nowhere'; expected a Hugging",
        ),
        (
            ["--reward-model.kind", "server", "--reward-model.path", "x"],
            "url is 'x'; expected http://... or https://...",
        ),
        (
            ["--reward-model.weight", "0"],
            "reward_model.weight is 0.0; expected a finite number other than 0",
        ),
        (
            ["--reward-model.judge.engine", "vllm"],
            "reward_model.judge.num_processes is 0; expected 1 or more with reward_model.judge.engine",
        ),
        (
            ["--reward-model.judges.style.n", "1"],
            "reward_model.judges.NAME.path is ''; expected the folder of the",
        ),
        (
            ["--reward-model.judges.Style.path", "x"],
            "reward_model.judges has 'Style'; expected names of small letters",
        ),
        (
            ["--reward-model.judges.a.wieght", "1"],
            "unknown field reward_model.judges.a.wieght; did you mean",
        ),
        (["--reward-model.judge.n", "0"], "reward_model.judge.n is 0; expected at least 1"),
        (
            [*PAIRWISE[:-1], "0.25"],
            "reward_model.judge.unparsable_score is 0.25; expected 0.5, a tie",
        ),
        (
            [*PAIRWISE, "--reward-model.judge.score-range", "0", "9"],
            "they are of scores, comparisons have winners",
        ),
        (
            [*PAIRWISE, "--reward-model.path", "x", "--rollout.multi-turn.max-revisions", "1"],
            "reward_model.judge.method is 'all_pairs'; expected score, rubric or steps with several turns, because",
        ),
        (
            [*PAIRWISE, "--reward-model.path", "x", "--algorithm.adv-estimator", "remax"],
            "reward_model.judge.method is 'all_pairs'; expected score, rubric or steps with algorithm.adv_estimator ",
        ),
        (
            ["--reward-model.judge.pairwise", "True"],
            "did you mean --reward-model.judge.method?",
        ),
        (
            ["--reward-model.judges.a.path", "x", "--reward-model.judges.a.method", "swiss"],
            "reward_model.judges.NAME.method is 'swiss'; expected score or rubric: reward_model.judge alone",
        ),
        (["--reward-calls.timeout-s", "0"], "reward_calls.timeout_s is 0.0; expected more than 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_settings(cli: Cli, own_args: list[str], options: list[str], expected: str) -> None:
    assert expected in " ".join(cli.refused(*own_args, *options).split())
    assert list(cli.cwd.iterdir()) == []


def test_a_bad_template_is_found_before_the_run_starts(
    cli: Cli, own_args: list[str], tiny: Path
) -> None:
    for text, expected in {
        "{prompt}": "expected {completion} in it",
        "{completion} {nothing}": "the row has no 'nothing' for the judge's template: it has ['answer', 'prompt']",
    }.items():
        (cli.cwd / "question.txt").write_text(text)
        options = [
            *JUDGE,
            "--reward-model.path",
            str(tiny),
            "--reward-model.judge.template",
            "question.txt",
        ]
        assert expected in " ".join(cli.refused(*own_args, *options).split())
    assert [path.name for path in cli.cwd.iterdir()] == ["question.txt"]
