"""Objects in images, by a detector of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError, require

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""

_BATCH = 8
"""Images that a detector sees at once."""


class Detected(NamedTuple):
    """An object in an image."""

    score: float
    """Confidence, from 0 to 1."""
    label: str
    box: Box
    mask: NDArray[np.bool_] | None = None
    """Its pixels [H, W]; None: the detector finds boxes alone."""


class ObjectDetector:
    """A Hugging Face folder of a detector, of instances (with masks), or one that is given the names (zero-shot)."""

    def __init__(self, path: str | Path, *, device: str = "cpu") -> None:
        import transformers as hf

        has_config = (Path(path) / "config.json").is_file()
        require("path", str(path), has_config, "a Hugging Face folder of an object detector")
        try:
            config: Any = hf.AutoConfig.from_pretrained(path, local_files_only=True)
            self.is_zero_shot = type(config) in hf.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING
            self._has_masks = type(config) in hf.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING
            if self.is_zero_shot:
                kind, processor = hf.AutoModelForZeroShotObjectDetection, hf.AutoProcessor
            else:
                kind = hf.AutoModelForUniversalSegmentation if self._has_masks else hf.AutoModelForObjectDetection
                processor = hf.AutoImageProcessor
            model: Any = kind.from_pretrained(path, local_files_only=True)
            self._processor: Any = processor.from_pretrained(path, local_files_only=True)
        except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
            raise RewardConfigError(f"path is {str(path)!r}: {str(error).strip().splitlines()[0]:.300}") from None
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._device = device
        self.labels: Mapping[int, str] = {} if self.is_zero_shot else config.id2label

    @torch.no_grad()
    def __call__(
        self, images: Sequence[NDArray[np.uint8]], *, names: Sequence[str] = (), threshold: float
    ) -> list[list[Detected]]:
        """Return the objects of a higher score than ``threshold`` in each image, the surest first.

        ``names`` are the labels that a zero-shot detector looks for.
        """
        found: list[list[Detected]] = []
        for start in range(0, len(images), _BATCH):
            batch = list(images[start : start + _BATCH])
            texts = {"text": [list(names)] * len(batch)} if self.is_zero_shot else {}
            inputs = self._processor(images=batch, **texts, return_tensors="pt").to(self._device)
            options: dict[str, Any] = {"threshold": threshold, "target_sizes": [image.shape[:2] for image in batch]}
            found += self._results(self._model(**inputs), options, texts)
        return [sorted((one for one in own if one.score > threshold), key=lambda one: -one.score) for own in found]

    def _results(
        self, outputs: Any, options: Mapping[str, Any], texts: Mapping[str, list[list[str]]]
    ) -> list[list[Detected]]:
        if self._has_masks:
            found = self._processor.post_process_instance_segmentation(outputs, return_binary_maps=True, **options)
            return [self._of_segments(result) for result in found]
        if self.is_zero_shot:
            post = self._processor.post_process_grounded_object_detection
            found = post(outputs, text_labels=texts["text"], **options)
        else:
            found = self._processor.post_process_object_detection(outputs, **options)
        objects: list[list[Detected]] = []
        for result in found:
            labels = result["text_labels"] if self.is_zero_shot else map(self.labels.get, result["labels"].tolist())
            own = zip(result["scores"].tolist(), labels, result["boxes"].tolist(), strict=True)
            objects.append([Detected(score, str(label), tuple(box)) for score, label, box in own])
        return objects

    def _of_segments(self, result: Mapping[str, Any]) -> list[Detected]:
        """Return the objects of an image's masks, whose boxes are around their pixels."""
        found: list[Detected] = []
        for info in result["segments_info"]:
            mask: NDArray[np.bool_] = result["segmentation"][info["id"]].cpu().numpy() > 0
            y, x = (np.flatnonzero(mask.any(axis)) for axis in (1, 0))
            box = float(x[0]), float(y[0]), float(x[-1] + 1), float(y[-1] + 1)
            found.append(Detected(info["score"], self.labels[info["label_id"]], box, mask))
        return found
