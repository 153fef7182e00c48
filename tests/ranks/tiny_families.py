"""Text-to-image and text-to-video pipelines of diffusers, one for each family, tiny and with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from tiny_pipelines import word_tokenizer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

_WIDTH = 16
"""Width of text encoders."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of pipelines, and the arguments of its call that make it small and quick."""

    make: Callable[[Path], Any]
    """Return a pipeline; the folder is for a tokenizer's files."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    size: tuple[int, int] | None = (16, 16)
    is_flow: bool = True


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
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        model_max_length=limit,
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return made


def clip(kind: type[Any], vocab_size: int) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=_WIDTH,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )
    return seeded(kind, config=config)


def clip_parts(path: Path) -> dict[str, Any]:
    tokenizer = word_tokenizer(path / "words")
    return {"tokenizer": tokenizer, "text_encoder": clip(transformers.CLIPTextModel, len(tokenizer))}


def t5(kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=48, d_model=_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return seeded(getattr(transformers, f"{kind}EncoderModel"), config=config)


def decoder_config(kind: str, **more: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=48,
        hidden_size=_WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        **more,
    )


def gemma() -> Any:
    return seeded(transformers.Gemma2Model, config=decoder_config("Gemma2"))


def vae(channels: int = 4, **more: Any) -> Any:
    return seeded(
        diffusers.AutoencoderKL,
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=2,
        scaling_factor=1.0,
        **{"shift_factor": 0.0, **more},
    )


def flow(shift: float = 3.0) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


def ddim() -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def unet(**more: Any) -> Any:
    return seeded(
        diffusers.UNet2DConditionModel,
        block_out_channels=(8, 16),
        layers_per_block=1,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=2,
        norm_num_groups=2,
        **more,
    )


def stable_diffusion(path: Path) -> Any:
    nothing: dict[str, Any] = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"))
    return diffusers.StableDiffusionPipeline(
        unet=unet(cross_attention_dim=_WIDTH),
        vae=vae(),
        scheduler=ddim(),
        **clip_parts(path),
        **nothing,
        requires_safety_checker=False,
    )


def stable_diffusion_xl(path: Path) -> Any:
    first = clip_parts(path)
    second = {
        "tokenizer_2": first["tokenizer"],
        "text_encoder_2": clip(transformers.CLIPTextModelWithProjection, len(first["tokenizer"])),
    }
    model = unet(
        cross_attention_dim=2 * _WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + _WIDTH,
        use_linear_projection=True,
    )
    return diffusers.StableDiffusionXLPipeline(unet=model, vae=vae(), scheduler=ddim(), **first, **second)


def stable_diffusion_3(path: Path) -> Any:
    tokenizer = word_tokenizer(path / "words")
    encoder = clip(transformers.CLIPTextModelWithProjection, len(tokenizer))
    transformer = seeded(
        diffusers.SD3Transformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * _WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * _WIDTH,
        pos_embed_max_size=8,
    )
    rest: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        vae=vae(),
        scheduler=flow(),
        text_encoder=encoder,
        tokenizer=tokenizer,
        text_encoder_2=encoder,
        tokenizer_2=tokenizer,
        **rest,
    )


def flux_parts(path: Path, *, is_distilled: bool) -> dict[str, Any]:
    transformer = seeded(
        diffusers.FluxTransformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        pooled_projection_dim=_WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=is_distilled,
    )
    own = {"transformer": transformer, "vae": vae(), "scheduler": flow()}
    return {**own, **clip_parts(path), "tokenizer_2": letters(), "text_encoder_2": t5()}


def flux_dev(path: Path) -> Any:
    return diffusers.FluxPipeline(**flux_parts(path, is_distilled=True))


def flux_schnell(path: Path) -> Any:
    return diffusers.FluxPipeline(**flux_parts(path, is_distilled=False))


def kontext(path: Path) -> Any:
    return diffusers.FluxKontextPipeline(**flux_parts(path, is_distilled=True))


def pixart(_: Path) -> Any:
    transformer = seeded(
        diffusers.PixArtTransformer2DModel,
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=_WIDTH,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=16,
        norm_type="ada_norm_single",
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": ddim()}
    return diffusers.PixArtSigmaPipeline(tokenizer=letters(), text_encoder=t5(), **parts)


def sana(_: Path) -> Any:
    transformer = seeded(
        diffusers.SanaTransformer2DModel,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=_WIDTH,
        sample_size=8,
    )
    decoder = seeded(
        diffusers.AutoencoderDC,
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
    parts: dict[str, Any] = {"tokenizer": letters(), "text_encoder": gemma()}
    return diffusers.SanaPipeline(transformer=transformer, vae=decoder, scheduler=flow(), **parts)


def aura_flow(_: Path) -> Any:
    transformer = seeded(
        diffusers.AuraFlowTransformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=_WIDTH,
        pos_embed_max_size=64,
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow(1.73)}
    return diffusers.AuraFlowPipeline(tokenizer=letters(), text_encoder=t5("UMT5"), **parts)


def qwen_parts() -> dict[str, Any]:
    transformer = seeded(
        diffusers.QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=_WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    decoder = seeded(
        diffusers.AutoencoderKLQwenImage,
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    text = decoder_config("Qwen2", rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}).to_dict()
    text.pop("head_dim")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": _WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    encoder = seeded(transformers.Qwen2_5_VLForConditionalGeneration, config=config)
    own = {"transformer": transformer, "vae": decoder, "scheduler": flow()}
    return {**own, "tokenizer": letters(), "text_encoder": encoder}


def qwen_image(_: Path) -> Any:
    return diffusers.QwenImagePipeline(**qwen_parts())


def qwen_image_edit(_: Path) -> Any:
    return diffusers.QwenImageEditPipeline(**qwen_parts(), processor=None)


def lumina_2(_: Path) -> Any:
    transformer = seeded(
        diffusers.Lumina2Transformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=16,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 64, 64),
        cap_feat_dim=_WIDTH,
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow(6.0)}
    return diffusers.Lumina2Pipeline(tokenizer=letters(), text_encoder=gemma(), **parts)


def z_image(_: Path) -> Any:
    transformer = seeded(
        diffusers.ZImageTransformer2DModel,
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    encoder = seeded(transformers.Qwen3Model, config=decoder_config("Qwen3"))
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow()}
    return diffusers.ZImagePipeline(tokenizer=letters(), text_encoder=encoder, **parts)


def ltx(_: Path) -> Any:
    transformer = seeded(
        diffusers.LTXVideoTransformer3DModel,
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=_WIDTH,
    )
    decoder = seeded(
        diffusers.AutoencoderKLLTXVideo,
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
    parts: dict[str, Any] = {"transformer": transformer, "vae": decoder, "scheduler": flow()}
    return diffusers.LTXPipeline(tokenizer=letters(), text_encoder=t5(), **parts)


def wan_transformer() -> Any:
    return seeded(
        diffusers.WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=_WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )


def wan(_: Path) -> Any:
    decoder = seeded(
        diffusers.AutoencoderKLWan,
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    parts: dict[str, Any] = {"transformer": wan_transformer(), "vae": decoder, "scheduler": flow(7.0)}
    return diffusers.WanPipeline(tokenizer=letters(), text_encoder=t5("UMT5"), **parts)


def wan_of_two(path: Path) -> Any:
    pipeline = wan(path)
    pipeline.register_modules(transformer_2=wan_transformer())
    return pipeline


def flux_2_klein(_: Path) -> Any:
    transformer = seeded(
        diffusers.Flux2Transformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * _WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    decoder = seeded(
        diffusers.AutoencoderKLFlux2,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
    )
    encoder = seeded(transformers.Qwen3ForCausalLM, config=decoder_config("Qwen3"))
    parts: dict[str, Any] = {"transformer": transformer, "vae": decoder, "scheduler": flow()}
    return diffusers.Flux2KleinPipeline(tokenizer=letters(), text_encoder=encoder, **parts)


_SHORT = {"max_sequence_length": 16}
FAMILIES = {
    "Stable Diffusion 1 and 2": Family(make=stable_diffusion, is_flow=False),
    "Stable Diffusion 3 and 3.5": Family(make=stable_diffusion_3),
    "Stable Diffusion XL": Family(make=stable_diffusion_xl, is_flow=False),
    "FLUX.1 dev": Family(make=flux_dev, options=_SHORT),
    "FLUX.1 schnell": Family(make=flux_schnell, options=_SHORT),
    "PixArt": Family(make=pixart, options={**_SHORT, "use_resolution_binning": False}, is_flow=False),
    "Sana": Family(
        make=sana,
        options={**_SHORT, "use_resolution_binning": False, "complex_human_instruction": None},
        size=(32, 32),
    ),
    "AuraFlow": Family(make=aura_flow, options=_SHORT),
    "Qwen-Image": Family(make=qwen_image, options=_SHORT),
    "Lumina 2": Family(make=lumina_2, options={"max_sequence_length": 64, "system_prompt": "a"}),
    "Z-Image": Family(make=z_image, options=_SHORT),
    "LTX": Family(make=ltx, options={**_SHORT, "num_frames": 9}, size=(32, 32)),
    "Wan 2.1": Family(make=wan, options={**_SHORT, "num_frames": 5}),
    "FLUX.2 klein": Family(make=flux_2_klein, options={**_SHORT, "text_encoder_out_layers": (0, 1)}),
    "FLUX.1 Kontext": Family(make=kontext, options={**_SHORT, "_auto_resize": False, "max_area": 256}),
}
REFUSED = {
    "Qwen-Image-Edit": Family(make=qwen_image_edit, options=_SHORT),
    "Wan 2.2 of two transformers": Family(make=wan_of_two, options={**_SHORT, "num_frames": 5}),
}
