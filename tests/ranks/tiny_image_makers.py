"""Pipelines of diffusers that make images of text, tiny and with random weights."""

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
    mistral,
    seeded,
    t5,
    unet,
    vae,
)
from tiny_pipelines import word_tokenizer


def stable_diffusion(path: Path) -> Any:
    nothing: dict[str, Any] = dict.fromkeys(
        ("safety_checker", "feature_extractor", "image_encoder")
    )
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
    return kinds.StableDiffusionXLPipeline(
        unet=model, vae=vae(), scheduler=ddim(), **first, **second
    )


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
    return kinds.SanaPipeline(
        transformer=transformer, vae=deep_compression(), scheduler=flow(), **parts
    )


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


def qwen_parts(tokenizer: Any = None) -> dict[str, Any]:
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
    tokenizer = tokenizer or letters()
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>")
        for name in ("vision_start", "image_pad", "video_pad")
    }
    text = decoder_config(
        "Qwen2", rope_parameters={"rope_type": "default", "mrope_section": [1, 1, 2]}
    ).to_dict()
    text.pop("head_dim")
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config={**vision, "patch_size": 2},
        vision_start_token_id=ids["vision_start"],
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
    )
    encoder = seeded(transformers.Qwen2_5_VLForConditionalGeneration, config=config)
    own = {"transformer": transformer, "vae": decoder, "scheduler": flow()}
    return {**own, "tokenizer": tokenizer, "text_encoder": encoder}


def qwen_image(_: Path) -> Any:
    return kinds.QwenImagePipeline(**qwen_parts())


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
    # The pipeline expects a factor of 8.
    parts: dict[str, Any] = {
        "transformer": transformer,
        "vae": vae(num_blocks=4),
        "scheduler": flow(6.0),
    }
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


def flux_2_parts(*, num_read: int, is_distilled: bool) -> dict[str, Any]:
    """The pipeline reads so many layers of the text encoder."""
    transformer = seeded(
        kinds.Flux2Transformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=num_read * WIDTH,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=is_distilled,
    )
    return {
        "transformer": transformer,
        "vae": flux_2_decoder(),
        "scheduler": flow(),
        "tokenizer": letters(),
    }


def flux_2_dev(_: Path) -> Any:
    return kinds.Flux2Pipeline(
        text_encoder=mistral(), **flux_2_parts(num_read=2, is_distilled=True)
    )


def flux_2_klein(_: Path) -> Any:
    # It reads layers up to 27.
    encoder = seeded(
        transformers.Qwen3ForCausalLM, config=decoder_config("Qwen3", num_hidden_layers=28)
    )
    return kinds.Flux2KleinPipeline(
        text_encoder=encoder, **flux_2_parts(num_read=3, is_distilled=False)
    )
