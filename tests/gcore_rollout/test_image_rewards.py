"""Rewards of images: against their definitions, against transformers' own CLIP, and what they refuse."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines import word_tokenizer
from tiny_vision_model import (
    END,
    IMAGE,
    VISION_END,
    VISION_START,
    Reference,
    png,
    save_vision_model,
)
from transformers import (
    AutoTokenizer,
    BlipConfig,
    BlipForImageTextRetrieval,
    CLIPImageProcessor,
    CLIPModel,
)
from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

from gcore_rollout import (
    HFEngine,
    ImageJudgeReward,
    JudgeModel,
    RewardConfigError,
    RewardError,
    SamplingParams,
    Scored,
    VisionProcessor,
    evaluate_images,
    make_colour_reward,
)
from gcore_rollout.images.models import make_aesthetic_reward, make_blip_reward, make_clip_reward
from gcore_rollout.images.reward import make_jpeg_reward
from gcore_rollout.rewards.kinds.http import HTTPImageReward

NOISE = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
FLAT = np.full((3, 32, 32, 3), 90, np.uint8)
ROWS: list[dict[str, Any]] = [{}] * 3
PROMPTS = ["red 1", "blue 2", "red 3"]


def test_jpeg_is_kilobytes_of_quality_95() -> None:
    found = make_jpeg_reward()(NOISE, PROMPTS, ROWS)
    for image, score in zip(NOISE, found, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        assert score == -len(file.getvalue()) / 1000
    assert (make_jpeg_reward(sign=1)(NOISE, PROMPTS, ROWS) == -found).all()
    assert (make_jpeg_reward()(FLAT, PROMPTS, ROWS) > found).all()
    assert (make_jpeg_reward(size=64)(NOISE, PROMPTS, ROWS) < found).all()


def test_colour_is_the_cosine_of_bright_pixels() -> None:
    reward = make_colour_reward({"red": (1.0, 0.0, 0.0), "blue": (0.0, 0.0, 1.0)})
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[0, 0, 0] = (255, 0, 0)
    images[1, 1, 1] = (255, 0, 0)
    images[2, :, :] = (100, 100, 0)
    assert reward(images, PROMPTS, ROWS) == pytest.approx([1.0, 0.0, math.sqrt(0.5)])
    with pytest.raises(
        RewardConfigError, match="'green 1' names no colour; expected one of red, blue"
    ):
        reward(images, ["green 1"] * 3, ROWS)
    with pytest.raises(RewardConfigError, match="three numbers from 0 to 1"):
        make_colour_reward({"red": (2.0, 0.0, 0.0)})


def test_clip_scores_are_transformers_own(clip: Path) -> None:
    model = CLIPModel.from_pretrained(clip)
    reward = make_clip_reward(clip)
    tokenizer: Any = AutoTokenizer.from_pretrained(clip)
    texts = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")
    with torch.no_grad():
        logits = model(**texts, **pixels).logits_per_image.diagonal()
    cosines = logits / model.logit_scale.exp()
    np.testing.assert_allclose(reward(NOISE, PROMPTS, ROWS), cosines.detach(), atol=1e-6)
    np.testing.assert_allclose(
        make_clip_reward(clip, scale=None)(NOISE, PROMPTS, ROWS), logits.detach() / 26, atol=1e-5
    )


def test_aesthetic_is_a_head_on_unit_embeddings(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    head = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Linear(5, 1))
    save_file(
        {f"layers.{name}": p.detach() for name, p in head.named_parameters()},
        tmp_path / "head.safetensors",
    )
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")
    with torch.no_grad():
        model: Any = CLIPModel.from_pretrained(clip)
        embeds = model.get_image_features(**pixels).pooler_output
        expected = head(embeds / embeds.norm(dim=1, keepdim=True))[:, 0]
    found = make_aesthetic_reward(clip, tmp_path / "head.safetensors")(NOISE, PROMPTS, ROWS)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    save_file(
        {"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / "narrow.safetensors"
    )
    with pytest.raises(RewardConfigError, match="layers from 12 embeddings to 1 score"):
        make_aesthetic_reward(clip, tmp_path / "narrow.safetensors")
    with pytest.raises(RewardConfigError, match="path is"):
        make_clip_reward(tmp_path)


BlipParts = tuple[Path, BlipForImageTextRetrieval, torch.nn.Sequential]

BLIP_NAMES = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.class_embedding": "cls_token",
    "post_layernorm": "norm",
    "encoder.layers": "blocks",
    "layer_norm": "norm",
    "self_attn.projection": "attn.proj",
    "self_attn.qkv": "attn.qkv",
}
"""transformers' parts of names in BLIP's vision model, and BLIP's own."""


@pytest.fixture(scope="module")
def image_reward(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, BlipForImageTextRetrieval, torch.nn.Sequential]:
    """A small BLIP and a head, in a file as ImageReward's is, and as they are."""
    path = tmp_path_factory.mktemp("image-reward")
    tokenizer = word_tokenizer(path / "words")
    tokenizer.save_pretrained(path)
    torch.manual_seed(2)
    text = {
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
    }
    config = BlipConfig(
        text_config={
            **text,
            "encoder_hidden_size": 128,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 40,
        },
        vision_config={
            **{**text, "hidden_size": 128, "num_attention_heads": 2, "layer_norm_eps": 1e-6},
            "image_size": 32,
            "patch_size": 8,
        },
    )
    blip = BlipForImageTextRetrieval(config).eval()
    sizes = (64, 24, 16, 8, 4, 1)
    linear = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
    tensors = {
        f"mlp.layers.{place}.{name}": parameter
        for place, layer in zip((0, 2, 4, 6, 7), linear, strict=True)
        for name, parameter in layer.named_parameters()
    }
    for name, tensor in blip.vision_model.named_parameters():
        for theirs, own in BLIP_NAMES.items():
            name = name.replace(theirs, own)
        tensors[f"blip.visual_encoder.{name}"] = tensor
    tensors |= {
        f"blip.text_encoder.{name}": tensor for name, tensor in blip.text_encoder.named_parameters()
    }
    torch.save({name: tensor.detach() for name, tensor in tensors.items()}, path / "ImageReward.pt")
    return path, blip, torch.nn.Sequential(*linear)


def test_image_reward_is_a_head_on_blip(image_reward: BlipParts, tmp_path: Path) -> None:
    path, blip, head = image_reward
    reward = make_blip_reward(path / "ImageReward.pt", path)
    mean, std = (torch.tensor(v)[:, None, None] for v in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    pixels = (torch.from_numpy(NOISE).permute(0, 3, 1, 2) / 255 - mean) / std
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    encoded = tokenizer(PROMPTS, padding="max_length", max_length=35, return_tensors="pt")
    with torch.no_grad():
        seen = blip.vision_model(pixel_values=pixels).last_hidden_state
        read = blip.text_encoder(
            input_ids=encoded["input_ids"],
            attention_mask=encoded["attention_mask"],
            encoder_hidden_states=seen,
        )
        expected = (
            head(read.last_hidden_state[:, 0])[:, 0] - 0.16717362830052426
        ) / 1.0333394966054072
    np.testing.assert_allclose(reward(NOISE, PROMPTS, ROWS), expected, atol=1e-5)
    assert np.ptp(reward(NOISE, PROMPTS, ROWS)) > 1e-3
    (tmp_path / "none.pt").write_bytes(b"none")
    save_file({"blip.x": torch.zeros(1)}, tmp_path / "other.safetensors")
    for name, said in (
        ("none.pt", "none.pt': "),
        ("other.safetensors", "it is not ImageReward's: "),
    ):
        with pytest.raises(RewardConfigError, match=said):
            make_blip_reward(tmp_path / name, path)
    with pytest.raises(RewardConfigError, match="tokenizer is "):
        make_blip_reward(path / "ImageReward.pt", tmp_path)


async def test_a_vision_language_model_judges(tmp_path: Path) -> None:
    """A real engine says of each image what transformers says; a verdict without a number counts as configured."""
    folder = save_vision_model(tmp_path / "model")
    reference, tokenizer = Reference.load(folder), AutoTokenizer.from_pretrained(folder)
    processor = VisionProcessor.from_pretrained(folder)
    engine = HFEngine.from_pretrained(folder, eos_token_ids=[END])
    texts: list[str] = []

    def parse(text: str) -> float | None:
        texts.append(text)
        return float(len(texts)) if len(texts) < 3 else None

    def encode(question: str) -> list[int]:
        return [VISION_START, IMAGE, VISION_END, *tokenizer(question)["input_ids"]]

    model = JudgeModel(
        engine=engine,
        encode=encode,
        decode=tokenizer.decode,
        sampling=SamplingParams(max_tokens=6, temperature=0.0),
        vision=processor,
    )
    reward = ImageJudgeReward(
        model=model, template="Is it {prompt}, {style}?", parse=parse, unparsable_score=-1.0
    )
    rows = [{"style": "bold"}] * 3
    assert [s.score for s in await evaluate_images(reward, NOISE, PROMPTS, rows)] == [
        1.0,
        2.0,
        -1.0,
    ]
    for image, prompt, text in zip(NOISE, PROMPTS, texts, strict=True):
        ids = processor.expand(encode(f"Is it {prompt}, bold?"), [png(image)])
        assert text == tokenizer.decode(reference.greedy(ids, [png(image)], 6))
    assert len(set(texts)) > 1
    with pytest.raises(RewardConfigError, match="vision is None"):
        ImageJudgeReward(model=replace(model, vision=None), template="{prompt}")
    with pytest.raises(RewardConfigError, match=r"expected \{prompt\} in it"):
        ImageJudgeReward(model=model, template="good?")
    await engine.close()


class Handler(BaseHTTPRequestHandler):
    answer: Callable[[dict[str, Any]], tuple[int, str]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, text = type(self).answer(body)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


async def test_a_server_scores_pngs(server: HTTPServer) -> None:
    def brightness(body: dict[str, Any]) -> tuple[int, str]:
        assert (body["prompts"], body["rows"]) == (PROMPTS, ROWS)
        images = [
            np.array(Image.open(io.BytesIO(base64.b64decode(image)))) for image in body["images"]
        ]
        return 200, json.dumps({"scores": [float(image.mean()) for image in images]})

    reward = HTTPImageReward(f"http://127.0.0.1:{server.server_port}")
    Handler.answer = staticmethod(brightness)
    assert [s.score for s in await evaluate_images(reward, NOISE, PROMPTS, ROWS)] == [
        float(image.mean()) for image in NOISE
    ]
    Handler.answer = staticmethod(lambda _: (500, "out of memory"))
    with pytest.raises(RewardError, match=r"answered 500 .*out of memory"):
        await evaluate_images(reward, NOISE, PROMPTS, ROWS)
    Handler.answer = staticmethod(lambda _: (200, "[]"))
    with pytest.raises(RewardError, match="expected JSON with 'scores'"):
        await evaluate_images(reward, NOISE, PROMPTS, ROWS)


def returning(values: Any) -> Callable[..., Any]:
    """A reward that returns the same for all images."""

    def reward(images: Any, prompts: Any, rows: Any) -> Any:
        del images, prompts, rows
        return values

    return reward


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "returned 1 scores; expected one for each of 3 images"),
        ([1.0, math.nan, 2.0], "returned nan for an image of 'blue 2'"),
        (["good"] * 3, "ValueError"),
    ],
)
async def test_what_is_no_score_is_refused(values: Any, said: str) -> None:
    with pytest.raises(RewardError, match=said):
        await evaluate_images(returning(values), NOISE, PROMPTS, ROWS)


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        torch.tensor([1, 2, 3], dtype=torch.bfloat16),
        [torch.tensor(float(i), requires_grad=True) for i in (1, 2, 3)],
        (torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.bfloat16, requires_grad=True), {}),
    ],
    ids=["gradient", "bfloat16", "list", "tuple"],
)
async def test_scores_may_be_tensors(values: Any) -> None:
    found = await evaluate_images(returning(values), NOISE, PROMPTS, ROWS)
    assert found == [Scored(score=1.0), Scored(score=2.0), Scored(score=3.0)]


async def test_numbers_that_come_with_scores_are_their_parts() -> None:
    extra = {
        "sharp": torch.tensor([1.0, 0.5, 0.25], dtype=torch.bfloat16, requires_grad=True),
        "strict": np.array([True, False, True]),
        "temperature": 0.5,
        "verdicts": ["good", "bad", "good"],
        "pair": [1.0, 2.0],
        "nothing": None,
    }
    found = await evaluate_images(returning(([1, 2, 3], extra)), NOISE, PROMPTS, ROWS)
    assert [s.score for s in found] == [1.0, 2.0, 3.0]
    assert [dict(s.parts) for s in found] == [
        {"sharp": 1.0, "strict": 1.0, "temperature": 0.5},
        {"sharp": 0.5, "strict": 0.0, "temperature": 0.5},
        {"sharp": 0.25, "strict": 1.0, "temperature": 0.5},
    ]
    with pytest.raises(RewardError, match="returned 2 scores; expected one for each of 3 images"):
        await evaluate_images(returning(([1, 2], extra)), NOISE, PROMPTS, ROWS)


async def test_rewards_may_be_async() -> None:
    async def reward(images: Any, prompts: Any, rows: Any) -> list[int]:
        return [len(prompt) for prompt in prompts]

    assert [s.score for s in await evaluate_images(reward, NOISE, PROMPTS, ROWS)] == [5.0, 6.0, 5.0]
