"""Parts of tiny pipelines of diffusers: tokenizers, schedulers, and models with random weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_pipelines import clip_config, word_tokenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

kinds: Any = import_module("diffusers")
"""The classes of diffusers, which it loads when they are asked for."""
WIDTH = 16
"""Width of text encoders."""


def seeded(kind: type[Any], **config: Any) -> Any:
    """Make a model with random weights; all of its parameters are noise, since many outputs start at 0."""
    torch.manual_seed(0)
    model = kind(**config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or "pad_token" in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.2)
    return model.eval()


def letters(*, limit: int = 512) -> Any:
    """A tokenizer with a token for each letter."""
    tokens = ["<pad>", "</s>", "<unk>", "<s>", *"abcdefghijklmnopqrstuvwxyz0123456789 "]
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=limit,
    )
    last = "{% set content = messages[-1]['content'] %}"
    made.chat_template = last + "{{ content if content is string else content[0]['text'] }}"
    return made


def clip(kind: type[Any], vocab_size: int) -> Any:
    return seeded(kind, config=clip_config(vocab_size, num_layers=2))


def clip_parts(path: Path) -> dict[str, Any]:
    tokenizer = word_tokenizer(path / "words")
    return {
        "tokenizer": tokenizer,
        "text_encoder": clip(transformers.CLIPTextModel, len(tokenizer)),
    }


def t5(kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=48, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return seeded(getattr(transformers, f"{kind}EncoderModel"), config=config)


def decoder_config(kind: str, *, num_hidden_layers: int = 2, **more: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=48,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        **more,
    )


def gemma() -> Any:
    return seeded(transformers.Gemma2Model, config=decoder_config("Gemma2"))


def mistral() -> Any:
    vision = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 12,
        "patch_size": 6,
    }
    config = transformers.Mistral3Config(
        text_config=decoder_config("Mistral").to_dict(), vision_config=vision, image_token_index=1
    )
    return seeded(transformers.Mistral3ForConditionalGeneration, config=config)


def vae(channels: int = 4, *, num_blocks: int = 2, **more: Any) -> Any:
    """An image is 2 ** (num_blocks - 1) times as large as its latents."""
    return seeded(
        kinds.AutoencoderKL,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * num_blocks,
        up_block_types=("UpDecoderBlock2D",) * num_blocks,
        block_out_channels=(4,) * num_blocks,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        scaling_factor=1.0,
        **{"shift_factor": 0.0, **more},
    )


def deep_compression() -> Any:
    return seeded(
        kinds.AutoencoderDC,
        in_channels=3,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )


def flux_2_decoder() -> Any:
    return seeded(
        kinds.AutoencoderKLFlux2,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
    )


def ltx_decoder() -> Any:
    return seeded(
        kinds.AutoencoderKLLTXVideo,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1,) * 4,
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
    )


def flow(shift: float = 3.0) -> Any:
    return kinds.FlowMatchEulerDiscreteScheduler(shift=shift)


def ddim() -> Any:
    return kinds.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def unet(*, in_channels: int = 4, **more: Any) -> Any:
    return seeded(
        kinds.UNet2DConditionModel,
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=in_channels,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=2,
        **more,
    )
