"""Pipelines of diffusers that make videos, tiny and with random weights."""

from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from tiny_parts import WIDTH, flow, kinds, letters, ltx_decoder, seeded, t5


def ltx_parts() -> dict[str, Any]:
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
    own = {"transformer": transformer, "vae": ltx_decoder(), "scheduler": flow()}
    return {**own, "tokenizer": letters(), "text_encoder": t5()}


def ltx(_: Path) -> Any:
    return kinds.LTXPipeline(**ltx_parts())


def ltx_image_to_video(_: Path) -> Any:
    return kinds.LTXImageToVideoPipeline(**ltx_parts())


def wan_transformer(in_channels: int = 16, **more: Any) -> Any:
    return seeded(
        kinds.WanTransformer3DModel,
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=32,
        ffn_dim=32,
        rope_max_seq_len=32,
        **{"num_layers": 1, **more},
    )


def wan_parts() -> dict[str, Any]:
    decoder = seeded(
        kinds.AutoencoderKLWan,
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    return {
        "vae": decoder,
        "scheduler": flow(7.0),
        "tokenizer": letters(),
        "text_encoder": t5("UMT5"),
    }


def wan(_: Path) -> Any:
    return kinds.WanPipeline(transformer=wan_transformer(), **wan_parts())


def wan_image_to_video(_: Path) -> Any:
    # That of text to video does without ftfy, where it is not installed.
    own: Any = import_module("diffusers.pipelines.wan.pipeline_wan_i2v")
    own.prompt_clean = import_module("diffusers.pipelines.wan.pipeline_wan").prompt_clean
    config = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    parts: dict[str, Any] = {
        "image_encoder": seeded(transformers.CLIPVisionModel, config=config),
        "image_processor": transformers.CLIPImageProcessor(
            size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}
        ),
        # Of the latents, and of an image of those with a mask of four channels.
        "transformer": wan_transformer(2 * 16 + 4, image_dim=16),
    }
    return kinds.WanImageToVideoPipeline(**wan_parts(), **parts)


def wan_of_two(path: Path) -> Any:
    pipeline = wan(path)
    pipeline.register_modules(transformer_2=wan_transformer(num_layers=2))
    # It makes the steps whose noise is below this: of three all but the first.
    pipeline.register_to_config(boundary_ratio=0.95)
    return pipeline
