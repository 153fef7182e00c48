"""Rewards of images: against their definitions, against transformers' own CLIP, and what they refuse."""

import base64
import io
import json
import math
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_pipelines import word_tokenizer
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

from gcore_rollout.errors import RewardConfigError, RewardError
from gcore_rollout.image_rewards import ColourReward, JPEGCompressibility, evaluate_images
from gcore_rollout.image_rewards.clip import AestheticReward, CLIPReward
from gcore_rollout.image_rewards.http import HTTPImageReward

NOISE = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.uint8)
FLAT = np.full((3, 32, 32, 3), 90, np.uint8)
ROWS: list[dict[str, Any]] = [{}] * 3
PROMPTS = ["red 1", "blue 2", "red 3"]


def test_jpeg_is_kilobytes_of_quality_95() -> None:
    found = JPEGCompressibility()(NOISE, PROMPTS, ROWS)
    for image, score in zip(NOISE, found, strict=True):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=95)
        assert score == -len(file.getvalue()) / 1000
    assert (JPEGCompressibility(sign=1)(NOISE, PROMPTS, ROWS) == -found).all()
    assert (JPEGCompressibility()(FLAT, PROMPTS, ROWS) > found).all()
    assert (JPEGCompressibility(size=64)(NOISE, PROMPTS, ROWS) < found).all()


def test_colour_is_the_cosine_of_bright_pixels() -> None:
    reward = ColourReward({"red": (1.0, 0.0, 0.0), "blue": (0.0, 0.0, 1.0)})
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[0, 0, 0] = (255, 0, 0)
    images[1, 1, 1] = (255, 0, 0)
    images[2, :, :] = (100, 100, 0)
    assert reward(images, PROMPTS, ROWS) == pytest.approx([1.0, 0.0, math.sqrt(0.5)])
    with pytest.raises(RewardConfigError, match="'green 1' names no colour: one of red, blue"):
        reward(images, ["green 1"] * 3, ROWS)
    with pytest.raises(RewardConfigError, match="three numbers from 0 to 1"):
        ColourReward({"red": (2.0, 0.0, 0.0)})


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip")
    tokenizer = word_tokenizer(path / "words")
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ends = {"bos_token_id": len(tokenizer) - 2, "eos_token_id": len(tokenizer) - 1, "pad_token_id": len(tokenizer) - 1}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**size, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 8},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    side = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(path)
    return path


def test_clip_scores_are_transformers_own(clip: Path) -> None:
    model = CLIPModel.from_pretrained(clip)
    reward = CLIPReward(clip)
    texts = reward._tokenizer(PROMPTS, padding=True, return_tensors="pt")  # pyright: ignore[reportPrivateUsage]
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")
    with torch.no_grad():
        logits = model(**texts, **pixels).logits_per_image.diagonal()
    cosines = logits / model.logit_scale.exp()
    np.testing.assert_allclose(reward(NOISE, PROMPTS, ROWS), cosines.detach(), atol=1e-6)
    np.testing.assert_allclose(CLIPReward(clip, scale=None)(NOISE, PROMPTS, ROWS), logits.detach() / 26, atol=1e-5)


def test_aesthetic_is_a_head_on_unit_embeddings(clip: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    head = torch.nn.Sequential(torch.nn.Linear(12, 5), torch.nn.Linear(5, 1))
    save_file({f"layers.{name}": p.detach() for name, p in head.named_parameters()}, tmp_path / "head.safetensors")
    pixels = CLIPImageProcessor.from_pretrained(clip)(list(NOISE), return_tensors="pt")
    with torch.no_grad():
        model: Any = CLIPModel.from_pretrained(clip)
        embeds = model.get_image_features(**pixels).pooler_output
        expected = head(embeds / embeds.norm(dim=1, keepdim=True))[:, 0]
    found = AestheticReward(clip, tmp_path / "head.safetensors")(NOISE, PROMPTS, ROWS)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    save_file({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)}, tmp_path / "narrow.safetensors")
    with pytest.raises(RewardConfigError, match="layers from 12 embeddings to 1 score"):
        AestheticReward(clip, tmp_path / "narrow.safetensors")
    with pytest.raises(RewardConfigError, match="path is"):
        CLIPReward(tmp_path)


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
        images = [np.array(Image.open(io.BytesIO(base64.b64decode(image)))) for image in body["images"]]
        return 200, json.dumps({"scores": [float(image.mean()) for image in images]})

    reward = HTTPImageReward(f"http://127.0.0.1:{server.server_port}")
    Handler.answer = staticmethod(brightness)
    assert await evaluate_images(reward, NOISE, PROMPTS, ROWS) == [float(image.mean()) for image in NOISE]
    Handler.answer = staticmethod(lambda _: (500, "out of memory"))
    with pytest.raises(RewardError, match=r"answered 500 .*out of memory"):
        await evaluate_images(reward, NOISE, PROMPTS, ROWS)
    Handler.answer = staticmethod(lambda _: (200, "[]"))
    with pytest.raises(RewardError, match=r'JSON \{"scores"'):
        await evaluate_images(reward, NOISE, PROMPTS, ROWS)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1.0], "returned 1 scores of 3 images"),
        ([1.0, math.nan, 2.0], "returned nan for an image of 'blue 2'"),
        (["good"] * 3, "ValueError"),
    ],
)
async def test_what_is_no_score_is_refused(values: Any, said: str) -> None:
    def reward(images: Any, prompts: Any, rows: Any) -> Any:
        return values

    with pytest.raises(RewardError, match=said):
        await evaluate_images(reward, NOISE, PROMPTS, ROWS)


async def test_rewards_may_be_async() -> None:
    async def reward(images: Any, prompts: Any, rows: Any) -> list[int]:
        return [len(prompt) for prompt in prompts]

    assert await evaluate_images(reward, NOISE, PROMPTS, ROWS) == [5.0, 6.0, 5.0]
