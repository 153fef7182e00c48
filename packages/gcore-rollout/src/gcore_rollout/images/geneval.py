"""GenEval's score: the objects in an image, their number, colours and positions, as a detector finds them."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import compress, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.detection import Box, Detected, ObjectDetector
from gcore_rollout.images.models import embed_images, load_clip
from gcore_rollout.images.reward import Images, Rows, import_pillow

Objects = Mapping[str, Sequence[Box]]
"""Boxes by class, the surest first."""

_Masks = Mapping[Box, NDArray[np.bool_]]
"""Pixels [H, W] of objects, by their boxes."""
_NameColours = Callable[[NDArray[np.uint8], _Masks, str, Sequence[Box]], list[str]]
"""Returns the colour of each box of a class in an image."""

_GREY = 0x99
_COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
_TEMPLATES = ("a photo of a {} {}", "a photo of a {}-colored {}", "a photo of a {} object")
_POSITIONS = ("left of", "right of", "above", "below")
_MAX_OBJECTS = 16
"""Objects of a class that count, the surest ones."""
_POSITION_THRESHOLD = 0.1
"""Share of two boxes' added sizes by which their centres may differ without a position to each other."""
_OTHER_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
"""GenEval's names of classes that detectors call otherwise."""


class GenEvalReward:
    """GenEval's score of images (arXiv 2310.11513), by the rules of its row: the columns of GenEval's metadata.

    ``include`` lists clauses with a ``class``, a ``count``, and optionally a ``color`` or a ``position``, such as
    ``["left of", 0]``: of the objects of clause 0. ``exclude`` lists classes of which there are fewer than ``count``.
    A ``tag`` "counting" asks for surer objects.

    The score is that of Flow-GRPO (arXiv 2505.05470), the mean over what the clauses ask for: 1 - |N - count| / count
    for N objects, and for N of the colour; 1 for the position, and 0.5 for a wrong one. Parts: ``accuracy``, 1 if the
    image is right as in GenEval, where there may be more objects, and ``strict_accuracy``, 1 if the numbers are exact.

    ``path`` is a Hugging Face folder of a detector: of COCO's classes, such as GenEval's own, Mask2Former (Swin-S,
    instances), or DETR; or one that is given the names (zero-shot). ``clip`` is that of a CLIP model, which names the
    colours; GenEval's is ViT-L/14. ``thresholds`` are the confidence of objects, and of those to be counted, of
    GenEval's detector; zero-shot ones need much less.

    Example:
        >>> def score_images(folder, images, prompts, rows):
        ...     reward = GenEvalReward(folder, thresholds=(0.3, 0.9))
        ...     reward.check_prompts(prompts, rows)
        ...     return reward(images, prompts, rows)
        >>> row = {"include": [{"class": "cup", "count": 2}, {"class": "bowl", "count": 1, "position": ["left of", 0]}]}
        >>> objects = {"cup": [(20.0, 0.0, 28.0, 8.0), (20.0, 9.0, 28.0, 17.0)], "bowl": [(0.0, 0.0, 8.0, 8.0)]}
        >>> geneval_score(objects, row, lambda name, boxes: [])
        (1.0, True, True)
    """

    def __init__(
        self,
        path: str | Path,
        *,
        clip: str | Path = "",
        thresholds: tuple[float, float] = (0.3, 0.9),
        device: str = "cpu",
    ) -> None:
        self._detector = ObjectDetector(path, device=device)
        self._colours = _make_colour_namer(clip, device) if clip else None
        self._thresholds = thresholds

    def check_prompts(self, prompts: Sequence[str], rows: Rows) -> None:
        """Raise `RewardConfigError` for a row that is not GenEval's, or asks for a class or colour that is unknown."""
        classes = {self._name(label) for label in self._detector.labels.values()}
        for prompt, row in zip(prompts, rows, strict=True):
            for clause in _clauses(prompt, row):
                if classes and clause["class"] not in classes:
                    raise RewardConfigError(
                        f"the row of {prompt!r:.100} has the class {clause['class']!r}; expected one that the detector "
                        f"knows: {', '.join(sorted(classes))[:500]}"
                    )
                if clause.get("color") and self._colours is None:
                    expected = "a CLIP model in reward.head, which names colours"
                    raise RewardConfigError(
                        f"the row of {prompt!r:.100} has a color; expected {expected}"
                    )

    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Rows
    ) -> tuple[list[float], dict[str, list[bool]]]:
        """Return scores [B] and their parts [B]."""
        self.check_prompts(prompts, rows)
        results: list[tuple[float, bool, bool]] = []
        for image, (objects, masks), row in zip(
            images, self._detect(images, rows), rows, strict=True
        ):
            colours = cache(partial(self._name_colours, image, masks))
            results.append(geneval_score(objects, row, colours))
        scores, accuracy, strict_accuracy = zip(*results, strict=True)
        return list(scores), {"accuracy": list(accuracy), "strict_accuracy": list(strict_accuracy)}

    def detect(self, images: Images, rows: Rows) -> list[Objects]:
        """Return the objects in each image."""
        return [objects for objects, _ in self._detect(images, rows)]

    def _detect(self, images: Images, rows: Rows) -> list[tuple[Objects, _Masks]]:
        """Return the objects in each image, and their masks."""
        # Images whose rows ask for the same go to the detector together; of a group these are all.
        together = defaultdict[tuple[tuple[str, ...], float], list[int]](list)
        for i, row in enumerate(rows):
            threshold = self._thresholds[row.get("tag") == "counting"]
            together[self._names(row), threshold].append(i)
        by_index: dict[int, tuple[Objects, _Masks]] = {}
        for (names, threshold), indices in together.items():
            detected = self._detector(
                [images[i] for i in indices], names=names, threshold=threshold
            )
            by_index |= zip(indices, map(self._by_class, detected), strict=True)
        return [by_index[i] for i in range(len(images))]

    def _names(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names that the detector has to be given."""
        if not self._detector.is_zero_shot:
            return ()
        return tuple(sorted({clause["class"] for clause in _clauses("", row)}))

    def _by_class(self, detected: Sequence[Detected]) -> tuple[Objects, _Masks]:
        objects = defaultdict[str, list[Box]](list)
        masks: dict[Box, NDArray[np.bool_]] = {}
        for item in detected:
            boxes = objects[self._name(item.label)]
            if len(boxes) < _MAX_OBJECTS:
                boxes.append(item.box)
            if item.mask is not None:
                masks[item.box] = item.mask
        return dict(objects), masks

    def _name(self, label: str) -> str:
        """Return GenEval's name of a detector's class."""
        if self._detector.is_zero_shot:
            return label
        return _OTHER_NAMES.get(label, label)

    def _name_colours(
        self, image: NDArray[np.uint8], masks: _Masks, name: str, boxes: tuple[Box, ...]
    ) -> list[str]:
        assert self._colours is not None
        return self._colours(image, masks, name, boxes)


def geneval_score(
    objects: Objects, row: Mapping[str, Any], colours: Callable[[str, tuple[Box, ...]], list[str]]
) -> tuple[float, bool, bool]:
    """Return the score, and whether the image is right, and right with exact numbers; see `GenEvalReward`.

    ``colours`` returns the colour of each of some objects of a class.
    """
    values, is_exact = _compare(objects, row, colours)
    _, is_right = _compare(objects, row, colours, are_more_allowed=True)
    is_excluded = any(
        len(objects.get(c["class"], ())) >= c["count"] for c in row.get("exclude") or ()
    )
    return float(np.mean(values)), is_right and not is_excluded, is_exact


def _compare(
    objects: Objects,
    row: Mapping[str, Any],
    colours: Callable[[str, tuple[Box, ...]], list[str]],
    *,
    are_more_allowed: bool = False,
) -> tuple[list[float], bool]:
    """Return the values whose mean is the score, and whether all clauses hold, for the surest objects or for all."""
    values: list[float] = []
    matched: list[Sequence[Box] | None] = []
    for clause in row["include"]:
        name = clause["class"]
        count = clause["count"]
        colour = clause.get("color")
        position = clause.get("position")
        boxes = tuple(objects.get(name, ()))
        if are_more_allowed:
            boxes = boxes[:count]
        values.append(1 - abs(count - len(boxes)) / count)
        holds = len(boxes) == count
        if not holds and (colour or position):
            values.append(0.0)
        if holds and colour:
            hits = colours(name, boxes).count(colour)
            values.append(1 - abs(count - hits) / count)
            holds = hits == count
        if holds and position:
            reference = matched[position[1]]
            pairs = product(boxes, reference or ())
            holds = reference is not None and all(
                position[0] in relative_positions(a, b) for a, b in pairs
            )
            if not holds:
                values.append(0.0)
            # As published: 1 follows the 0 of a wrong position.
            if reference is not None:
                values.append(1.0)
        matched.append(boxes if holds else None)
    return values, None not in matched


def relative_positions(box: Box, other: Box) -> set[str]:
    """Return the positions of a box to another one: those in whose direction its centre is, by GenEval's rule."""
    a = np.reshape(box, (2, 2))
    b = np.reshape(other, (2, 2))
    offset = a.mean(0) - b.mean(0)
    sizes = np.abs(a[1] - a[0]) + np.abs(b[1] - b[0])
    reduced = np.maximum(np.abs(offset) - _POSITION_THRESHOLD * sizes, 0) * np.sign(offset)
    if np.abs(reduced).max() < 1e-3:
        return set()
    x, y = reduced / np.linalg.norm(offset)
    return set(compress(_POSITIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5)))


def _make_colour_namer(path: str | Path, device: str) -> _NameColours:
    """Return a function that names the colours of objects: the likeliest of GenEval's ten to a CLIP model.

    It sees the pixels of each box; those around the object's mask, if it has one, are grey.
    """
    from transformers import AutoTokenizer

    pillow = import_pillow()
    model, processor = load_clip(path, device)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)

    @cache
    def embed_colours(name: str) -> torch.Tensor:
        """Return the mean of each colour's texts, of length 1, [colours, width]."""
        texts = [
            template.format(colour, name) for colour, template in product(_COLOURS, _TEMPLATES)
        ]
        tokens = tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(device)
        embeddings = model.text_projection(model.text_model(**tokens).pooler_output)
        unit = torch.nn.functional.normalize(embeddings, dim=-1)
        means = unit.view(len(_COLOURS), len(_TEMPLATES), -1).mean(1)
        return torch.nn.functional.normalize(means, dim=-1)

    @torch.no_grad()
    def name_colours(
        image: NDArray[np.uint8], masks: _Masks, name: str, boxes: Sequence[Box]
    ) -> list[str]:
        """Return the colour of each box."""
        crops: list[Any] = []
        for left, top, right, bottom in boxes:
            mask = masks.get((left, top, right, bottom))
            picture = image
            if mask is not None:
                picture = np.where(mask[..., None], image, np.uint8(_GREY))
            box = (left, top, max(right, left + 1), max(bottom, top + 1))
            crops.append(pillow.fromarray(picture).crop(box))
        embeddings = embed_images(model, processor, crops, device)
        return [_COLOURS[i] for i in (embeddings @ embed_colours(name).T).argmax(1).tolist()]

    return name_colours


def _clauses(prompt: str, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the clauses of a row, included and excluded; `RewardConfigError` if they are not GenEval's."""
    included = list[Any](row.get("include") or ())
    excluded = list[Any](row.get("exclude") or ())
    for index, clause in enumerate((included or [None]) + excluded):
        if not _is_clause(clause, index):
            value = f"the clause {clause!r:.200}" if included else "no include"
            raise RewardConfigError(
                f"the row of {prompt!r:.100} has {value}; expected include: a list of class, count "
                f"of 1 or more, and optionally color ({', '.join(_COLOURS)}) or position ([{' | '.join(_POSITIONS)}, "
                "number of an earlier clause])"
            )
    return included + excluded


def _is_clause(clause: Any, index: int) -> bool:
    match clause:
        case {"class": str(), "count": int(count)} if (
            count >= 1 and (clause.get("color") or "red") in _COLOURS
        ):
            match clause.get("position"):
                case None:
                    return True
                case [position, int(reference)]:
                    return position in _POSITIONS and 0 <= reference < index
                case _:
                    return False
        case _:
            return False
