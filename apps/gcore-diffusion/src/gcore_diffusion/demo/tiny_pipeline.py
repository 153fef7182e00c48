"""The embedded pipeline: real classes of diffusers and transformers, with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

from gcore_diffusion.demo.digits import COLOURS, SIZE

_LAYERS = 3
_HEADS = 4
_HEAD_DIM = 24
_TEXT_WIDTH = 32
_MAX_TOKENS = 4
"""Start, colour, digit, end."""


def make_tiny_pipeline(path: Path, *, seed: int) -> StableDiffusion3Pipeline:
    """Make a Stable Diffusion 3 of a million parameters, for RGB images of 8 x 8 pixels without a VAE.

    Its two text encoders stay random: prompts are distinct with any token embeddings that are far enough apart.

    Args:
        path: a folder for the tokenizer's files.
        seed: seed of the weights.
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
        if name.endswith(("norm1.linear", "norm1_context.linear")) or name in ("norm_out.linear", "proj_out"):
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
    tokens = [*letters, *(letter + "</w>" for letter in letters)]
    merges: list[str] = []
    for word in words:
        built = word[0]
        for place, letter in enumerate(word[1:], start=1):
            added = letter + ("</w>" if place == len(word) - 1 else "")
            if (merge := f"{built} {added}") not in merges:
                merges.append(merge)
            built += added
            if built not in tokens:
                tokens.append(built)
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    path.mkdir(parents=True, exist_ok=True)
    (path / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (path / "merges.txt").write_text("#version: 0.2\n" + "".join(merge + "\n" for merge in merges))
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
