"""Rewards of images by local models of transformers, against independent arithmetic and published rules."""

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor

from gcore_rollout import ImageRewardSettings, RewardConfigError, build_image_reward

NOISE = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
ROWS: list[dict[str, Any]] = [{}] * 3
PROMPTS = ["red 1", "blue 2", "red 3"]


class Block(torch.nn.Module):
    """A layer of open_clip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        layers = {"c_fc": torch.nn.Linear(width, 24), "gelu": torch.nn.GELU(), "c_proj": torch.nn.Linear(24, width)}
        self.mlp = torch.nn.Sequential(OrderedDict(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class OpenCLIP(torch.nn.Module):
    """A CLIP model with the names of open_clip, and its own arithmetic."""

    def __init__(self, num_words: int, width: int = 16, out: int = 12) -> None:
        super().__init__()
        visual: Any = torch.nn.Module()
        text: Any = torch.nn.Module()
        visual.conv1 = torch.nn.Conv2d(3, width, 8, 8, bias=False)
        visual.class_embedding = torch.nn.Parameter(torch.randn(width))
        visual.positional_embedding = torch.nn.Parameter(torch.randn(17, width))
        visual.ln_pre, visual.ln_post = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        visual.proj = torch.nn.Parameter(torch.randn(width, out))
        visual.transformer, self.visual, self.transformer = torch.nn.Module(), visual, text
        for tower in (visual.transformer, text):
            tower.resblocks = torch.nn.ModuleList([Block(width), Block(width)])
        self.token_embedding = torch.nn.Embedding(num_words, width)
        self.positional_embedding = torch.nn.Parameter(torch.randn(8, width))
        self.ln_final = torch.nn.LayerNorm(width)
        self.text_projection = torch.nn.Parameter(torch.randn(width, out))
        self.logit_scale = torch.nn.Parameter(torch.ones(()))

    @torch.no_grad()
    def cosines(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        own: Any = self.visual
        x = own.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([own.class_embedding.expand(len(x), 1, -1), x], 1) + own.positional_embedding
        x = own.ln_pre(x)
        for block in own.transformer.resblocks:
            x = block(x)
        seen = own.ln_post(x[:, 0]) @ own.proj
        y = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        blocks: Any = self.transformer.resblocks
        for block in blocks:
            y = block(y, mask)
        read = self.ln_final(y)[torch.arange(len(y)), tokens.argmax(1)] @ self.text_projection
        return torch.nn.functional.cosine_similarity(seen, read)


def test_hps_is_the_cosine_of_a_checkpoint_of_open_clip(clip: Path, tmp_path: Path) -> None:
    config: Any = CLIPConfig.from_pretrained(clip)
    for own in (config.text_config, config.vision_config):
        own.hidden_act, own.num_hidden_layers, own.intermediate_size = "gelu", 2, 24
    shutil.copytree(clip, tmp_path / "clip")
    # Its own weights are not read.
    (tmp_path / "clip/model.safetensors").unlink()
    config.save_pretrained(tmp_path / "clip")
    tokenizer = AutoTokenizer.from_pretrained(clip)
    torch.manual_seed(3)
    model = OpenCLIP(len(tokenizer))
    weights = tmp_path / "HPS_v2.1_compressed.pt"
    torch.save({"state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}}, weights)
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")["pixel_values"]
    expected = model.cosines(pixels, tokenizer(PROMPTS, padding=True, return_tensors="pt")["input_ids"])
    settings = ImageRewardSettings(path=str(tmp_path / "clip"), head=str(weights))
    found: Any = build_image_reward("hps", settings, setting="reward.kind")(NOISE, PROMPTS, ROWS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(found) > 1e-2
    (tmp_path / "none.pt").write_bytes(b"none")
    for folder, head, said in (
        (clip, weights, "not of the model in path: "),
        (clip, tmp_path / "none.pt", "none.pt': "),
        (tmp_path, weights, "expected a Hugging Face folder of a CLIP model"),
        (clip, "", "reward.head is not set; expected HPS_v2.1_compressed.pt"),
    ):
        with pytest.raises(RewardConfigError, match=said):
            build_image_reward("hps", ImageRewardSettings(path=str(folder), head=str(head)), setting="reward.kind")
