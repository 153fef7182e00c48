"""`gcore-llm sft`: which tokens are learned, that the loss is transformers', and what a run leaves behind."""

import json
import math
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from command_line import Cli, metrics_of, option_set, write_rows
from finetune_cases import TEMPLATE, causal_lm, finished, interrupt_and_resume, with_template
from prometheus_client.parser import text_string_to_metric_families
from server_processes import free_port

from gcore_llm.finetune.data import sft_tokens
from gcore_llm.finetune.tokens import Encoder
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_runs.errors import UserError

EOS = 1
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4!"},
]
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<assistant>{% generation %}{{ m['content'] }}"
    "</assistant>{% endgeneration %}{% else %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
# As Qwen3's does: a thought stands before the last answer alone, and every turn ends with the end of a sequence.
THINKING = (
    "{% for m in messages %}<{{ m['role'] }}>{% if loop.last and m['role'] == 'assistant' %}(hm){% endif %}"
    "{{ m['content'] }}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def encoder(template: str | None = None) -> Encoder:
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    return Encoder(tokenizer, eos_token_ids=[EOS], apply_chat_template=True)


def learned(encoder: Encoder, row: dict[str, Any]) -> tuple[str, str]:
    """The whole text of a row as it is tokenized, and the part of it that is learned; # is the end of a sequence."""
    tokens = sft_tokens(encoder, row, "row 1")
    tokenizer = tiny_tokenizer()
    texts = ["#" if i == EOS else str(tokenizer.decode([i])) for i in tokens.ids]
    return "".join(texts), "".join(
        t for t, is_learned in zip(texts, tokens.mask, strict=True) if is_learned
    )


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_messages_every_answer_is_learned(template: str) -> None:
    text = "<system>Add.</system><user>1+1</user><assistant>2</assistant><user>2+2</user><assistant>4!</assistant>#"
    assert learned(encoder(template), {"messages": CHAT}) == (text, "2</assistant>4!</assistant>#")


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_of_a_prompt_and_completion_only_the_completion_is_learned(template: str) -> None:
    whole = "<system>Add.</system><user>1+1</user><assistant>2</assistant><user>2+2</user><assistant>4!</assistant>#"
    messages = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    assert learned(encoder(template), messages) == (whole, "4!</assistant>#")
    assert learned(encoder(template), {"prompt": CHAT[:4], "completion": "4!"}) == (
        whole,
        "4!</assistant>#",
    )
    text = {"prompt": "1+1", "completion": "2"}
    expected = "<user>1+1</user><assistant>2</assistant>#"
    assert learned(encoder(template), text) == (expected, "2</assistant>#")


def test_a_turn_ends_where_generation_would(tmp_path: Path) -> None:
    """A template that renders earlier turns differently is fine as long as what comes before every turn stays."""
    text = "<system>Add.#\n<user>1+1#\n<assistant>2#\n<user>2+2#\n<assistant>(hm)4!#\n"
    assert learned(encoder(THINKING), {"messages": CHAT}) == (text, "2#(hm)4!#")
    counting = "{{ messages | length }}" + TEMPLATE
    with pytest.raises(
        UserError, match=r"row 1: .* renders what comes before the assistant's turn \(message 3\)"
    ):
        learned(encoder(counting), {"messages": CHAT})


# As GLM's does: nothing ends a turn but the mark of the next role, which ends a response.
UNENDED = (
    "{% for m in messages %}{{ {'user': '\\n', 'system': '!', 'assistant': ':'}[m['role']] + "
    "m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
MARKED_UNENDED = UNENDED.replace(
    "m['content'] }}{% endfor %}",
    "'' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}",
)


@pytest.mark.parametrize("template", [UNENDED, MARKED_UNENDED])
def test_the_next_role_ends_a_turn(template: str) -> None:
    """And is learned after each turn, as in generation."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    ends = [EOS, tokenizer.convert_tokens_to_ids("\n")]
    own = Encoder(tokenizer, eos_token_ids=ends, apply_chat_template=True)
    assert learned(own, {"messages": CHAT}) == ("!Add.\n1+1:2\n2+2:4!#", "2\n4!#")
    assert own.notices() == []


def test_what_is_not_learned_is_a_notice() -> None:
    """Thoughts of earlier turns that the template leaves out, and turns that nothing ends."""
    stripping = THINKING.replace("m['content']", "m['content'].split('</think>')[-1]")
    thoughtful = [
        *(
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": "<think>two?</think>2"},
        ),
        *(
            {"role": "user", "content": "2+2"},
            {"role": "assistant", "reasoning_content": "hm", "content": "4"},
        ),
    ]
    own = encoder(stripping)
    assert learned(own, {"messages": thoughtful})[1] == "2#(hm)4#"
    assert learned(own, {"messages": CHAT})[1] == "2#(hm)4!#"
    [notice] = own.notices()
    assert notice.startswith(
        "1 rows: the chat template leaves out reasoning of the assistant, which is not learned"
    )
    own = encoder(TEMPLATE)
    learned(own, {"messages": CHAT})
    [notice] = own.notices()
    assert notice.startswith(
        "1 rows: the chat template ends turns before the last with no token that ends a response"
    )


TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": None}}
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_of_a_row_are_announced(tools: Any) -> None:
    """As TRL's, a list or JSON of one; None, as Parquet has it in place of missing keys, is dropped."""
    template = "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}" + TEMPLATE
    row = {"messages": CHAT[1:3], "tools": tools}
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    announced = [{"type": "function", "function": {"name": "add", "description": "Adds."}}]
    expected = tokenizer.apply_chat_template(CHAT[1:3], tools=announced, tokenize=False)
    assert learned(encoder(template), row) == (f"{expected}#", "2</assistant>#")
    with pytest.raises(
        UserError, match="row 1: tools are given; expected a chat template that announces them"
    ):
        learned(encoder(TEMPLATE), row)


def test_messages_as_parquet_and_servers_have_them() -> None:
    """Keys that are None are no keys, content may be parts of text, and null next to a call."""
    template = TEMPLATE.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ m.keys() | sort | join(',') }}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}],
            "tool_calls": None,
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_calls": None, "name": None},
        {"role": "assistant", "content": "2", "tool_calls": None},
    ]
    text = (
        "<user>1+1content,role</user><assistant>content,role,tool_calls</assistant>"
        "<tool>2content,role</tool><assistant>2content,role</assistant>#"
    )
    assert learned(encoder(template), {"messages": messages, "tools": None})[0] == text


def test_variables_of_the_template() -> None:
    """`data.chat_template_kwargs`."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = "{{ 'think' if enable_thinking else 'answer' }}" + TEMPLATE
    own = Encoder(
        tokenizer,
        eos_token_ids=[EOS],
        apply_chat_template=True,
        chat_template_kwargs={"enable_thinking": True},
    )
    assert (
        learned(own, {"messages": CHAT[1:3]})[0] == "think<user>1+1</user><assistant>2</assistant>#"
    )


def test_text() -> None:
    assert learned(encoder(), {"prompt": "1+1=", "completion": "2"}) == ("1+1=2#", "2#")
    assert learned(encoder(), {"text": "1+1=2"}) == ("1+1=2#", "1+1=2#")
    assert learned(encoder(TEMPLATE), {"text": "1+1=2"}) == ("1+1=2#", "1+1=2#")


def transformers_loss(model: Path, rows: list[tuple[str, str]]) -> float:
    """Cross-entropy of a padded batch with labels, for rows as (text, what is learned of it: an = for each token)."""
    tokenizer = tiny_tokenizer()
    ids = [[*tokenizer(text)["input_ids"], EOS] for text, _ in rows]
    length = max(map(len, ids))
    labels = [
        [token if mark == "=" else -100 for token, mark in zip(own, marks, strict=True)]
        for own, (_, marks) in zip(ids, rows, strict=True)
    ]
    with torch.no_grad():
        output = causal_lm(model)(
            input_ids=torch.tensor([own + [0] * (length - len(own)) for own in ids]),
            attention_mask=torch.tensor(
                [[1] * len(own) + [0] * (length - len(own)) for own in ids]
            ),
            labels=torch.tensor([own + [-100] * (length - len(own)) for own in labels]),
        )
    return float(output.loss)


def marks(*parts: tuple[str, bool]) -> tuple[str, str]:
    """Text and marks, of parts that are learned or not; the end of the sequence is learned."""
    return "".join(t for t, _ in parts), "".join(
        ("=" if on else " ") * len(t) for t, on in parts
    ) + "="


def test_loss_is_that_of_transformers(cli: Cli, tiny: Path) -> None:
    """Of a masked conversation, a prompt with its completion, and text; in one batch and in small micro-batches."""
    with_template(tiny, cli.cwd / "model", TEMPLATE)
    rows = [
        {"messages": CHAT},
        {"prompt": "9*9", "completion": "81"},
        {"text": "to be or not to be"},
    ]
    write_rows(cli.cwd / "rows.jsonl", rows)
    conversation = marks(
        ("<system>Add.</system><user>1+1</user><assistant>", False),
        ("2</assistant>", True),
        ("<user>2+2</user><assistant>", False),
        ("4!</assistant>", True),
    )
    completion = marks(("<user>9*9</user><assistant>", False), ("81</assistant>", True))
    text = marks(("t", False), ("o be or not to be", True))
    expected = transformers_loss(tiny, [conversation, completion, text])
    args = [
        "sft",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--model",
        "model",
        "--data.train-files",
        "rows.jsonl",
    ]
    args += [
        "--data.val-files",
        "rows.jsonl",
        "--data.train-batch-size",
        "3",
        "--data.max-length",
        "128",
    ]
    for name, budget in (("whole", 1000), ("small", 128)):
        cli.ok(*args, "--max-token-len", budget, "--name", name)
        evaluated, step, _ = metrics_of(cli.cwd / "runs" / name)
        assert evaluated["val/sft/loss"] == pytest.approx(expected, rel=1e-5)
        assert step["sft/loss"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def job(cli: Cli, tiny: Path) -> list[str]:
    """Two epochs of forty rows, four a step, in about two seconds."""
    write_rows(
        cli.cwd / "rows.jsonl", [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(44)]
    )
    return [
        *(
            "sft",
            "--threads",
            "1",
            "--device",
            "cpu",
            "--model",
            str(tiny),
            "--data.train-files",
            "rows.jsonl",
        ),
        *("--data.train-batch-size", "4", "--data.max-length", "32", "--optim.lr", "1e-3"),
        *("--trainer.total-epochs", "2", "--trainer.save-freq", "7", "--trainer.test-freq", "5"),
    ]


def test_interrupted_run_ends_as_if_nothing_had_happened(cli: Cli, job: list[str]) -> None:
    out = cli.ok(*job, "--name", "whole", "--optim.lr-warmup-steps-ratio", "0.1")
    assert "40 training rows, 4 held out" in out
    whole = finished(cli.cwd / "runs/whole")
    steps = [row for row in whole["metrics"] if "sft/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert steps[-1]["data/epoch"] == 2
    rates = [row["actor/lr"] for row in steps]
    assert rates[:2] == pytest.approx([5e-4, 1e-3])
    assert rates[-1] == pytest.approx(1e-3 * (1 + math.cos(math.pi * 17 / 18)) / 2)
    evaluations = {
        row["step"]: row["val/sft/loss"] for row in whole["metrics"] if "val/sft/loss" in row
    }
    assert sorted(evaluations) == [0, 5, 10, 15, 20]
    assert evaluations[20] < evaluations[0] - 1
    run = interrupt_and_resume(cli, [*job, "--optim.lr-warmup-steps-ratio", "0.1"], after_step=3)
    assert finished(run) == whole


def test_a_longer_run_continues_from_the_end(cli: Cli, job: list[str]) -> None:
    args = [*job, "--optim.lr-scheduler-type", "constant", "--trainer.total-training-steps"]
    cli.ok(*args, 5, "--name", "straight")
    cli.ok(*args, 3, "--name", "extended")
    assert "complete: 3 of 3 steps are done" in cli.ok(*args, 3, "--name", "extended")
    cli.ok(*args, 5, "--name", "extended")
    straight, extended = (finished(cli.cwd / "runs" / name) for name in ("straight", "extended"))
    assert straight["export"] == extended["export"]
    assert straight["metrics"] == [row for row in extended["metrics"] if not is_last_of_three(row)]


def is_last_of_three(row: dict[str, float]) -> bool:
    """The evaluation that the shorter run made at its end."""
    return row["step"] == 3 and "val/sft/loss" in row


def test_half_precision_and_recomputed_layers(cli: Cli, job: list[str]) -> None:
    short = [*job, "--trainer.total-training-steps", "2"]
    losses: dict[str, list[float]] = {}
    for name, options in (
        ("plain", []),
        ("recomputed", ["--enable-gradient-checkpointing", "True"]),
    ):
        cli.ok(*short, *options, "--name", name)
        losses[name] = [
            r["sft/loss"] for r in metrics_of(cli.cwd / "runs" / name) if "sft/loss" in r
        ]
    cli.ok(*short, "--dtype", "bfloat16", "--name", "half")
    half = [r["sft/loss"] for r in metrics_of(cli.cwd / "runs/half") if "sft/loss" in r]
    assert losses["recomputed"] == pytest.approx(losses["plain"], rel=1e-6)
    assert half == pytest.approx(losses["plain"], rel=2e-2)
    assert half != losses["plain"]


def test_parquet_is_the_same_as_jsonl_and_long_rows_are_counted(cli: Cli, job: list[str]) -> None:
    rows = [{"text": "ab" * (5 + i % 3)} for i in range(12)] + [{"text": "x" * 40}] * 2
    write_rows(cli.cwd / "rows.jsonl", rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), cli.cwd / "rows.parquet")
    out = cli.ok(*job, "--name", "jsonl", "--trainer.total-training-steps", "2")
    assert "left out 2 rows longer than 32 tokens" in out
    assert "11 training rows, 1 held out" in out
    job[job.index("rows.jsonl")] = "rows.parquet"
    cli.ok(*job, "--name", "parquet", "--trainer.total-training-steps", "2")
    first, second = (finished(cli.cwd / "runs" / name) for name in ("jsonl", "parquet"))
    assert first == second


def scraped(url: str) -> dict[str, float]:
    """The values of what a run serves; nothing before it does."""
    try:
        with urllib.request.urlopen(url, timeout=300) as reply:
            families = text_string_to_metric_families(reply.read().decode())
    except urllib.error.URLError:
        return {}
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_run_is_served_for_prometheus_and_logged(cli: Cli, job: list[str]) -> None:
    port = free_port()
    many = [
        *option_set(job, "--trainer.test-freq", "1000"),
        "--trainer.total-training-steps",
        "100000",
    ]
    command = cli.start(*many, "--trainer.tensorboard", "False", "--trainer.prometheus", port)
    served: dict[str, float] = {}
    while not command.has_ended(0.02) and served.get("gcore_step", 0.0) < 2:
        served = scraped(f"http://127.0.0.1:{port}/metrics")
    command.send(signal.SIGINT)
    assert command.wait().code == 130
    losses = {
        row["step"]: row["sft/loss"]
        for row in metrics_of(cli.cwd / "runs/sft")
        if "sft/loss" in row
    }
    assert served["gcore_sft_loss"] == losses[int(served["gcore_step"])]
    assert served["gcore_step_seconds_count"] == served["gcore_step"]
    lines = cli.ok("logs", "runs/sft", "--role", "main").splitlines()
    assert "main INFO gcore_runs.logs: process" in lines[0]
    steps = [line for line in lines if "main INFO gcore_llm.finetune.run: step " in line]
    assert len(steps) == len(losses)


def test_demo(cli: Cli) -> None:
    """What the command does without any option, in small."""
    out = cli.ok(
        "sft",
        "--task.num-train",
        "300",
        "--task.num-val",
        "16",
        "--trainer.total-training-steps",
        "6",
    )
    assert "held-out rows" in out
    assert "report:  runs/sft/report.html" in out
    run = cli.cwd / "runs/sft"
    assert {p.name for p in run.iterdir()} == {
        *(
            "config.toml",
            "metrics.jsonl",
            "tensorboard",
            "checkpoints",
            "export",
            "model",
            "report.html",
            "logs",
            ".lock",
            "fingerprints.json",
        )
    }
    losses = [row["val/sft/loss"] for row in metrics_of(run) if "val/sft/loss" in row]
    assert losses[-1] < losses[0]
    page = (run / "report.html").read_text()
    assert "Loss per step" in page
    assert "Held-out loss" in page
    assert "Samples before and after" not in page
    assert "is a run of the command sft; expected one of train" in cli.refused(
        "sample", run, "1+1="
    )
    exported = causal_lm(run / "export")
    assert np.isfinite(exported(torch.tensor([[5, 6]])).logits.detach().numpy()).all()
