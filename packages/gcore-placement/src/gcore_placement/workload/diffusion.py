"""The workload of diffusion transformers: floating-point operations per latent."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from gcore_placement.errors import refusal
from gcore_placement.quantities import (
    FORWARD_AND_BACKWARD,
    CheckedQuantities,
    Floats,
    Positive,
    check_lengths,
    check_positive,
)

Architecture = Literal["dit", "mmdit"]

TIMESTEP_CHANNELS = 256
"""Sinusoids of the embedding of a timestep."""


@dataclass(frozen=True, kw_only=True)
class DiffusionWorkload(CheckedQuantities):
    """The shape of a diffusion transformer.

    `dit`: blocks over image tokens, conditioned by adaptive norms (Peebles and Xie, arXiv:2212.09748). `mmdit`: image
    and text tokens with weights of their own, and joint attention (SD3; Esser et al., arXiv:2403.03206). Fields carry
    the names of diffusers' configs; every number is an integer of at least 1, but for those of the text, which are 0
    in `dit`.

    Example:
        >>> workload = DiffusionWorkload(architecture="dit", num_layers=28, num_attention_heads=16,
        ...     attention_head_dim=72, in_channels=4, out_channels=8)
        >>> workload.hidden_size
        1152
        >>> flops = workload.flops(16, 16, num_timesteps=20, classifier_free_guidance=True)
        >>> print(f"{flops:.2e}")
        9.49e+12
    """

    architecture: Architecture
    num_layers: Positive
    num_attention_heads: Positive
    attention_head_dim: Positive
    in_channels: Positive
    """Channels of the latent."""
    out_channels: Positive
    patch_size: Positive = 2
    mlp_ratio: Positive = 4
    joint_attention_dim: int = 0
    """Width of a text token from the text encoders."""
    pooled_projection_dim: int = 0
    """Width of the pooled text."""

    def __post_init__(self) -> None:
        if self.architecture not in get_args(Architecture):
            raise refusal("architecture", self.architecture, "'dit' or 'mmdit'")
        super().__post_init__()
        for name in ("joint_attention_dim", "pooled_projection_dim"):
            if self.architecture == "mmdit":
                check_positive(name, getattr(self, name))
            elif getattr(self, name) != 0:
                raise refusal(name, getattr(self, name), "0 in 'dit', which has no text")

    @property
    def hidden_size(self) -> int:
        """Width of a token."""
        return self.num_attention_heads * self.attention_head_dim

    def flops(
        self,
        heights: ArrayLike,
        widths: ArrayLike,
        *,
        text_tokens: ArrayLike = 0,
        num_timesteps: ArrayLike = 1,
        classifier_free_guidance: bool = False,
        backward: bool = False,
    ) -> Floats:
        """Return the model FLOPs of the transformer over latents, of any shapes that broadcast, in the broadcast shape.

        With N = heights * widths image and T text tokens, h = hidden_size, m = mlp_ratio, a latent takes at each of its
        timesteps, twice with guidance and thrice with a backward pass, in each layer

            2 N h^2 (4 + 2m)  +  4 (N + T)^2 h  +  2 * 6 h^2

        for the image's matrices, Q K^T and the weighted sum of V, and the adaptive norm; `mmdit` adds 2 T h^2 (4 + 2m)
        + 12 h^2 for the text, of which the last layer leaves out what nothing reads (2 T h^2 (1 + 2m) + 8 h^2). Patches
        in and out, the embeddings of timestep and text and the last norm are counted; other norms, softmax, activations
        and the look-up of classes are not, nor are text encoders and VAE.

        Args:
            heights: rows of the latent's tokens (its pixels over `patch_size`); ``widths``: their columns.
            text_tokens: of each prompt; 0 in `dit`.
            classifier_free_guidance: every timestep is computed with the prompt and without.
            backward: FLOPs of training, forward and backward; else those of sampling.

        PlacementError names a number that is negative, not finite or not whole, and shapes that do not broadcast.
        """
        arrays = {
            "heights": check_lengths("heights", heights),
            "widths": check_lengths("widths", widths),
            "text_tokens": check_lengths("text_tokens", text_tokens),
            "num_timesteps": check_lengths("num_timesteps", num_timesteps),
        }
        try:
            rows, columns, text, timesteps = np.broadcast_arrays(*arrays.values())
        except ValueError:
            shapes = {name: values.shape for name, values in arrays.items()}
            raise refusal("the shapes of latents", shapes, "shapes that broadcast") from None
        if self.architecture == "dit" and text.any():
            raise refusal("text_tokens", float(text.max()), "0 in 'dit', which has no text")
        passes = timesteps
        if classifier_free_guidance:
            passes = passes * 2
        if backward:
            passes = passes * FORWARD_AND_BACKWARD
        return np.asarray(passes * self._forward(rows * columns, text), dtype=np.float64)

    def _forward(self, image: Floats, text: Floats) -> Floats:
        """Return the FLOPs of one timestep: 2 for each weight and token, and the attention."""
        h = self.hidden_size
        m = self.mlp_ratio
        layers = self.num_layers
        patch = self.patch_size**2
        of_image = layers * (4 + 2 * m) * h**2 + patch * h * (self.in_channels + self.out_channels)
        of_latent = (6 * layers + 2) * h**2 + TIMESTEP_CHANNELS * h + h**2
        weights = image * of_image + of_latent
        if self.architecture == "mmdit":
            of_text = (layers * (4 + 2 * m) - (1 + 2 * m)) * h**2 + self.joint_attention_dim * h
            weights = (
                weights
                + text * of_text
                + (6 * layers - 4) * h**2
                + self.pooled_projection_dim * h
                + h**2
            )
        return 2 * weights + 4 * layers * (image + text) ** 2 * h
