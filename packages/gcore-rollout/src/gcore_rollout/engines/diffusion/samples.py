"""Image samples from the tape of a batch: trajectories, and the conditions that the model was given."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.recording import Tape
from gcore_rollout.engines.diffusion.types import SCALARS, STACKED, ImageRequest, ImageSample, Trajectory


def samples_of(
    tape: Tape,
    batch: Sequence[tuple[ImageRequest, int]],
    images: NDArray[np.uint8],
    *,
    per_image: Collection[str],
    version: int,
) -> Iterator[ImageSample]:
    """Yield the samples of a batch of B images.

    Args:
        batch: the request and the sample's index of each image.
        images: [B, H, W, 3].
        per_image: names of the model's arguments that have a row for each image.
    """
    assert tape.call is not None
    assert tape.final is not None
    final = tape.final.cpu().numpy()
    own: dict[str, NDArray[np.generic]] = {}
    shared: dict[str, NDArray[np.generic]] = {}
    for name, value in tape.call.conditions().items():
        array = (value.float() if value.is_floating_point() else value).cpu().numpy()
        if name not in per_image:
            shared[name] = array
        elif len(array) == 2 * len(batch):
            own[name] = np.stack([array[: len(batch)], array[len(batch) :]], axis=1)
        else:
            own[name] = array
    is_guided = len(tape.call.output) == 2 * len(batch)
    guidance_scale = batch[0][0].sampling.guidance_scale if is_guided else None
    for row, (trajectory, (request, index)) in enumerate(zip(_trajectories(tape, final), batch, strict=True)):
        yield ImageSample(
            request_id=request.request_id,
            index=index,
            image=images[row],
            latents=final[row],
            trajectory=trajectory,
            conditions={name: value[row] for name, value in own.items()},
            shared_conditions=shared,
            guidance_scale=guidance_scale,
            weight_version=version,
            finish_reason="stop",
        )


def _trajectories(tape: Tape, final: NDArray[np.float32]) -> list[Trajectory]:
    steps = tape.steps

    def stacked(name: str) -> NDArray[np.float32]:
        """Stack a tensor of all K steps: [K, B, ...]."""
        if not steps:
            return np.zeros((0, *final.shape) if name != "log_prob" else (0, len(final)), np.float32)
        return torch.stack([getattr(step, name) for step in steps]).cpu().numpy()

    per_image = {field: stacked(name) for field, name in STACKED.items()}
    shared = {field: np.array([getattr(step, name) for step in steps], np.float32) for field, name in SCALARS.items()}
    indices = np.array([step.index for step in steps], np.int64)
    return [
        Trajectory(**{field: values[:, row] for field, values in per_image.items()}, **shared, steps=indices)
        for row in range(len(final))
    ]
