"""Rows, models and measurements for the tests of `gcore-llm sft`, `reward-model` and `dpo`."""

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
from command_line import Cli, metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A copy of a model whose tokenizer has a chat template."""
    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def pairs(count: int, *, seed: int) -> list[dict[str, str]]:
    """Chosen answers are of digits, rejected ones of letters, of different lengths."""
    rng = random.Random(seed)
    return [
        {
            "prompt": f"{i}:",
            "chosen": "".join(rng.choices("0123456789", k=rng.randint(2, 6))),
            "rejected": "".join(rng.choices("abcdefghij", k=rng.randint(2, 6))),
        }
        for i in range(count)
    ]


def finished(run: Path) -> dict[str, Any]:
    """All that a run gives, apart from what a clock gave."""
    return {"metrics": metrics_of(run), "export": (run / "export/model.safetensors").read_bytes()}


def interrupt_and_resume(cli: Cli, args: list[str], *, after_step: int) -> Path:
    """Ctrl-C once a step is done, then the same command again; the run's folder."""
    run = cli.cwd / "runs/interrupted"
    command = cli.start(*args, "--name", "interrupted")
    while not command.has_ended(0.005):
        if (run / "metrics.jsonl").exists() and metrics_done(run) >= after_step:
            command.send(signal.SIGINT)
            break
    interrupted = command.wait()
    assert (interrupted.code, interrupted.err[:23]) == (130, "gcore-llm: interrupted;"), interrupted
    assert not (run / "export").exists()
    assert "resuming after step" in cli.ok(*args, "--name", "interrupted")
    return run


def metrics_done(run: Path) -> int:
    return max((int(row["step"]) for row in metrics_of(run)), default=0)


def log_prob(model: Any, tokenizer: Any, prompt: str, answer: str) -> float:
    """Of an answer and the end of the sequence, by transformers alone."""
    given = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([[*given, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id]])
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1)
    return float(log_probs.gather(1, ids[0, 1:, None])[len(given) - 1 :].sum())


def causal_lm(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path)
