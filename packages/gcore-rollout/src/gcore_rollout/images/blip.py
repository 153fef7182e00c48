"""ImageReward: a BLIP model that reads an image beside its prompt, and what people would prefer."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.reward import Images

_MEAN, _STD = 0.16717362830052426, 1.0333394966054072
"""Of scores on the published validation set: what they are standardised by."""
_MAX_TOKENS = 35
_HEAD_DIM = 64
_HEAD_LAYERS = (0, 2, 4, 6, 7)
"""Linear layers of the head; dropout is between them."""

_VISION_NAMES = (
    (r"^visual_encoder\.patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^visual_encoder\.pos_embed$", "embeddings.position_embedding"),
    (r"^visual_encoder\.cls_token$", "embeddings.class_embedding"),
    (r"^visual_encoder\.norm\.", "post_layernorm."),
    (r"^visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.", r"encoder.layers.\1.self_attn."),
    (r"^visual_encoder\.blocks\.(\d+)\.", r"encoder.layers.\1."),
)
"""From BLIP's names to those of transformers."""


class ImageRewardScore:
    """ImageReward's score (arXiv 2304.05977), from its published weights: about a standard normal variable.

    The state at the prompt's first token of BLIP's text encoder, which attends to the image, goes through five linear
    layers. Sizes are read off the weights.

    Args:
        weights: ImageReward.pt, or the same as safetensors.
        tokenizer: a Hugging Face folder of the tokenizer, bert-base-uncased with BLIP's two tokens.
        device: such as cpu or cuda:0.

    Raises:
        RewardConfigError: either is something else.
    """

    def __init__(self, weights: str | Path, tokenizer: str | Path, *, device: str = "cpu") -> None:
        from transformers import AutoTokenizer, CLIPImageProcessor

        tensors = _read(Path(weights))
        self._vision, self._text = _models(tensors, weights)
        try:
            self._head = [(tensors[f"mlp.layers.{i}.weight"], tensors[f"mlp.layers.{i}.bias"]) for i in _HEAD_LAYERS]
        except KeyError as missing:
            raise RewardConfigError(f"weights is {str(weights)!r}: it is not ImageReward's: no {missing}") from None
        self._head = [(weight.to(device), bias.to(device)) for weight, bias in self._head]
        self._vision.to(device)
        self._text.to(device)
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        except (OSError, ValueError) as error:
            raise RewardConfigError(f"tokenizer is {str(tokenizer)!r}: {error}") from None
        size = self._vision.config.image_size
        # The shorter side is resized, the middle cropped, and CLIP's means and deviations taken.
        self._processor: Any = CLIPImageProcessor(
            size={"shortest_edge": size}, crop_size={"height": size, "width": size}
        )
        self._device = device

    def check(self, height: int, width: int) -> None:
        """Images are resized to what the model takes."""

    @torch.no_grad()
    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """[B] scores."""
        del rows
        pixels = self._processor(list(images), return_tensors="pt")["pixel_values"].to(self._device)
        seen = self._vision(pixel_values=pixels).last_hidden_state
        told = self._tokenizer(
            list(prompts), padding="max_length", truncation=True, max_length=_MAX_TOKENS, return_tensors="pt"
        ).to(self._device)
        read = self._text(
            input_ids=told["input_ids"],
            attention_mask=told["attention_mask"],
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self._device),
        )
        x = read.last_hidden_state[:, 0]
        for weight, bias in self._head:
            x = torch.nn.functional.linear(x, weight, bias)
        return ((x[:, 0].double() - _MEAN) / _STD).cpu().numpy()


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        found: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return found
    except Exception as error:
        raise RewardConfigError(f"weights is {str(path)!r}: {type(error).__name__}: {error}") from None


def _models(tensors: Mapping[str, torch.Tensor], weights: str | Path) -> tuple[Any, Any]:
    """BLIP's vision model, and its text encoder that attends to images."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    blip = {name.removeprefix("blip."): tensor for name, tensor in tensors.items() if name.startswith("blip.")}
    try:
        patch = blip["visual_encoder.patch_embed.proj.weight"]
        width, patch_size = patch.shape[0], patch.shape[-1]
        side = round((blip["visual_encoder.pos_embed"].shape[1] - 1) ** 0.5)
        words = blip["text_encoder.embeddings.word_embeddings.weight"]
        vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=blip["visual_encoder.blocks.0.mlp.fc1.weight"].shape[0],
                num_hidden_layers=_num_layers(blip, r"visual_encoder\.blocks\.(\d+)\."),
                num_attention_heads=width // _HEAD_DIM,
                image_size=side * patch_size,
                patch_size=patch_size,
                layer_norm_eps=1e-6,
            )
        )
        text = BlipTextModel(
            BlipTextConfig(
                vocab_size=words.shape[0],
                hidden_size=words.shape[1],
                encoder_hidden_size=width,
                intermediate_size=blip["text_encoder.encoder.layer.0.intermediate.dense.weight"].shape[0],
                num_hidden_layers=_num_layers(blip, r"text_encoder\.encoder\.layer\.(\d+)\."),
                num_attention_heads=words.shape[1] // _HEAD_DIM,
                max_position_embeddings=blip["text_encoder.embeddings.position_embeddings.weight"].shape[0],
            ),
            add_pooling_layer=False,
        )
        seen = {_renamed(name): tensor for name, tensor in blip.items() if name.startswith("visual_encoder.")}
        prefix = "text_encoder."
        read = {name.removeprefix(prefix): tensor for name, tensor in blip.items() if name.startswith(prefix)}
        # Not a parameter, and not everywhere there.
        read.pop("embeddings.position_ids", None)
        vision.load_state_dict(seen)
        text.load_state_dict({**_buffers(text), **read})
    except (KeyError, RuntimeError) as error:
        raise RewardConfigError(f"weights is {str(weights)!r}: it is not ImageReward's: {error}") from None
    return vision.eval().requires_grad_(False), text.eval().requires_grad_(False)


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters())
    return {name: tensor for name, tensor in model.state_dict().items() if name not in parameters}


def _num_layers(tensors: Mapping[str, torch.Tensor], pattern: str) -> int:
    return 1 + max(int(found[1]) for name in tensors if (found := re.match(pattern, name)))


def _renamed(name: str) -> str:
    for pattern, replacement in _VISION_NAMES:
        name, count = re.subn(pattern, replacement, name)
        if count:
            return name
    return name
