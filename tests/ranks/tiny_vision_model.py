"""A random vision-language model of the Qwen-VL kind as a Hugging Face folder, pictures for it, and what it should say.

Shapes: P prompt tokens, R response tokens.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

_SPECIAL = (
    *("<|pad|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
_VOCABULARY = {token: i for i, token in enumerate([*_SPECIAL, *map(chr, range(32, 127)), "\n"])}
VOCAB_SIZE = len(_VOCABULARY)
END, VISION_START, VISION_END, IMAGE = (
    _VOCABULARY[token]
    for token in ("<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
)

_TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}
{%- if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_vision_model(
    path: Path, model_type: str = "qwen2_vl", *, seed: int = 0, tie: bool = False
) -> Path:
    """A model that has read nothing, whose next-token distributions are neither flat nor certain, and its processor."""
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        # vLLM's CPU attention takes no head dimension below 32.
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": 0,
        "tie_word_embeddings": tie,
    }
    shared: dict[str, Any] = {
        "text_config": text,
        "image_token_id": IMAGE,
        "video_token_id": _VOCABULARY["<|video_pad|>"],
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "tie_word_embeddings": tie,
    }
    # As many blocks as layers: what looks for the layers by their number must not find these.
    vision = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    torch.manual_seed(seed)
    if model_type == "qwen2_vl":
        vision_config = {**vision, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        model: Any = Qwen2VLForConditionalGeneration(
            Qwen2VLConfig(vision_config=vision_config, **shared)
        )
    else:
        # Windows of 2 by 2 merged patches in the first block, so that they matter.
        windows = {
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "window_size": 56,
        }
        vision_config = {**vision, **windows, "fullatt_block_indexes": [1]}
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(vision_config=vision_config, **shared)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}
    ).save_pretrained(path)
    return path


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = _TEMPLATE
    return fast


def noise(height: int, width: int, seed: int) -> bytes:
    """A picture of which no two pixels are alike, as a PNG file."""
    return png(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def png(pixels_HWC: Any) -> bytes:
    file = io.BytesIO()
    PIL.Image.fromarray(pixels_HWC).save(file, "png")
    return file.getvalue()


@dataclass(frozen=True)
class Reference:
    """transformers' own model and image processor."""

    model: Any
    processor: Any

    @classmethod
    def load(cls, path: Path) -> "Reference":
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        return cls(model, AutoImageProcessor.from_pretrained(path))

    def inputs(self, prompt: Sequence[int], images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """What the model's forward takes; in the prompt, image tokens stand for merged patches."""
        token_ids = torch.tensor([prompt])
        found = {"input_ids": token_ids, "mm_token_type_ids": (token_ids == IMAGE).long()}
        if images:
            decoded = [PIL.Image.open(io.BytesIO(image)) for image in images]
            found |= self.processor(images=decoded, return_tensors="pt")
        return found

    def log_probs(
        self, prompt: Sequence[int], images: Sequence[bytes], response: Sequence[int]
    ) -> torch.Tensor:
        """[R] of the response's tokens, by one forward of prompt and response; no response token is an image token."""
        assert not images or IMAGE not in response
        inputs = self.inputs([*prompt, *response], images)
        logits = self.model(**inputs).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    @torch.no_grad()
    def log_probs_of_text(
        self,
        prompt: Sequence[int],
        images: Sequence[bytes],
        response: Sequence[int],
        *,
        text: Sequence[int] = (),
    ) -> torch.Tensor:
        """The same for a response in which image tokens are text, and so are those at places ``text`` of the prompt."""
        inputs = self.inputs(prompt, images)
        inputs["mm_token_type_ids"][0, list(text)] = 0
        token_ids = torch.tensor([[*prompt, *response]])
        is_image = torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, len(response)))
        features = self.model.model.get_image_features(
            inputs["pixel_values"], inputs["image_grid_thw"]
        ).pooler_output
        embeddings = self.model.get_input_embeddings()(token_ids)
        embeddings[is_image.bool()] = torch.cat(features)
        positions, _ = self.model.model.get_rope_index(
            token_ids, is_image, image_grid_thw=inputs["image_grid_thw"]
        )
        logits = self.model(inputs_embeds=embeddings, position_ids=positions).logits[
            0, len(prompt) - 1 : -1
        ]
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], images: Sequence[bytes], num_tokens: int) -> list[int]:
        """What transformers' own generate says."""
        inputs = self.inputs(prompt, images)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        settings = {"do_sample": False, "max_new_tokens": num_tokens, "pad_token_id": 0}
        return self.model.generate(**inputs, **settings)[0, len(prompt) :].tolist()
