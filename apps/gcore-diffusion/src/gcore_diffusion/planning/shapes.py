"""The shapes of a pipeline: its parts without their weights, the inputs of its denoiser, and what a pass takes.

Legend: B images, C channels of a latent, H and W its height and width, S tokens of an image, T of its text.
"""

import json
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gcore_diffusion.planning.live_bytes import LiveBytes
from gcore_runs import UserError, json_object

_SHIPPED = Path(__file__).parents[1] / "recipes" / "configs"
_CLIP_TOKENS = 77
Inputs = dict[str, Any]


def shape_folder(model: str) -> Path:
    """Return a pipeline's folder; where there is none, the one here with the `config.json` files of one of its name."""
    folder = Path(model)
    shipped = _SHIPPED / folder.name
    if not folder.is_dir() and shipped.is_dir():
        return shipped
    return folder


def part_classes(folder: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of each part of a pipeline that has weights, by name."""
    path = folder / "model_index.json"
    classes: dict[str, tuple[str, str]] = {}
    for name, value in json_object(path.read_text(), str(path)).items():
        is_part = isinstance(value, list) and None not in value
        if is_part and (folder / name / "config.json").is_file():
            classes[name] = (value[0], value[1])
    return classes


def part_without_weights(folder: Path, name: str) -> Any:
    """Build a part of a pipeline on torch's meta device."""
    import diffusers
    import transformers

    library, class_name = part_classes(folder)[name]
    with torch.device("meta"):
        if library == "transformers":
            model_class = getattr(transformers, class_name)
            return model_class(model_class.config_class.from_pretrained(folder / name))
        model_class = getattr(diffusers, class_name)
        return model_class.from_config(json.loads((folder / name / "config.json").read_text()))


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """Size of the images in pixels and in latents, and the most tokens of a prompt."""

    height: int
    width: int
    max_sequence_length: int
    """0: the pipeline's own."""
    latent_channels: int
    reduction: int
    """Pixels of a side for one of the latent."""

    @property
    def latent(self) -> tuple[int, int, int]:
        """C, H, W."""
        return self.latent_channels, self.height // self.reduction, self.width // self.reduction


def _sd3(config: Any, image: ImageShape, batch: int) -> Inputs:
    text = _CLIP_TOKENS + (image.max_sequence_length or 256)
    return {
        "hidden_states": torch.empty(batch, *image.latent),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "pooled_projections": torch.empty(batch, config.pooled_projection_dim),
        "timestep": torch.empty(batch),
    }


def _flux(config: Any, image: ImageShape, batch: int) -> Inputs:
    tokens = _num_tokens(image)
    text = image.max_sequence_length or 512
    inputs: Inputs = {
        "hidden_states": torch.empty(batch, tokens, config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "pooled_projections": torch.empty(batch, config.pooled_projection_dim),
        "timestep": torch.empty(batch),
        "img_ids": torch.empty(tokens, 3),
        "txt_ids": torch.empty(text, 3),
    }
    if config.guidance_embeds:
        inputs["guidance"] = torch.empty(batch)
    return inputs


def _qwen_image(config: Any, image: ImageShape, batch: int) -> Inputs:
    text = image.max_sequence_length or 512
    _, height, width = image.latent
    return {
        "hidden_states": torch.empty(batch, _num_tokens(image), config.in_channels),
        "encoder_hidden_states": torch.empty(batch, text, config.joint_attention_dim),
        "timestep": torch.empty(batch),
        "img_shapes": [[(1, height // 2, width // 2)]] * batch,
    }


def _num_tokens(image: ImageShape) -> int:
    """Return the tokens of an image, each of 2 x 2 of its latent."""
    _, height, width = image.latent
    return (height // 2) * (width // 2)


INPUTS: Mapping[str, Callable[[Any, ImageShape, int], Inputs]] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "QwenImageTransformer2DModel": _qwen_image,
}
"""For classes of denoisers: the inputs of a batch, as the pipeline gives them."""

GUIDED_IN_TWO_CALLS = frozenset({"QwenImageTransformer2DModel"})
"""Classes of denoisers whose pipelines call them without the prompt apart."""


def image_shape(folder: Path, size: tuple[int, int], max_sequence_length: int) -> ImageShape:
    """Return what a pipeline makes; `UserError` without its VAE's `config.json`."""
    path = folder / "vae/config.json"
    if not path.is_file():
        raise UserError(
            f"model is {str(folder)!r}; expected a folder of a diffusers pipeline with vae/config.json"
        )
    config = json_object(path.read_text(), str(path))
    levels = config.get("block_out_channels") or config.get("dim_mult") or []
    return ImageShape(
        height=size[0],
        width=size[1],
        max_sequence_length=max_sequence_length,
        latent_channels=config.get("latent_channels") or config.get("z_dim") or 0,
        reduction=2 ** max(0, len(levels) - 1),
    )


@contextmanager
def fake_weights(model: Any, dtype: torch.dtype | None = None) -> Generator[None]:
    """Give a model on the meta device weights without memory; what is computed inside has none, too.

    ``dtype`` is that of all weights; None: each keeps its own.
    """
    # The positions of tokens are constants.
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                tensor = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                setattr(
                    module, name, torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                )
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_meta:
                    setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
        yield


def training_bytes(
    model: Any, inputs: Callable[[int], Inputs], batch: int, dtype: torch.dtype
) -> int:
    """Return the peak of a forward and a backward pass of ``dtype``, with the gradients of what is trained."""
    with fake_weights(model), warnings.catch_warnings():
        # Of norms in float32, which autocast leaves as they are.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        with LiveBytes(model.parameters()) as live:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                output = model(**inputs(batch), return_dict=False)[0]
            output.float().sum().backward()
    return live.peak


def sampling_bytes(
    model: Any, inputs: Callable[[int], Inputs], batch: int, dtype: torch.dtype
) -> tuple[int, Mapping[str, tuple[int, ...]], tuple[int, ...]]:
    """Return the peak of a pass without gradients, and the shapes of its inputs and of its output."""
    arguments: Inputs = {}
    shapes: dict[str, tuple[int, ...]] = {}
    with fake_weights(model, dtype), torch.no_grad():
        with LiveBytes(model.parameters()) as live:
            for name, value in inputs(batch).items():
                if isinstance(value, torch.Tensor):
                    value = value.to(dtype)
                    shapes[name] = tuple(value.shape)
                arguments[name] = value
            output = model(**arguments, return_dict=False)[0]
        return live.peak, shapes, tuple(output.shape)


def decoding_bytes(vae: Any, image: ImageShape, dtype: torch.dtype) -> int:
    """Return the peak of the decoding of one image: engines decode one after the other."""
    channels, height, width = image.latent
    shape = (1, channels, height, width)
    if "QwenImage" in type(vae).__name__:
        # Its VAE is one of videos.
        shape = (1, channels, 1, height, width)
    with fake_weights(vae, dtype), torch.no_grad():
        latent = torch.empty(shape, dtype=dtype)
        with LiveBytes(vae.parameters()) as live:
            vae.decode(latent, return_dict=False)
    return live.peak
