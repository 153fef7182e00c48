"""Part 10: three steps of `gcore-llm train` on a random model, the trainer and the `hf` engine on one device."""

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from acceptance.models import model_folder, vocab_size
from acceptance.trial import Trial
from gcore_llm import AlgorithmConfig, DataConfig, RolloutConfig, TrainConfig, TrainerConfig, train

_NUM_STEPS = 3
_SHOWN = {
    "timing_s/gen": ("generation", "s"),
    "timing_s/train": ("training", "s"),
    "timing_s/step": ("step", "s"),
    "perf/throughput": ("throughput", "tokens a second"),
    "perf/max_memory_allocated_gb": ("peak memory", "GB"),
    "critic/score/mean": ("score, mean", ""),
    "training/rollout_log_probs_diff_mean": (
        "engine and trainer: difference of log-probs, mean",
        "nats",
    ),
}


def three_steps(trial: Trial) -> None:
    """Train for three steps, and report the last one's times and the agreement of engine and trainer."""
    folder = trial.work / "grpo"
    folder.mkdir()
    model = _with_tokenizer(trial, folder / "model")
    rows = [{"prompt": " ".join(_word(7 * i + k) for k in range(16))} for i in range(96)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, length = (4, 8) if trial.is_small else (16, 256)
    train(
        TrainConfig(
            name="acceptance",
            runs_dir=str(folder / "runs"),
            model=str(model),
            reward=f"{__file__}:share_of_even_words",
            device=trial.device,
            threads=1 if trial.is_small else 0,
            dtype="bfloat16" if trial.device.startswith("cuda") else "float32",
            data=DataConfig(
                train_files=(str(data),),
                train_batch_size=prompts,
                max_prompt_length=64,
                max_response_length=length,
                val_size=8,
            ),
            rollout=RolloutConfig(engine="hf", n=4 if trial.is_small else 8),
            algorithm=AlgorithmConfig(filter_groups=False),
            trainer=TrainerConfig(total_training_steps=_NUM_STEPS, tensorboard=False),
        )
    )
    metrics = folder / "runs" / "acceptance" / "metrics.jsonl"
    rows = (json.loads(line) for line in metrics.read_text().splitlines())
    # The others are evaluations.
    steps = [row for row in rows if "timing_s/gen" in row]
    trial.count("steps", len(steps), at_least=_NUM_STEPS)
    for key, (name, unit) in _SHOWN.items():
        if key in steps[-1]:
            trial.figure(f"step {len(steps)}: {name}", steps[-1][key], unit)


def share_of_even_words(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return the share of words with an even checksum: the responses of a group differ, and a policy can learn it."""
    del prompt, row
    words = completion.split()
    return sum(zlib.crc32(word.encode()) % 2 == 0 for word in words) / max(1, len(words))


def _word(number: int) -> str:
    return f"w{number}"


def _with_tokenizer(trial: Trial, path: Path) -> Path:
    """Copy a model of 0.5B, with a tokenizer that has a word for each token.

    Not Qwen2: transformers replaces any pre-tokenizer with that family's own when it loads a folder.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    shutil.copytree(model_folder(trial, "0.5B", "qwen3"), path)
    words = {_word(number): number for number in range(vocab_size(trial))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=_word(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": _word(0), "pad_token": _word(1), "eos_token": _word(2)}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path)
    return path
