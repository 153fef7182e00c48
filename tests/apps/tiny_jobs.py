"""Tiny models and jobs of `gcore-llm train` on a user's own prompts."""

import json
import shutil
from pathlib import Path

from command_line import write_rows

EVENS = '''
def reward(prompt, completion, row):
    """The share of characters with an even code: even a random model has groups that differ."""
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
'''

HOLDING = '''
import asyncio
from pathlib import Path


async def reward(prompt, completion, row):
    """The same, once there is no file of this name."""
    while Path("hold").exists():
        await asyncio.sleep(0.02)
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
'''


def make_chatty_model(path: Path, *, tiny: Path) -> None:
    """Copy the embedded model to one that ends its responses at any digit: their lengths have a long tail."""
    from gcore_llm.tiny_model import tiny_tokenizer

    shutil.copytree(tiny, path)
    digits = tiny_tokenizer()("0123456789")["input_ids"]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *digits]}))


def own_job(folder: Path, model: Path) -> list[str]:
    """Write forty prompts and a reward into a folder; return the command of two steps on them, about a second."""
    (folder / "evens.py").write_text(EVENS)
    write_rows(
        folder / "train.jsonl",
        ({"prompt": f"{i}+{i % 7}=", "answer": i + i % 7} for i in range(40)),
    )
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(model)),
        *(
            "--data.train-files",
            str(folder / "train.jsonl"),
            "--reward",
            f"{folder / 'evens.py'}:reward",
        ),
        *("--data.train-batch-size", "8", "--rollout.n", "4", "--data.max-response-length", "8"),
        *(
            "--data.max-prompt-length",
            "64",
            "--actor.optim.lr",
            "1e-3",
            "--trainer.total-training-steps",
            "2",
        ),
    ]
