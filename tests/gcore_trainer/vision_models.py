"""Tiny models of transformers that read images, each a Hugging Face folder with its tokenizer and processor."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

VISION_TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))

_IMAGE_SIZE = 32
_PATCH_SIZE = 8
_NAMED_MARKS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "image_token": "<image>",
    "context_image_token": "<image>",
    "video_token": "<video>",
    "boi_token": "<start>",
    "eoi_token": "<end>",
    "start_image_token": "<start>",
    "end_image_token": "<end>",
    "image_break_token": "<break>",
    "image_end_token": "<end>",
    "vision_start_token": "<start>",
    "vision_end_token": "<end>",
}
_MARKS = dict.fromkeys(
    (
        *_NAMED_MARKS.values(),
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    )
)
_VOCABULARY = {
    token: i for i, token in enumerate([*_MARKS, *"abcdefghijklmnopqrstuvwxyz :.\n_123"])
}
_TOKEN_IDS = {
    "image_token_id": "<image>",
    "video_token_id": "<video>",
    "vision_start_token_id": "<start>",
    "vision_end_token_id": "<end>",
    "image_start_token_id": "<start>",
    "image_end_token_id": "<end>",
}
_VISION_SIZES: dict[str, Any] = {
    "depth": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
    # Of Qwen2.5-VL: windows of 2 by 2 merged patches in the first block.
    "window_size": 4 * _PATCH_SIZE,
    "fullatt_block_indexes": [1],
}
_OWN: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4},
    "internvl": {"image_seq_length": 4},
    "llava": {"image_seq_length": 16},
    "vipllava": {"image_seq_length": 16, "vision_feature_layers": [-2, 0]},
}
"""Settings of single types."""

_QWEN: dict[str, Any] = {
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    "patch_size": _PATCH_SIZE,
}
_SQUARE: dict[str, Any] = {"size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE}}
_CLIP: dict[str, Any] = {
    "size": {"shortest_edge": _IMAGE_SIZE},
    "crop_size": {"height": _IMAGE_SIZE, "width": _IMAGE_SIZE},
}
_PIXTRAL: dict[str, Any] = {"size": {"longest_edge": 48}, "patch_size": 2 * _PATCH_SIZE}
_IDEFICS: dict[str, Any] = {
    "size": {"longest_edge": 2 * _IMAGE_SIZE},
    "max_image_size": {"longest_edge": _IMAGE_SIZE},
}
_MERGED = {"patch_size": _PATCH_SIZE, "spatial_merge_size": 2}
_LLAVA = {
    "patch_size": _PATCH_SIZE,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
_PROCESSORS: dict[str, tuple[str, dict[str, Any], str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3ImageProcessorPil", _SQUARE, "", "Gemma3Processor", {"image_seq_length": 4}),
    "glm46v": ("Glm46VImageProcessorPil", _QWEN, "Glm46VVideoProcessor", "Glm46VProcessor", {}),
    "glm4v": ("Glm4vImageProcessorPil", _QWEN, "Glm4vVideoProcessor", "Glm4vProcessor", {}),
    "glm4v_moe": ("Glm4vImageProcessorPil", _QWEN, "Glm4vVideoProcessor", "Glm4vProcessor", {}),
    "glm_ocr": ("Glm46VImageProcessorPil", _QWEN, "Glm46VVideoProcessor", "Glm46VProcessor", {}),
    "idefics3": (
        "Idefics3ImageProcessorPil",
        _IDEFICS,
        "",
        "Idefics3Processor",
        {"image_seq_len": 4},
    ),
    "internvl": (
        "GotOcr2ImageProcessorPil",
        {**_SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 3},
        "InternVLVideoProcessor",
        "InternVLProcessor",
        {"image_seq_length": 4},
    ),
    "lighton_ocr": ("PixtralImageProcessorPil", _PIXTRAL, "", "LightOnOcrProcessor", _MERGED),
    "llava": ("LlavaImageProcessorPil", _CLIP, "", "LlavaProcessor", _LLAVA),
    "mistral3": (
        "PixtralImageProcessorPil",
        _PIXTRAL,
        "",
        "PixtralProcessor",
        {
            **_MERGED,
            "image_token": "<image>",
            "image_break_token": "<break>",
            "image_end_token": "<end>",
        },
    ),
    "paddleocr_vl": ("PaddleOCRVLImageProcessorPil", _QWEN, "", "PaddleOCRVLProcessor", {}),
    # SmolVLM's own processor needs a package that reads out numbers, for videos.
    "smolvlm": (
        "SmolVLMImageProcessorPil",
        _IDEFICS,
        "",
        "Idefics3Processor",
        {"image_seq_len": 4},
    ),
    "vipllava": ("CLIPImageProcessorPil", _CLIP, "", "LlavaProcessor", _LLAVA),
} | dict.fromkeys(
    ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"),
    ("Qwen2VLImageProcessorPil", _QWEN, "Qwen2VLVideoProcessor", "Qwen3VLProcessor", {}),
)
"""Image processor, its settings, video processor, processor and its settings, as transformers names them."""
BUILT_TYPES = tuple(sorted(_PROCESSORS))


def save_vision_folder(model_type: str, path: Path) -> Path:
    """Save a random model of one of `BUILT_TYPES`, whose next-token distributions are neither flat nor certain."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_vision_config(model_type))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    image_class, image_settings, video_class, processor_class, settings = _PROCESSORS[model_type]
    settings = {**settings, "image_processor": getattr(transformers, image_class)(**image_settings)}
    if video_class:
        settings["video_processor"] = getattr(transformers, video_class)()
    processor = getattr(transformers, processor_class)(tokenizer=_tokenizer(), **settings)
    processor.save_pretrained(path)
    return path


def tiny_vision_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of a few thousand parameters, whose special tokens are those of the tokenizer here."""
    config: Any = tiny_config(model_type)
    vision = config.vision_config
    text = config.text_config
    for name, size in (("image_size", _IMAGE_SIZE), ("patch_size", _PATCH_SIZE)):
        old = getattr(vision, name, None)
        if old is not None:
            setattr(vision, name, [size, size] if isinstance(old, list | tuple) else size)
    _set_known(vision, _VISION_SIZES)
    _set_known(config, {name: _VOCABULARY[token] for name, token in _TOKEN_IDS.items()})
    _set_known(config, _OWN.get(model_type, {}))
    # vLLM's CPU attention takes no head dimension below 32.
    _set_known(text, {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1})
    text.pad_token_id = _VOCABULARY["<pad>"]
    text.eos_token_id = _VOCABULARY["<eos>"]
    if getattr(type(text)(), "sliding_window", None) is None:
        _set_known(text, {"sliding_window": None})
    if hasattr(vision, "spatial_merge_size"):
        rope = dict(text.rope_parameters)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        num_angles = int(head_dim * rope.get("partial_rotary_factor", 1)) // 2
        side = 3 * num_angles // 8
        rope["mrope_section"] = [num_angles - 2 * side, side, side]
        text.rope_parameters = rope
    return config


def _set_known(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(_MARKS))
    others = {k: v for k, v in _NAMED_MARKS.items() if k not in ("pad_token", "eos_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens=others,
    )


def save_vision_config(model_type: str, path: Path) -> None:
    """Save the configuration alone of any type, by which one is refused."""
    CONFIG_MAPPING[model_type]().save_pretrained(path)
