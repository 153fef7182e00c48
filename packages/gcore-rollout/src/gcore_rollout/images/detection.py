"""Objects in images, by a detector of transformers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.images.models import report_folder_errors

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

        with report_folder_errors(path, "an object detector"):
            config: Any = hf.AutoConfig.from_pretrained(path, local_files_only=True)
            self.is_zero_shot = type(config) in hf.MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING
            self._has_masks = type(config) in hf.MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING
            processor: Any = hf.AutoImageProcessor
            model_class: Any = hf.AutoModelForObjectDetection
            if self.is_zero_shot:
                processor = hf.AutoProcessor
                model_class = hf.AutoModelForZeroShotObjectDetection
            elif self._has_masks:
                model_class = hf.AutoModelForUniversalSegmentation
            model: Any = model_class.from_pretrained(path, local_files_only=True)
            self._processor: Any = processor.from_pretrained(path, local_files_only=True)
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
        objects: list[list[Detected]] = []
        for start in range(0, len(images), _BATCH):
            batch = list(images[start : start + _BATCH])
            texts: dict[str, list[list[str]]] = {}
            if self.is_zero_shot:
                texts["text"] = [list(names)] * len(batch)
            inputs = self._processor(images=batch, **texts, return_tensors="pt").to(self._device)
            options: dict[str, Any] = {
                "threshold": threshold,
                "target_sizes": [image.shape[:2] for image in batch],
            }
            for detected in self._read_outputs(self._model(**inputs), options, texts):
                surest = [o for o in detected if o.score > threshold]
                surest.sort(key=lambda o: -o.score)
                objects.append(surest)
        return objects

    def _read_outputs(
        self, outputs: Any, options: Mapping[str, Any], texts: Mapping[str, list[list[str]]]
    ) -> list[list[Detected]]:
        if self._has_masks:
            results = self._processor.post_process_instance_segmentation(
                outputs, return_binary_maps=True, **options
            )
            return [self._read_segments(result) for result in results]
        if self.is_zero_shot:
            post = self._processor.post_process_grounded_object_detection
            results = post(outputs, text_labels=texts["text"], **options)
        else:
            results = self._processor.post_process_object_detection(outputs, **options)
        objects: list[list[Detected]] = []
        for result in results:
            labels = (
                result["text_labels"]
                if self.is_zero_shot
                else map(self.labels.get, result["labels"].tolist())
            )
            rows = zip(result["scores"].tolist(), labels, result["boxes"].tolist(), strict=True)
            objects.append([Detected(score, str(label), tuple(box)) for score, label, box in rows])
        return objects

    def _read_segments(self, result: Mapping[str, Any]) -> list[Detected]:
        """Return the objects of an image's masks, whose boxes are around their pixels."""
        objects: list[Detected] = []
        for info in result["segments_info"]:
            mask: NDArray[np.bool_] = result["segmentation"][info["id"]].cpu().numpy() > 0
            x = np.flatnonzero(mask.any(0))
            y = np.flatnonzero(mask.any(1))
            box = (float(x[0]), float(y[0]), float(x[-1] + 1), float(y[-1] + 1))
            objects.append(Detected(info["score"], self.labels[info["label_id"]], box, mask))
        return objects
