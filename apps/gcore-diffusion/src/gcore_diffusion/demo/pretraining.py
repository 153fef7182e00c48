"""Pretraining of the embedded pipeline by flow matching on coloured digits; the result is kept for later runs."""

import hashlib
import math
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.digits import COLOURS, PROMPTS, load
from gcore_diffusion.demo.tiny_pipeline import make_tiny_pipeline
from gcore_runs.display import Display
from gcore_trainer import FlowProcess, MovingAverage

_LR = 2e-3
_WARMUP_STEPS = 30
_EMA_DECAY = 0.99
_UNCONDITIONAL = 0.1
"""Share of images that are trained on without their prompt, for guidance."""


def pretrained_pipeline(config: DemoConfig, *, seed: int, display: Display) -> Path:
    """Return the folder of a pretrained pipeline, from an earlier run or a new one."""
    cache = Path(config.cache_dir) if config.cache_dir else _user_cache()
    key = hashlib.sha256(repr((sorted(asdict(config).items()), seed, _source())).encode()).hexdigest()[:12]
    target = cache / f"digits-{key}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".digits-") as folder:
            made = Path(folder) / "pipeline"
            pretrain(made, config, seed=seed, display=display)
            try:
                made.rename(target)
            except OSError:
                # Another run has put its pipeline there first.
                shutil.rmtree(made, ignore_errors=True)
    return target


def pretrain(path: Path, config: DemoConfig, *, seed: int, display: Display) -> None:
    """Make a pipeline, pretrain it, and write its folder with the moving average of its weights."""
    with tempfile.TemporaryDirectory() as words:
        pipeline = make_tiny_pipeline(Path(words), seed=seed)
        _train(pipeline, config, seed=seed, display=display)
        pipeline.save_pretrained(path)


def _train(pipeline: Any, config: DemoConfig, *, seed: int, display: Display) -> None:
    model = pipeline.transformer
    embedded, pooled = _embeddings(pipeline)
    digits, colours = load(), torch.tensor(list(COLOURS.values()))
    images, labels = torch.from_numpy(digits.images)[:, None], torch.from_numpy(digits.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01, betas=(0.9, 0.99))
    average = MovingAverage(dict(model.named_parameters()), _EMA_DECAY)
    generator, process = torch.Generator().manual_seed(seed), FlowProcess()
    display.phase("teaching the embedded model to draw", total=config.num_steps)
    model.train()
    losses: list[float] = []
    for step in range(config.num_steps):
        rows = torch.randint(len(images), (config.batch_size,), generator=generator)
        colour = torch.randint(len(colours), (config.batch_size,), generator=generator)
        clean = images[rows] * colours[colour][:, :, None, None] * 2 - 1
        prompt = colour * 10 + labels[rows]
        prompt[torch.rand(len(prompt), generator=generator) < _UNCONDITIONAL] = len(PROMPTS)
        # Middle levels are drawn more often: they are the hardest to learn (arXiv 2403.03206, section 3.1).
        level = torch.sigmoid(torch.randn(len(prompt), generator=generator))
        noise = torch.randn(clean.shape, generator=generator)
        output = model(
            hidden_states=process.noised(clean, noise, level),
            timestep=process.timesteps(level),
            encoder_hidden_states=embedded[prompt],
            pooled_projections=pooled[prompt],
            return_dict=False,
        )[0]
        loss = torch.nn.functional.mse_loss(output, process.target(clean, noise, level))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            rest = 1 - step / config.num_steps
            group["lr"] = _LR * min(1.0, (step + 1) / _WARMUP_STEPS) * max(0.05, rest)
        optimizer.step()
        average.update(step)
        losses.append(loss.item())
        display.progressed(step + 1, [("loss", f"{np.mean(losses[-50:]):.3f}")])
    model.load_state_dict(model.state_dict() | average.tensors)
    model.eval()
    assert math.isfinite(losses[-1])


@torch.no_grad()
def _embeddings(pipeline: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings of all prompts and then of the empty one: [P + 1, tokens, width] and [P + 1, width]."""
    embedded, _, pooled, _ = pipeline.encode_prompt(
        prompt=[*PROMPTS, ""], prompt_2=None, prompt_3=None, do_classifier_free_guidance=False, max_sequence_length=1
    )
    return embedded, pooled


def _source() -> str:
    """Return the code that makes the model: other code makes another model."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text() for name in ("digits.py", "tiny_pipeline.py", "pretraining.py"))


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "gcore-diffusion"
