"""Formulas of diffusion transformers against torch's own operation count of models with the same layers.

The models have every matrix of diffusers' `DiTTransformer2DModel` (with one embedding of the timestep, as the paper
has it) and `SD3Transformer2DModel`, and no more.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from gcore_placement import DiffusionWorkload, PlacementError

DIT = DiffusionWorkload(
    architecture="dit",
    num_layers=3,
    num_attention_heads=4,
    attention_head_dim=16,
    in_channels=4,
    out_channels=8,
)
SD3 = DiffusionWorkload(
    architecture="mmdit",
    num_layers=3,
    num_attention_heads=4,
    attention_head_dim=16,
    in_channels=16,
    out_channels=16,
    joint_attention_dim=48,
    pooled_projection_dim=32,
)


def mlp(inner: int, hidden: int, outer: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, hidden), nn.SiLU(), nn.Linear(hidden, outer))


class Stream(nn.Module):
    """One block's weights for image or text tokens; a stream that nothing reads ends in its keys and values."""

    def __init__(self, width: int, *, is_read: bool = True) -> None:
        super().__init__()
        self.modulation = nn.Linear(width, (6 if is_read else 2) * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width) if is_read else None
        self.mlp = mlp(width, 4 * width, width)


def modulated(x_BND: torch.Tensor, shift_BD: torch.Tensor, scale_BD: torch.Tensor) -> torch.Tensor:
    return x_BND * (1 + scale_BD[:, None]) + shift_BD[:, None]


class Transformer(nn.Module):
    def __init__(self, shape: DiffusionWorkload) -> None:
        super().__init__()
        width = shape.hidden_size
        self.heads = shape.num_attention_heads
        self.patch = nn.Conv2d(shape.in_channels, width, shape.patch_size, shape.patch_size)
        self.timestep = mlp(256, width, width)
        self.is_joint = shape.architecture == "mmdit"
        self.pooled = mlp(shape.pooled_projection_dim, width, width) if self.is_joint else None
        self.text = nn.Linear(shape.joint_attention_dim, width) if self.is_joint else None
        self.blocks = nn.ModuleList(Stream(width) for _ in range(shape.num_layers))
        last = shape.num_layers - 1
        self.text_blocks = nn.ModuleList(
            Stream(width, is_read=i < last) for i in range(shape.num_layers)
        )
        self.norm_out = nn.Linear(width, 2 * width)
        self.proj_out = nn.Linear(width, shape.patch_size**2 * shape.out_channels)

    def forward(
        self, latent: torch.Tensor, text: torch.Tensor, pooled: torch.Tensor
    ) -> torch.Tensor:
        image = self.patch(latent).flatten(2).transpose(1, 2)
        condition = self.timestep(torch.zeros(len(latent), 256))
        streams = [image]
        if self.text is not None and self.pooled is not None:
            condition = condition + self.pooled(pooled)
            streams.append(self.text(text))
        for blocks in zip(self.blocks, self.text_blocks, strict=True):
            streams = self.block(blocks, streams, condition)
        shift, scale = self.norm_out(condition).chunk(2, dim=-1)
        return self.proj_out(modulated(streams[0], shift, scale))

    def block(
        self, blocks: tuple[nn.Module, ...], streams: list[torch.Tensor], condition: torch.Tensor
    ) -> list[torch.Tensor]:
        own = [
            block for block, _ in zip(blocks, streams, strict=False) if isinstance(block, Stream)
        ]
        changes = [
            block.modulation(condition).chunk(6 if block.out else 2, dim=-1) for block in own
        ]
        qkv = torch.cat(
            [
                b.qkv(modulated(x, c[0], c[1]))
                for b, x, c in zip(own, streams, changes, strict=True)
            ],
            dim=1,
        )
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )
        # Torch counts no fused attention of a CPU.
        attended = ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        mixed = attended.split([x.shape[1] for x in streams], dim=1)
        after: list[torch.Tensor] = []
        for b, x, c, y in zip(own, streams, changes, mixed, strict=True):
            if b.out is None:
                after.append(x)
                continue
            x = x + c[2][:, None] * b.out(y)
            after.append(x + c[5][:, None] * b.mlp(modulated(x, c[3], c[4])))
        return after


def counted(
    shape: DiffusionWorkload, height: int, width: int, text_tokens: int, *, backward: bool
) -> int:
    """What torch counts for one latent of height x width tokens."""
    torch.manual_seed(0)
    model = Transformer(shape)
    latent = torch.randn(1, shape.in_channels, height * shape.patch_size, width * shape.patch_size)
    text = torch.randn(1, text_tokens, max(1, shape.joint_attention_dim))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        out = model(latent, text, torch.randn(1, max(1, shape.pooled_projection_dim)))
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("height", "width"), [(4, 4), (8, 12)])
@pytest.mark.parametrize(("shape", "text_tokens"), [(DIT, 0), (SD3, 5), (SD3, 77)])
def test_flops_match_what_torch_counts(
    shape: DiffusionWorkload, text_tokens: int, height: int, width: int
) -> None:
    flops = shape.flops(height, width, text_tokens=text_tokens)
    assert_allclose(flops, counted(shape, height, width, text_tokens, backward=False), rtol=1e-12)


@pytest.mark.parametrize(("shape", "text_tokens"), [(DIT, 0), (SD3, 5)])
def test_a_backward_pass_takes_twice_the_forward(
    shape: DiffusionWorkload, text_tokens: int
) -> None:
    """But for the gradients of the inputs, which are not needed."""
    flops = shape.flops(8, 8, text_tokens=text_tokens, backward=True)
    assert_allclose(flops, counted(shape, 8, 8, text_tokens, backward=True), rtol=0.05)


def test_timesteps_and_guidance_multiply() -> None:
    once = SD3.flops(32, 32, text_tokens=77)
    assert_allclose(
        SD3.flops(32, 32, text_tokens=77, num_timesteps=[1, 10], classifier_free_guidance=True),
        once * [2, 20],
    )


def test_shapes_broadcast_and_attention_is_quadratic() -> None:
    flops = DIT.flops([16, 16, 1000], [16, 32, 1000])
    assert flops.shape == (3,)
    assert flops.dtype == np.float64
    assert_allclose(DIT.flops(1000, 2000) / flops[2], 4, rtol=0.01)
    assert DIT.flops(2, 3).shape == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "unet"}, "architecture is 'unet'; expected 'dit' or 'mmdit'"),
        ({"num_layers": 0}, "num_layers is 0; expected an integer of at least 1"),
        ({"joint_attention_dim": 0}, "joint_attention_dim is 0; expected an integer of at least 1"),
        (
            {"architecture": "dit"},
            "joint_attention_dim is 48; expected 0 in 'dit', which has no text",
        ),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        DiffusionWorkload(**{**vars(SD3), **changes})


def test_wrong_latents_are_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"text_tokens is 3\.0; expected 0 in 'dit', which has no text"
    ):
        DIT.flops(2, 2, text_tokens=3)
    with pytest.raises(PlacementError, match=r"heights is .*; expected whole numbers"):
        DIT.flops(2.5, 2)
    with pytest.raises(
        PlacementError, match=r"the shapes of latents is .*; expected shapes that broadcast"
    ):
        DIT.flops([1, 2], [1, 2, 3])
