"""Text-to-image and text-to-video pipelines of diffusers, one for each family, tiny and with random weights."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from tiny_parts import (
    WIDTH,
    clip,
    clip_parts,
    ddim,
    decoder_config,
    deep_compression,
    flow,
    flux_2_decoder,
    gemma,
    kinds,
    letters,
    ltx_decoder,
    mistral,
    seeded,
    t5,
    unet,
    vae,
)
from tiny_pipelines import word_tokenizer


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of pipelines, and the arguments of its call that make it small and quick."""

    make: Callable[[Path], Any]
    """Return a pipeline; the folder is for a tokenizer's files."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    size: tuple[int, int] | None = (16, 16)
    is_flow: bool = True
    has_guidance: bool = True
    """Classifier-free guidance, rather than a scale that the model is given."""
    has_two_calls: bool = False
    """The model is called once with and once without the prompt."""
    makes_videos: bool = False
    refusal: str = ""
    """Part of the error, where the family is refused."""


def stable_diffusion(path: Path) -> Any:
    nothing: dict[str, Any] = dict.fromkeys(("safety_checker", "feature_extractor", "image_encoder"))
    return kinds.StableDiffusionPipeline(
        unet=unet(cross_attention_dim=WIDTH),
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
        cross_attention_dim=2 * WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        use_linear_projection=True,
    )
    return kinds.StableDiffusionXLPipeline(unet=model, vae=vae(), scheduler=ddim(), **first, **second)


def stable_diffusion_3(path: Path) -> Any:
    tokenizer = word_tokenizer(path / "words")
    encoder = clip(transformers.CLIPTextModelWithProjection, len(tokenizer))
    transformer = seeded(
        kinds.SD3Transformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=8,
        qk_norm="rms_norm",
        dual_attention_layers=(0,),
    )
    rest: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    return kinds.StableDiffusion3Pipeline(
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
        kinds.FluxTransformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=is_distilled,
    )
    own = {"transformer": transformer, "vae": vae(), "scheduler": flow()}
    return {**own, **clip_parts(path), "tokenizer_2": letters(), "text_encoder_2": t5()}


def flux_dev(path: Path) -> Any:
    return kinds.FluxPipeline(**flux_parts(path, is_distilled=True))


def flux_schnell(path: Path) -> Any:
    return kinds.FluxPipeline(**flux_parts(path, is_distilled=False))


def kontext(path: Path) -> Any:
    return kinds.FluxKontextPipeline(**flux_parts(path, is_distilled=True))


def pixart_parts() -> dict[str, Any]:
    transformer = seeded(
        kinds.PixArtTransformer2DModel,
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=WIDTH,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=16,
        norm_type="ada_norm_single",
    )
    return {
        "transformer": transformer,
        "vae": vae(),
        "scheduler": ddim(),
        "tokenizer": letters(),
        "text_encoder": t5(),
    }


def pixart_alpha(_: Path) -> Any:
    return kinds.PixArtAlphaPipeline(**pixart_parts())


def pixart_sigma(_: Path) -> Any:
    return kinds.PixArtSigmaPipeline(**pixart_parts())


def sana(_: Path) -> Any:
    transformer = seeded(
        kinds.SanaTransformer2DModel,
        patch_size=1,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=8,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=8,
    )
    parts: dict[str, Any] = {"tokenizer": letters(), "text_encoder": gemma()}
    return kinds.SanaPipeline(transformer=transformer, vae=deep_compression(), scheduler=flow(), **parts)


def aura_flow(_: Path) -> Any:
    transformer = seeded(
        kinds.AuraFlowTransformer2DModel,
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=WIDTH,
        pos_embed_max_size=64,
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow(1.73)}
    return kinds.AuraFlowPipeline(tokenizer=letters(), text_encoder=t5("UMT5"), **parts)


def qwen_parts() -> dict[str, Any]:
    transformer = seeded(
        kinds.QwenImageTransformer2DModel,
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    )
    decoder = seeded(
        kinds.AutoencoderKLQwenImage,
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
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    encoder = seeded(transformers.Qwen2_5_VLForConditionalGeneration, config=config)
    own = {"transformer": transformer, "vae": decoder, "scheduler": flow()}
    return {**own, "tokenizer": letters(), "text_encoder": encoder}


def qwen_image(_: Path) -> Any:
    return kinds.QwenImagePipeline(**qwen_parts())


def qwen_image_edit(_: Path) -> Any:
    return kinds.QwenImageEditPipeline(**qwen_parts(), processor=None)


def lumina_2(_: Path) -> Any:
    transformer = seeded(
        kinds.Lumina2Transformer2DModel,
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
        cap_feat_dim=WIDTH,
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow(6.0)}
    return kinds.Lumina2Pipeline(tokenizer=letters(), text_encoder=gemma(), **parts)


def z_image(_: Path) -> Any:
    transformer = seeded(
        kinds.ZImageTransformer2DModel,
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    encoder = seeded(transformers.Qwen3Model, config=decoder_config("Qwen3"))
    parts: dict[str, Any] = {"transformer": transformer, "vae": vae(), "scheduler": flow()}
    return kinds.ZImagePipeline(tokenizer=letters(), text_encoder=encoder, **parts)


def ltx(_: Path) -> Any:
    transformer = seeded(
        kinds.LTXVideoTransformer3DModel,
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=WIDTH,
    )
    parts: dict[str, Any] = {"transformer": transformer, "vae": ltx_decoder(), "scheduler": flow()}
    return kinds.LTXPipeline(tokenizer=letters(), text_encoder=t5(), **parts)


def wan_transformer() -> Any:
    return seeded(
        kinds.WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=32,
        num_layers=1,
        rope_max_seq_len=32,
    )


def wan(_: Path) -> Any:
    decoder = seeded(
        kinds.AutoencoderKLWan,
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    parts: dict[str, Any] = {"transformer": wan_transformer(), "vae": decoder, "scheduler": flow(7.0)}
    return kinds.WanPipeline(tokenizer=letters(), text_encoder=t5("UMT5"), **parts)


def wan_of_two(path: Path) -> Any:
    pipeline = wan(path)
    pipeline.register_modules(transformer_2=wan_transformer())
    return pipeline


def flux_2_parts(*, is_distilled: bool) -> dict[str, Any]:
    transformer = seeded(
        kinds.Flux2Transformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=is_distilled,
    )
    return {"transformer": transformer, "vae": flux_2_decoder(), "scheduler": flow(), "tokenizer": letters()}


def flux_2_dev(_: Path) -> Any:
    return kinds.Flux2Pipeline(text_encoder=mistral(), **flux_2_parts(is_distilled=True))


def flux_2_klein(_: Path) -> Any:
    encoder = seeded(transformers.Qwen3ForCausalLM, config=decoder_config("Qwen3"))
    return kinds.Flux2KleinPipeline(text_encoder=encoder, **flux_2_parts(is_distilled=False))


_SHORT = {"max_sequence_length": 16}
_UNBINNED = {**_SHORT, "use_resolution_binning": False}
FAMILIES = {
    "Stable Diffusion 1": Family(make=stable_diffusion, is_flow=False),
    "Stable Diffusion 3 and 3.5": Family(make=stable_diffusion_3),
    "Stable Diffusion XL": Family(make=stable_diffusion_xl, is_flow=False),
    "FLUX.1 dev": Family(make=flux_dev, options=_SHORT, has_guidance=False),
    "FLUX.1 schnell": Family(make=flux_schnell, options=_SHORT, has_two_calls=True),
    "FLUX.1 Kontext, without an image": Family(
        make=kontext, options={**_SHORT, "_auto_resize": False, "max_area": 256}, has_guidance=False
    ),
    "FLUX.2 dev": Family(make=flux_2_dev, options={**_SHORT, "text_encoder_out_layers": (0, 1)}, has_guidance=False),
    "FLUX.2 klein": Family(
        make=flux_2_klein, options={**_SHORT, "text_encoder_out_layers": (0, 1)}, has_two_calls=True
    ),
    "PixArt-alpha": Family(make=pixart_alpha, options=_UNBINNED, is_flow=False),
    "PixArt-Sigma": Family(make=pixart_sigma, options=_UNBINNED, is_flow=False),
    "Sana": Family(make=sana, options={**_UNBINNED, "complex_human_instruction": None}, size=(32, 32)),
    "AuraFlow": Family(make=aura_flow, options=_SHORT),
    "Qwen-Image": Family(make=qwen_image, options={"max_sequence_length": 400}, has_two_calls=True),
    "Lumina 2": Family(make=lumina_2, options={"max_sequence_length": 64, "system_prompt": "a"}, has_two_calls=True),
    "Z-Image": Family(make=z_image, options=_SHORT),
    "LTX": Family(make=ltx, options={**_SHORT, "num_frames": 9}, size=(32, 32), makes_videos=True),
    "Wan 2.1": Family(make=wan, options={**_SHORT, "num_frames": 5}, has_two_calls=True, makes_videos=True),
}
REFUSED = {
    "Qwen-Image-Edit": Family(
        make=qwen_image_edit, options=_SHORT, refusal="QwenImageEditPipeline makes no image of a prompt alone"
    ),
    "Wan 2.2 of two transformers": Family(
        make=wan_of_two,
        options={**_SHORT, "num_frames": 5},
        makes_videos=True,
        refusal="WanPipeline has two transformers",
    ),
}
