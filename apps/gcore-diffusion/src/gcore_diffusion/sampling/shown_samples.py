"""Samples of training that the report and the trackers show."""

import base64
import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from gcore_diffusion.sampling.grids import thumbnail
from gcore_diffusion.sampling.image_sampling import ImageGroup


def samples_to_show(
    trained: Sequence[tuple[ImageGroup, Sequence[float] | None]],
    filtered: Sequence[ImageGroup],
    step: int,
    count: int,
) -> list[tuple[int, dict[str, Any]]]:
    """Return ``count`` of a controller's images as rows of JSON, each with its number; see `Modality.samples`.

    The groups trained on come with the advantages of their images, if they have any. The numbers are random, and depend
    on nothing but the step and the image's place in the run. ``image``, if it was decoded, is a small WebP in base64.
    """
    candidates: list[tuple[int, int, ImageGroup, Sequence[float] | None, bool]] = []
    filtered_groups = [(group, None) for group in filtered]
    for is_filtered, groups in ((False, trained), (True, filtered_groups)):
        for group, advantages in groups:
            for index in range(len(group.samples)):
                number = hash((step, group.prompt_index, index))
                candidates.append((number, index, group, advantages, is_filtered))
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, index, group, advantages, is_filtered in heapq.nsmallest(
        count, candidates, key=itemgetter(0)
    ):
        row = {
            "prompt_index": group.prompt_index,
            "index": index,
            "is_filtered": is_filtered,
            "score": float(group.scores[index]),
            "parts": {name: float(value) for name, value in group.parts[index].items()},
            "advantage": round(advantages[index], 6) if advantages else None,
            "prompt": group.prompt.text,
        }
        image = group.samples[index].image
        if image.size:
            row["image"] = base64.b64encode(thumbnail(image)).decode()
        rows.append((number, row))
    return rows
