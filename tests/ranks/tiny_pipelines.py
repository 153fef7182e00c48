"""Pipelines of diffusers with random weights, small enough to run in milliseconds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

SIZE = 8


def flow_pipeline(path: Path, *, with_vae: bool = False) -> Path:
    """Stable Diffusion 3's, of RGB images of 8 x 8 pixels or, with a VAE, of latents of so many; a saved folder."""
    import torch
    from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
    from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import (
        StableDiffusion3Pipeline,
    )
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    torch.manual_seed(0)
    tokenizer = word_tokenizer(path / "words")
    transformer = SD3Transformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=16,
        pooled_projection_dim=32,
        pos_embed_max_size=SIZE // 2,
    )
    # Its output starts at 0, and a velocity of 0 shows little.
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.2)
    rest: dict[str, Any] = {
        "vae": _vae() if with_vae else None,
        "text_encoder_3": None,
        "tokenizer_3": None,
    }
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        text_encoder=_text_encoder(len(tokenizer), seed=1),
        tokenizer=tokenizer,
        text_encoder_2=_text_encoder(len(tokenizer), seed=2),
        tokenizer_2=tokenizer,
        **rest,
    )
    pipeline.save_pretrained(path / "flow")
    return path / "flow"


def ddim_pipeline(path: Path) -> Path:
    """DiT's, of ten classes, with a VAE and a learned variance; a saved folder."""
    import torch
    from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
    from diffusers.pipelines.dit.pipeline_dit import DiTPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        sample_size=SIZE,
        patch_size=2,
        in_channels=3,
        out_channels=6,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_zero",
        norm_elementwise_affine=False,
        activation_fn="gelu-approximate",
        attention_bias=True,
    )
    torch.nn.init.normal_(transformer.proj_out_2.weight, std=0.2)
    scheduler: Any = DDIMScheduler(num_train_timesteps=1000, clip_sample=False)
    DiTPipeline(transformer=transformer, vae=_vae(), scheduler=scheduler).save_pretrained(
        path / "ddim"
    )
    # Where the folders of trained ones have their classes' names.
    index = path / "ddim/model_index.json"
    labels = {str(number): name for number, name in enumerate(["zero", "one", "two"])}
    index.write_text(json.dumps(json.loads(index.read_text()) | {"id2label": labels}))
    return path / "ddim"


def _vae() -> "AutoencoderKL":
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        latent_channels=3,
        norm_num_groups=4,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def word_tokenizer(path: Path) -> "CLIPTokenizer":
    from transformers import CLIPTokenizer

    path.mkdir(parents=True)
    letters = sorted("abcdefghijklmnopqrstuvwxyz0123456789")
    tokens = [
        *letters,
        *(letter + "</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    (path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    return CLIPTokenizer.from_pretrained(path, model_max_length=8)


def clip_config(vocab_size: int, *, num_layers: int = 1) -> "CLIPTextConfig":
    """The settings of a text encoder, 16 wide."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        max_position_embeddings=8,
        projection_dim=16,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )


def _text_encoder(vocab_size: int, *, seed: int) -> "CLIPTextModelWithProjection":
    import torch
    from transformers import CLIPTextModelWithProjection

    torch.manual_seed(seed)
    return CLIPTextModelWithProjection(clip_config(vocab_size)).eval()
