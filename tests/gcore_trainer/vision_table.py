"""The sweep over tiny models that read images: their scores in packed rows, and what the `hf` engine generates."""

import asyncio
import io
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from tiny_models import MODEL_TYPES
from transformers import AutoModelForImageTextToText, AutoProcessor
from vision_models import BUILT_TYPES, VISION_TYPES, save_vision_config, save_vision_folder

from gcore_rollout import (
    Completion,
    EngineModelError,
    HFEngine,
    Request,
    RolloutError,
    SamplingParams,
    VisionProcessor,
)
from gcore_trainer import Images, PackedModel, Sample, UnsupportedModelError

TOLERANCE = 2e-4
TEXT_TYPES = frozenset({*VISION_TYPES} & {*MODEL_TYPES} - {*BUILT_TYPES})
"""Types that AutoModelForCausalLM has, too, and whose images are not understood."""
_LONGEST = 256
_RESPONSES = ("xyz", "no", "yes 1")


def _noise(height: int, width: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


_WIDE, _OTHER, _SMALL = _noise(40, 70, 0), _noise(40, 70, 1), _noise(24, 24, 2)
_PROMPTS: tuple[tuple[str, tuple[bytes, ...]], ...] = (
    ("a text without any", ()),
    ("is * it", (_WIDE,)),
    # The same tokens as with the wide one.
    ("is * it", (_OTHER,)),
    ("first * and * too", (_WIDE, _SMALL)),
    ("so * or * or *", (_SMALL, _SMALL, _OTHER)),
)
"""Texts with a star for each image."""


class TinyVision:
    """A tiny model of one type by transformers, and its prompts."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        self.processor: Any = AutoProcessor.from_pretrained(path)
        self.vision = VisionProcessor.from_pretrained(path)

    def encode(self, text: str, images: Sequence[bytes]) -> tuple[int, ...]:
        """Return a prompt's tokens, as gcore-rollout has them."""
        text = text.replace("*", self.processor.image_token)
        return self.vision.expand(
            self.processor.tokenizer.encode(text, add_special_tokens=False), images
        )

    def make_sample(self, text: str, images: Sequence[bytes], response: Sequence[int]) -> Sample:
        pixels = None
        if images:
            read = self.vision.process(images)
            pixels = Images(pixel_values=read.pixel_values, grid_thw=read.grid_thw)
        prompt_ids = np.array(self.encode(text, images))
        return Sample(prompt_ids=prompt_ids, response_ids=np.array(response), images=pixels)

    def move_images(self, sample: Sample, images: Sequence[bytes]) -> Sample:
        """Return a sample whose prompt is its first token."""
        pixels = sample.images
        if pixels is not None:
            index = self.vision.find_images(sample.prompt_ids.tolist(), images)
            pixels = replace(pixels, starts=np.array([places[0] for places in index]))
        response_ids = np.concatenate([sample.prompt_ids[1:], sample.response_ids])
        return replace(
            sample, prompt_ids=sample.prompt_ids[:1], response_ids=response_ids, images=pixels
        )

    @torch.no_grad()
    def log_probs(
        self, text: str, images: Sequence[bytes], response: Sequence[int]
    ) -> np.ndarray[Any, Any]:
        """Return log-probabilities [R] by transformers' own processor and forward pass."""
        pictures = [PIL.Image.open(io.BytesIO(image)) for image in images]
        inputs = self.processor(
            text=[text.replace("*", self.processor.image_token)],
            images=pictures or None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        tail = torch.tensor([response])
        zeros = torch.zeros_like(tail)
        inputs = dict(inputs) | {"input_ids": torch.cat([inputs["input_ids"], tail], 1)}
        del inputs["attention_mask"]
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], zeros], 1)
        logits_RV = self.model(**inputs).logits[0, -tail.numel() - 1 : -1]
        return logits_RV.log_softmax(-1).gather(1, tail.T)[:, 0].numpy()


def vision_outcome(model_type: str) -> tuple[str, str]:
    """Score and generate with a tiny model.

    Returns:
        the table's texts for packed training and the `hf` engine: ``exact``, or why the model is refused.

    Raises:
        AssertionError: the model is not refused, and its scores are wrong.
    """
    if model_type in TEXT_TYPES:
        return "without images, as above", "without images"
    if model_type == "vision-encoder-decoder":
        return "not tried: transformers has no default configuration", "not tried"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        if model_type not in BUILT_TYPES:
            save_vision_config(model_type, path)
            with pytest.raises(UnsupportedModelError, match="or one whose images are understood"):
                PackedModel.from_pretrained(path)
            with pytest.raises(RolloutError, match="does not load"):
                HFEngine.from_pretrained(path)
            return "refused: its images are not understood", "refused"
        save_vision_folder(model_type, path)
        packed = PackedModel.from_pretrained(path, max_length=_LONGEST)
        tiny = TinyVision(path)
        check_packed(tiny, packed)
        try:
            engine = HFEngine.from_pretrained(path)
        except EngineModelError as error:
            return "exact", f"refused: {str(error).partition(':')[0]}"
        asyncio.run(check_generated(tiny, packed, engine))
    return "exact", "exact"


def check_packed(tiny: TinyVision, packed: PackedModel) -> None:
    """Compare scores of a row of all prompts, each with several responses, with those of transformers alone.

    A second row has all but the first token of each prompt in the response, as later turns have.
    """
    cases = [(*prompt, response) for prompt in _PROMPTS for response in _RESPONSES]
    encode = tiny.processor.tokenizer.encode
    tokens = [encode(response, add_special_tokens=False) for _, _, response in cases]
    samples = [
        tiny.make_sample(text, images, response)
        for (text, images, _), response in zip(cases, tokens, strict=True)
    ]
    later = [
        tiny.move_images(sample, images)
        for sample, (_, images, _) in zip(samples, cases, strict=True)
    ]
    found = packed.log_probs([samples, later])
    for i, ((text, images, _), response) in enumerate(zip(cases, tokens, strict=True)):
        expected = tiny.log_probs(text, images, response)
        for log_probs in (found[0][i], found[1][i][-expected.size :]):
            np.testing.assert_allclose(log_probs, expected, rtol=0, atol=TOLERANCE)


async def check_generated(tiny: TinyVision, packed: PackedModel, engine: HFEngine) -> None:
    """Compare log-probabilities of what the engine generates with those of training."""
    # The names of weights are those that the engine knows.
    parameters = dict(packed.model.named_parameters(remove_duplicate=False))
    state = packed.model.state_dict()
    buffers = {name: tensor for name, tensor in state.items() if name not in parameters}
    await engine.update_weights([*packed.named_parameters().items(), *buffers.items()], version=1)
    requests = [
        Request(
            request_id=str(i),
            prompt_token_ids=tiny.encode(text, images),
            sampling=SamplingParams(max_tokens=9),
            n=2,
            images=tuple(images),
        )
        for i, (text, images) in enumerate(_PROMPTS)
    ]
    completions: list[Completion] = [c async for c in engine.generate(requests)]
    await engine.close()
    samples = [
        tiny.make_sample(*_PROMPTS[int(c.request_id)], c.token_ids.tolist()) for c in completions
    ]
    [expected] = packed.log_probs([samples])
    for completion, log_probs in zip(completions, expected, strict=True):
        np.testing.assert_allclose(completion.log_probs, log_probs, rtol=0, atol=TOLERANCE)
