"""Rewards of images by local models of transformers, against independent arithmetic and published rules."""

import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tiny_pipelines import word_tokenizer
from transformers import (
    AutoTokenizer,
    CLIPConfig,
    CLIPImageProcessor,
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    GotOcr2ImageProcessor,
    GotOcr2Processor,
    TrOCRConfig,
    TrOCRForCausalLM,
    TrOCRProcessor,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from gcore_rollout import ImageRewardSettings, RewardConfigError, build_image_reward
from gcore_rollout.images.text import OCRReward, text_similarity

NOISE = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
ROWS: list[dict[str, Any]] = [{}] * 3
PROMPTS = ["red 1", "blue 2", "red 3"]


class Block(torch.nn.Module):
    """A layer of open_clip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attn = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        layers = {
            "c_fc": torch.nn.Linear(width, 24),
            "gelu": torch.nn.GELU(),
            "c_proj": torch.nn.Linear(24, width),
        }
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
    torch.save(
        {"state_dict": {f"module.{name}": tensor for name, tensor in model.state_dict().items()}},
        weights,
    )
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")[
        "pixel_values"
    ]
    expected = model.cosines(
        pixels, tokenizer(PROMPTS, padding=True, return_tensors="pt")["input_ids"]
    )
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
            build_image_reward(
                "hps", ImageRewardSettings(path=str(folder), head=str(head)), setting="reward.kind"
            )


def trocr(path: Path) -> Path:
    """A tiny TrOCR that reads letters and digits out of noise."""
    tokenizer = word_tokenizer(path / "words")
    size: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    start, end = len(tokenizer) - 2, len(tokenizer) - 1
    torch.manual_seed(0)
    encoder = ViTModel(ViTConfig(**size, num_attention_heads=2, image_size=32, patch_size=8))
    config = TrOCRConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=160,
        cross_attention_hidden_size=16,
        init_std=1.0,
    )
    model: Any = VisionEncoderDecoderModel(encoder=encoder, decoder=TrOCRForCausalLM(config))
    for own in (model.config, model.generation_config):
        own.decoder_start_token_id, own.eos_token_id, own.pad_token_id = start, end, end
    model.save_pretrained(path)
    TrOCRProcessor(ViTImageProcessor(size={"height": 32, "width": 32}), tokenizer).save_pretrained(
        path
    )
    return path


def got_ocr(path: Path) -> Path:
    """A tiny GOT-OCR2, whose prompts have the image's places and a question."""
    tokenizer = word_tokenizer(path / "words")
    tokenizer.add_tokens(
        ["<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"], special_tokens=True
    )
    tokenizer.model_max_length = 4096
    size: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(2)
    config = GotOcr2Config(
        vision_config={
            **size,
            "output_channels": 8,
            "image_size": 64,
            "patch_size": 1,
            "window_size": 8,
            "global_attn_indexes": [],
            "mlp_dim": 16,
            "initializer_range": 0.5,
        },
        text_config={
            **size,
            "vocab_size": len(tokenizer),
            "intermediate_size": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "eos_token_id": len(tokenizer) - 4,
            "bos_token_id": None,
            "initializer_range": 1.0,
        },
        image_token_index=len(tokenizer) - 1,
    )
    GotOcr2ForConditionalGeneration(config).save_pretrained(path)
    GotOcr2Processor(
        GotOcr2ImageProcessor(size={"height": 64, "width": 64}), tokenizer
    ).save_pretrained(path)
    return path


@torch.no_grad()
def greedy(step: Callable[[torch.Tensor], torch.Tensor], ids: list[int], end: int) -> list[int]:
    """The tokens that follow ``ids``, each the likeliest, without a cache."""
    found: list[int] = []
    while len(found) < 128 and found[-1:] != [end]:
        found.append(int(step(torch.tensor([ids + found]))[0, -1].argmax()))
    return found


def test_ocr_reads_images_as_the_model_does(tmp_path: Path) -> None:
    """Scores are those of the texts that the model writes of one image alone, greedily."""
    model: Any = VisionEncoderDecoderModel.from_pretrained(trocr(tmp_path / "trocr"))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "trocr")
    pixels = ViTImageProcessor.from_pretrained(tmp_path / "trocr")(
        list(NOISE), return_tensors="pt"
    )["pixel_values"]
    start, end = len(tokenizer) - 2, len(tokenizer) - 1
    texts: list[str] = []
    for one in pixels:
        step = partial(
            lambda x, ids: model(pixel_values=x[None], decoder_input_ids=ids).logits, one
        )
        texts.append(tokenizer.decode(greedy(step, [start], end), skip_special_tokens=True))
    settings = ImageRewardSettings(path=str(tmp_path / "trocr"), text_key="sign")
    reward: Any = build_image_reward("ocr", settings, setting="reward.kind")
    rows = [{"sign": text[1:-1]} for text in texts]
    assert len(set(texts)) == 3
    assert min(map(len, texts)) > 3
    assert reward(NOISE, PROMPTS, rows).tolist() == [1.0] * 3
    wanted = [texts[1], texts[0], "quite another"]
    rows = [{"sign": text} for text in wanted]
    expected = [text_similarity(text, other) for text, other in zip(texts, wanted, strict=True)]
    assert reward(NOISE, PROMPTS, rows).tolist() == expected
    assert max(expected) < 1
    with pytest.raises(
        RewardConfigError, match="'red 1'; expected a row with a text in the column 'sign'"
    ):
        reward.check_prompts(PROMPTS, [{"sign": 7}] * 3)
    quoted: Any = build_image_reward("ocr", replace(settings, text_key=""), setting="reward.kind")
    prompts = [f'a sign that says "{text}" and "no"' for text in texts]
    assert quoted(NOISE, prompts, ROWS).tolist() == [1.0] * 3
    quoted.check_prompts([*prompts, "“curly”"], [*ROWS, {}])
    with pytest.raises(
        RewardConfigError, match=r"prompt is '\" \" is empty'; expected one with the wanted text in"
    ):
        quoted.check_prompts(['" " is empty'], [{}])


@pytest.mark.slow
def test_ocr_reads_behind_a_prompt(tmp_path: Path) -> None:
    model: Any = GotOcr2ForConditionalGeneration.from_pretrained(got_ocr(tmp_path / "got"))
    reward = OCRReward(tmp_path / "got")
    texts = reward.read(NOISE)
    assert len(set(texts)) == 3
    processor: Any = GotOcr2Processor.from_pretrained(tmp_path / "got")
    inputs = processor(images=[NOISE[1]], return_tensors="pt")

    def step(ids: torch.Tensor) -> torch.Tensor:
        return model(pixel_values=inputs["pixel_values"], input_ids=ids, use_cache=False).logits

    ids = greedy(step, inputs["input_ids"][0].tolist(), model.config.text_config.eos_token_id)
    assert texts[1] == processor.decode(ids, skip_special_tokens=True)


def test_ocr_of_wrong_folders(clip: Path, tmp_path: Path) -> None:
    for folder, said in (
        (tmp_path, "expected a Hugging Face folder of a model that reads text in images"),
        (clip, "path is "),
        (
            "",
            "reward.path is not set; expected a local folder of a model that reads text in images for ocr",
        ),
    ):
        with pytest.raises(RewardConfigError, match=said):
            build_image_reward("ocr", ImageRewardSettings(path=str(folder)), setting="reward.kind")


@cache
def distance(a: str, b: str) -> int:
    """The edit distance by its definition."""
    if not a or not b:
        return len(a) + len(b)
    return min(
        distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0])
    )


@pytest.mark.parametrize(
    ("read", "wanted", "expected"),
    [
        ("OPEN", "open", 1.0),
        ("shop is O P E N today", "open", 1.0),
        ("opan", "Open", 0.75),
        ("", "open", 0.0),
        ("completely unrelated", "open", 0.0),
        ("ope", "open", 0.75),
        ("hello wrld", "Hello World", 0.9),
    ],
)
def test_texts_are_compared_as_published(read: str, wanted: str, expected: float) -> None:
    assert text_similarity(read, wanted) == pytest.approx(expected)


@given(read=st.text("ab c", max_size=7), wanted=st.text("ABC", min_size=1, max_size=7))
def test_the_edit_distance(read: str, wanted: str) -> None:
    a, b = read.replace(" ", ""), wanted.lower()
    expected = 1.0 if b in a else max(0.0, 1 - distance(a, b) / len(b))
    assert text_similarity(read, wanted) == pytest.approx(expected)
