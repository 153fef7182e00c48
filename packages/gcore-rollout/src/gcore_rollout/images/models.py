"""Scores of images by local models: CLIP, heads on it, and BLIP with ImageReward's head."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gcore_rollout.errors import RewardConfigError, require
from gcore_rollout.images.reward import Images, Rows, ScoreImages, Scores

# Of the scores on the published validation set, by which scores are standardised.
_MEAN = 0.16717362830052426
_STD = 1.0333394966054072
_MAX_TOKENS = 35
_HEAD_DIM = 64
_HEAD_LAYERS = (0, 2, 4, 6, 7)
"""Indices of the head's linear layers; dropout is between them."""

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
"""Patterns from BLIP's names to those of transformers."""

_OPEN_CLIP_NAMES = (
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"^visual\.transformer\.", "vision_model."),
    (r"^transformer\.", "text_model."),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^text_projection$", "text_projection.weight"),
    (r"\.resblocks\.", ".encoder.layers."),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
)
"""Patterns from open_clip's names to those of transformers."""


def make_clip_reward(
    path: str | Path,
    *,
    weights: str | Path = "",
    device: str = "cpu",
    scale: float | None = 1.0,
) -> ScoreImages:
    """Return a reward of the similarity of images and prompts under a CLIP model of transformers.

    CLIPScore (arXiv 2104.08718) is the cosine; PickScore (arXiv 2305.01569, eq. 1), with its weights, is the cosine
    times the model's learned scale, divided by 26 as Flow-GRPO's code does.

    ``path`` is a Hugging Face folder with tokenizer and image processor; ``scale`` the factor of the cosine, None: the
    model's own over 26. ``weights`` are a checkpoint of open_clip for a model of the folder's sizes, instead of the
    folder's own weights: with HPS_v2_compressed.pt or HPS_v2.1_compressed.pt, and the folder of CLIP-ViT-H-14, the
    cosine is the score of HPSv2 (arXiv 2306.09341), of which papers report 100 times as much.
    """
    from transformers import AutoTokenizer

    model, processor = load_clip(path, device, weights)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    factor = float(model.logit_scale.exp()) / 26 if scale is None else scale

    @torch.no_grad()
    def clip_score(images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]."""
        del rows
        texts = tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        pixels = processor(list(images), return_tensors="pt").to(device)
        outputs = model(**texts.to(device), pixel_values=pixels["pixel_values"])
        cosines = torch.nn.functional.cosine_similarity(outputs.image_embeds, outputs.text_embeds)
        return (factor * cosines).double().cpu().numpy()

    return clip_score


def make_aesthetic_reward(
    path: str | Path, head: str | Path, *, device: str = "cpu"
) -> ScoreImages:
    """Return a linear head, or several layers of them, on CLIP's image embeddings of length 1.

    LAION's aesthetic predictor is one. ``path`` is a Hugging Face folder of a CLIP model, with its image processor;
    ``head`` a safetensors file with ``layers.N.weight`` and ``layers.N.bias``, or ``weight`` and ``bias``.
    """
    model, processor = load_clip(path, device)
    tensors = _read("head", Path(head))
    names = sorted(
        (n for n in tensors if n.endswith("weight") and tensors[n].ndim == 2), key=_layer_of
    )
    width = int(model.config.projection_dim)
    if not names or tensors[names[0]].shape[1] != width or tensors[names[-1]].shape[0] != 1:
        shapes = {name: tuple(tensors[name].shape) for name in tensors}
        raise RewardConfigError(
            f"head {head} has {shapes}; expected layers from {width} embeddings to 1 score"
        )
    compute_scores = _read_head(tensors, names, device)

    @torch.no_grad()
    def aesthetic_score(images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]."""
        del prompts, rows
        embeddings = embed_images(model, processor, list(images), device)
        return compute_scores(torch.nn.functional.normalize(embeddings, dim=-1))

    return aesthetic_score


def make_blip_reward(
    weights: str | Path, tokenizer: str | Path, *, device: str = "cpu"
) -> ScoreImages:
    """Return ImageReward's score (arXiv 2304.05977), from its published weights: about a standard normal variable.

    The state at the prompt's first token of BLIP's text encoder, which attends to the image, goes through five linear
    layers. Sizes are read off the ``weights``, ImageReward.pt or the same as safetensors; ``tokenizer`` is a Hugging
    Face folder of bert-base-uncased with BLIP's two tokens.
    """
    from transformers import AutoTokenizer, CLIPImageProcessor

    tensors = _read("weights", Path(weights))
    try:
        vision, text = _build_blip(tensors)
        vision = vision.to(device)
        text = text.to(device)
        head = _read_head(tensors, [f"mlp.layers.{i}.weight" for i in _HEAD_LAYERS], device)
    except (KeyError, RuntimeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise RewardConfigError(
            f"weights is {str(weights)!r}: it is not ImageReward's: {reason}"
        ) from None
    try:
        tokenize: Any = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RewardConfigError(f"tokenizer is {str(tokenizer)!r}: {error}") from None
    size = vision.config.image_size
    # The shorter side is resized, the middle cropped, and CLIP's means and deviations taken.
    crop = {"height": size, "width": size}
    processor: Any = CLIPImageProcessor(size={"shortest_edge": size}, crop_size=crop)

    @torch.no_grad()
    def image_reward_score(images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]."""
        del rows
        pixels = processor(list(images), return_tensors="pt")["pixel_values"].to(device)
        image_states = vision(pixel_values=pixels).last_hidden_state
        words = tokenize(
            list(prompts),
            padding="max_length",
            truncation=True,
            max_length=_MAX_TOKENS,
            return_tensors="pt",
        ).to(device)
        outputs = text(
            input_ids=words["input_ids"],
            attention_mask=words["attention_mask"],
            encoder_hidden_states=image_states,
            encoder_attention_mask=torch.ones(
                image_states.shape[:2], dtype=torch.long, device=device
            ),
        )
        return (head(outputs.last_hidden_state[:, 0]) - _MEAN) / _STD

    return image_reward_score


def _read_head(
    tensors: Mapping[str, torch.Tensor], names: Iterable[str], device: str
) -> Callable[[torch.Tensor], Scores]:
    """Return linear layers to one score, by the names of their weights, as a function from inputs to scores [B]."""
    layers = [
        (tensors[name].to(device), tensors[name.removesuffix("weight") + "bias"].to(device))
        for name in names
    ]

    def compute_scores(x: torch.Tensor) -> Scores:
        for weight, bias in layers:
            x = torch.nn.functional.linear(x, weight, bias)
        return x[:, 0].double().cpu().numpy()

    return compute_scores


def _layer_of(name: str) -> int:
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def load_clip(path: str | Path, device: str, weights: str | Path = "") -> tuple[Any, Any]:
    """Load the CLIP model and the image processor of a folder, with the weights of open_clip if there are any."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    has_config = (Path(path) / "config.json").is_file()
    require("path", str(path), has_config, "a Hugging Face folder of a CLIP model")
    try:
        if weights:
            model: Any = CLIPModel(CLIPConfig.from_pretrained(path, local_files_only=True))
            _load_open_clip(model, weights)
        else:
            model = CLIPModel.from_pretrained(path, local_files_only=True)
        return model.to(device).eval().requires_grad_(False), CLIPImageProcessor.from_pretrained(
            path
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, RewardConfigError):
            raise
        raise RewardConfigError(f"path is {str(path)!r}: {error}") from None


def embed_images(model: Any, processor: Any, images: Sequence[Any], device: str) -> torch.Tensor:
    """Return a CLIP model's embeddings of images, [images, width]."""
    pixels = processor(images, return_tensors="pt")["pixel_values"].to(device)
    return model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output)


@contextmanager
def report_folder_errors(path: str | Path, content: str) -> Generator[None]:
    """Raise `RewardConfigError` unless a Hugging Face folder is there and loads in this block."""
    has_config = (Path(path) / "config.json").is_file()
    require("path", str(path), has_config, f"a Hugging Face folder of {content}")
    try:
        yield
    except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
        raise RewardConfigError(
            f"path is {str(path)!r}: {str(error).strip().splitlines()[0]:.300}"
        ) from None


def _load_open_clip(model: Any, weights: str | Path) -> None:
    """Load a checkpoint of open_clip, whose attention has one matrix for queries, keys and values."""
    checkpoint: Any = _read("weights", Path(weights))
    state_dict: dict[str, torch.Tensor] = {}
    for name, tensor in checkpoint.get("state_dict", checkpoint).items():
        renamed = _rename(name.removeprefix("module."), _OPEN_CLIP_NAMES)
        if ".in_proj_" in renamed:
            for part, third in zip("qkv", tensor.chunk(3), strict=True):
                state_dict[renamed.replace("in_proj_", f"{part}_proj.")] = third
        elif renamed.endswith("_projection.weight"):
            # The projections are multiplied from the other side.
            state_dict[renamed] = tensor.T
        else:
            state_dict[renamed] = tensor
    try:
        model.load_state_dict(state_dict)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip()
        raise RewardConfigError(
            f"weights is {str(weights)!r}: not of the model in path: {reason:.300}"
        ) from None


def _read(setting: str, path: Path) -> dict[str, torch.Tensor]:
    try:
        if setting == "head" or path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(str(path))
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RewardConfigError(
            f"{setting} is {str(path)!r}: {type(error).__name__}: {error}"
        ) from None


def _build_blip(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """Return BLIP's vision model, and its text encoder that attends to images."""
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    blip = {
        name.removeprefix("blip."): tensor
        for name, tensor in tensors.items()
        if name.startswith("blip.")
    }
    patch = blip["visual_encoder.patch_embed.proj.weight"]
    width = patch.shape[0]
    patch_size = patch.shape[-1]
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
            intermediate_size=blip["text_encoder.encoder.layer.0.intermediate.dense.weight"].shape[
                0
            ],
            num_hidden_layers=_num_layers(blip, r"text_encoder\.encoder\.layer\.(\d+)\."),
            num_attention_heads=words.shape[1] // _HEAD_DIM,
            max_position_embeddings=blip[
                "text_encoder.embeddings.position_embeddings.weight"
            ].shape[0],
        ),
        add_pooling_layer=False,
    )
    vision_state: dict[str, torch.Tensor] = {}
    text_state = {
        name: tensor for name, tensor in text.named_buffers() if name in text.state_dict()
    }
    for name, tensor in blip.items():
        if name.startswith("visual_encoder."):
            vision_state[_rename(name, _VISION_NAMES)] = tensor
        # The position ids are no parameter, and some files lack them.
        elif name.startswith("text_encoder.") and name != "text_encoder.embeddings.position_ids":
            text_state[name.removeprefix("text_encoder.")] = tensor
    vision.load_state_dict(vision_state)
    text.load_state_dict(text_state)
    return vision.eval().requires_grad_(False), text.eval().requires_grad_(False)


def _num_layers(tensors: Mapping[str, torch.Tensor], pattern: str) -> int:
    """Return the number of layers, whose indices are the pattern's group."""
    matches = [re.match(pattern, name) for name in tensors]
    return 1 + max(int(match[1]) for match in matches if match)


def _rename(name: str, patterns: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        name = re.sub(pattern, replacement, name)
    return name
