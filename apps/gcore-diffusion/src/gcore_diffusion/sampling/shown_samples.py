"""Samples of training that the report and the trackers show."""

import base64
import heapq
from collections.abc import Sequence
from typing import Any

from gcore_diffusion.sampling.grids import thumbnail
from gcore_diffusion.sampling.image_sampling import ImageGroup


def samples_to_show(
    trained: Sequence[tuple[ImageGroup, Sequence[float] | None]], filtered: Sequence[ImageGroup], step: int, count: int
) -> list[tuple[int, dict[str, Any]]]:
    """Return ``count`` of a controller's images as rows of JSON, each with its number; see `Modality.samples`.

    The groups trained on come with the advantages of their images, if they have any. The numbers are random, and depend
    on nothing but the step and the image's place in the run. ``image`` is a small WebP in base64.
    """
    whole = [*((group, own, False) for group, own in trained), *((group, None, True) for group in filtered)]
    places = [
        (hash((step, group.prompt_index, i)), i, group, advantages[i] if advantages else None, is_filtered)
        for group, advantages, is_filtered in whole
        for i in range(len(group.samples))
    ]
    found: list[tuple[int, dict[str, Any]]] = []
    for number, i, group, advantage, is_filtered in heapq.nsmallest(count, places, key=lambda place: place[0]):
        row = {
            "prompt_index": group.prompt_index,
            "index": i,
            "is_filtered": is_filtered,
            "score": float(group.scores[i]),
            "parts": {name: float(value) for name, value in group.parts[i].items()},
            "advantage": None if advantage is None else round(advantage, 6),
            "prompt": group.prompt.text,
            "image": base64.b64encode(thumbnail(group.samples[i].image)).decode(),
        }
        found.append((number, row))
    return found
