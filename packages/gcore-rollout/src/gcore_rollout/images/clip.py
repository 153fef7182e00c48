"""Scores by CLIP and what was built on it, from local weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.reward import Images


class CLIPReward:
    """Similarity of images and prompts under a CLIP model of transformers: CLIPScore, or PickScore with its weights.

    CLIPScore (arXiv 2104.08718) is the cosine; PickScore (arXiv 2305.01569, eq. 1) is the cosine times the model's
    learned scale, divided by 26 as Flow-GRPO's code does.

    Args:
        path: a Hugging Face folder of a CLIP model, with tokenizer and image processor.
        device: such as cpu or cuda:0.
        scale: what the cosine is multiplied by; None: the model's own over 26.

    Raises:
        RewardConfigError: the folder holds no such model.
    """

    def __init__(self, path: str | Path, *, device: str = "cpu", scale: float | None = 1.0) -> None:
        from transformers import AutoTokenizer

        self._model, self._processor = _load(path, device)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._device = device
        self._scale = float(self._model.logit_scale.exp()) / 26 if scale is None else scale

    def check(self, height: int, width: int) -> None:
        """Images are resized to what the model takes."""

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """[B] scores."""
        del rows
        texts = self._tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt").to(self._device)
        pixels = self._processor(list(images), return_tensors="pt").to(self._device)
        found = self._model(**texts, pixel_values=pixels["pixel_values"])
        cosines = torch.nn.functional.cosine_similarity(found.image_embeds, found.text_embeds)
        return (self._scale * cosines).double().cpu().numpy()


class AestheticReward:
    """A linear head, or several layers of them, on CLIP's image embeddings of length 1: LAION's aesthetic predictor.

    Args:
        path: a Hugging Face folder of a CLIP model, with its image processor.
        head: a safetensors file of the head: ``layers.N.weight`` and ``layers.N.bias``, or ``weight`` and ``bias``.
        device: such as cpu or cuda:0.

    Raises:
        RewardConfigError: either holds something else.
    """

    def __init__(self, path: str | Path, head: str | Path, *, device: str = "cpu") -> None:
        from safetensors.torch import load_file

        self._model, self._processor = _load(path, device)
        try:
            tensors = load_file(str(head), device=device)
        except Exception as error:
            raise RewardConfigError(f"head is {str(head)!r}: {error}") from None
        names = sorted((n for n in tensors if n.endswith("weight") and tensors[n].ndim == 2), key=_layer_of)
        width = int(self._model.config.projection_dim)
        if not names or tensors[names[0]].shape[1] != width or tensors[names[-1]].shape[0] != 1:
            shapes = {name: tuple(tensors[name].shape) for name in tensors}
            raise RewardConfigError(f"head {head} has {shapes}: layers from {width} embeddings to 1 score are needed")
        self._layers = [(tensors[n], tensors[n.removesuffix("weight") + "bias"]) for n in names]
        self._device = device

    def check(self, height: int, width: int) -> None:
        """Images are resized to what the model takes."""

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """[B] scores."""
        del prompts, rows
        pixels = self._processor(list(images), return_tensors="pt").to(self._device)
        seen = self._model.vision_model(pixel_values=pixels["pixel_values"]).pooler_output
        x = torch.nn.functional.normalize(self._model.visual_projection(seen), dim=-1)
        for weight, bias in self._layers:
            x = torch.nn.functional.linear(x, weight, bias)
        return x[:, 0].double().cpu().numpy()


def _load(path: str | Path, device: str) -> tuple[Any, Any]:
    from transformers import CLIPImageProcessor, CLIPModel

    if not (Path(path) / "config.json").is_file():
        raise RewardConfigError(f"path is {str(path)!r}: a Hugging Face folder of a CLIP model is needed")
    try:
        model: Any = CLIPModel.from_pretrained(path, local_files_only=True)
        return model.to(device).eval().requires_grad_(False), CLIPImageProcessor.from_pretrained(path)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RewardConfigError(f"path is {str(path)!r}: {error}") from None


def _layer_of(name: str) -> int:
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    return numbers[0] if numbers else 0
