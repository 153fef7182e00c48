"""The embedded pipeline: real classes of diffusers and transformers, pretrained on coloured digits by flow matching.

The result is kept for later runs.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
    StableDiffusion3Pipeline,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.digits import COLOURS, PROMPTS, SIZE, load
from gcore_runs import Display
from gcore_trainer import FlowProcess, MovingAverage

_LR = 2e-3
_WARMUP_STEPS = 30
_EMA_DECAY = 0.99
_UNCONDITIONAL = 0.1
"""Share of images that are trained on without their prompt, for guidance."""
_LAYERS = 3
_HEADS = 4
_HEAD_DIM = 24
_TEXT_WIDTH = 32
_MAX_TOKENS = 4
"""Start, colour, digit, end."""


def pretrained_pipeline(config: DemoConfig, *, seed: int, display: Display) -> Path:
    """Return the folder of a pretrained pipeline, from an earlier run or a new one."""
    user_cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gcore-diffusion"
    )
    cache = Path(config.cache_dir or user_cache)
    # Other code makes another model.
    source = Path(__file__).with_name("digits.py").read_text() + Path(__file__).read_text()
    key = hashlib.sha256(repr((sorted(asdict(config).items()), seed, source)).encode()).hexdigest()[
        :12
    ]
    target = cache / f"digits-{key}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".digits-") as folder:
            pretrained = Path(folder) / "pipeline"
            pipeline = make_tiny_pipeline(Path(folder) / "words", seed=seed)
            _train(pipeline, config, seed=seed, display=display)
            pipeline.save_pretrained(pretrained)
            try:
                pretrained.rename(target)
            except OSError:
                # Another run has put its pipeline there first.
                shutil.rmtree(pretrained, ignore_errors=True)
    return target


def _train(pipeline: Any, config: DemoConfig, *, seed: int, display: Display) -> None:
    model = pipeline.transformer
    embedded, pooled = _embeddings(pipeline)
    images, labels = map(torch.from_numpy, load())
    images = images[:, None]
    colours = torch.tensor(list(COLOURS.values()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01, betas=(0.9, 0.99))
    average = MovingAverage(dict(model.named_parameters()), _EMA_DECAY)
    generator = torch.Generator().manual_seed(seed)
    process = FlowProcess()
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
            hidden_states=process.add_noise(clean, noise, level),
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
        display.show_progress(step + 1, [("loss", f"{np.mean(losses[-50:]):.3f}")])
    model.load_state_dict(model.state_dict() | average.tensors)
    model.eval()
    assert math.isfinite(losses[-1])


@torch.no_grad()
def _embeddings(pipeline: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings of all prompts and then of the empty one: [P + 1, tokens, width] and [P + 1, width]."""
    embedded, _, pooled, _ = pipeline.encode_prompt(
        prompt=[*PROMPTS, ""],
        prompt_2=None,
        prompt_3=None,
        do_classifier_free_guidance=False,
        max_sequence_length=1,
    )
    return embedded, pooled


def make_tiny_pipeline(path: Path, *, seed: int) -> StableDiffusion3Pipeline:
    """Make a Stable Diffusion 3 of a million parameters, for RGB images of 8 x 8 pixels without a VAE.

    Its two text encoders stay random: prompts are distinct with any token embeddings that are far enough apart. The
    tokenizer's files are written to the folder ``path``.
    """
    torch.manual_seed(seed)
    tokenizer = _word_tokenizer(path)
    transformer = SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=_LAYERS,
        attention_head_dim=_HEAD_DIM,
        num_attention_heads=_HEADS,
        joint_attention_dim=2 * _TEXT_WIDTH,
        caption_projection_dim=_HEADS * _HEAD_DIM,
        pooled_projection_dim=2 * _TEXT_WIDTH,
        pos_embed_max_size=SIZE // 2,
        qk_norm="rms_norm",
    )
    # As in diffusion transformers (arXiv 2212.09748, section 3.2): initially, blocks are the identity and the output 0.
    for name, module in transformer.named_modules():
        if name.endswith(("norm1.linear", "norm1_context.linear")) or name in (
            "norm_out.linear",
            "proj_out",
        ):
            torch.nn.init.zeros_(module.weight)  # pyright: ignore[reportArgumentType]
            torch.nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]
    absent: dict[str, Any] = dict.fromkeys(("vae", "text_encoder_3", "tokenizer_3"))
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        text_encoder=_text_encoder(len(tokenizer), seed=seed + 1),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(len(tokenizer), seed=seed + 2),
        tokenizer_2=tokenizer,
        **absent,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _word_tokenizer(path: Path) -> CLIPTokenizer:
    """Return a tokenizer with a token for each word of the prompts."""
    words = [*COLOURS, *map(str, range(10))]
    letters = sorted(set("".join(words)))
    tokens = letters + [letter + "</w>" for letter in letters]
    merges: list[str] = []
    for word in words:
        prefix = word[0]
        for index, letter in enumerate(word[1:], start=2):
            if index == len(word):
                letter += "</w>"
            merge = f"{prefix} {letter}"
            if merge not in merges:
                merges.append(merge)
            prefix += letter
            if prefix not in tokens:
                tokens.append(prefix)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.json").write_text(json.dumps(dict(zip(tokens, range(len(tokens)), strict=True))))
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return CLIPTokenizer.from_pretrained(path, model_max_length=_MAX_TOKENS)


def _text_encoder(vocab_size: int, *, seed: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    config = CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=_TEXT_WIDTH,
        intermediate_size=2 * _TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=_MAX_TOKENS,
        projection_dim=_TEXT_WIDTH,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )
    model = CLIPTextModelWithProjection(config).eval().requires_grad_(False)
    torch.nn.init.normal_(model.text_model.embeddings.token_embedding.weight, std=1.0)
    return model
