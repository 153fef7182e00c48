"""Score of the text that an image shows, as a model of transformers reads it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_rollout.errors import RewardConfigError, require
from gcore_rollout.images.models import report_folder_errors
from gcore_rollout.images.reward import Images, Rows, Scores

_MAX_TOKENS = 128
_QUOTED = re.compile(r'["“]([^"“”]*)["”]')


class OCRReward:
    """Similarity, from 0 to 1, of the text that a model reads in an image and the text that the prompt asks for.

    That of Flow-GRPO (arXiv 2505.05470, section 4.1): 1 - N / L, with N the edit distance and L the length of the
    wanted text, without spaces and case. 1 if the wanted text is within what was read, and 0 for distances above L.

    The text is the first in double quotes in the prompt, or the row's column ``text_key``. ``path`` is a Hugging Face
    folder of a model that turns an image into text without a question, with its processor: GOT-OCR2, which reads
    whole pictures, or TrOCR, which reads one line.

    Example:
        >>> def score_signs(folder, images):
        ...     reward = OCRReward(folder)
        ...     return reward(images, ['a sign that says "Open"'] * len(images), [{}] * len(images))
        >>> text_similarity("0pen", "Open")  # of what the model reads and what the prompt asks for
        0.75
    """

    def __init__(self, path: str | Path, *, text_key: str = "", device: str = "cpu") -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        with report_folder_errors(path, "a model that reads text in images"):
            model: Any = AutoModelForImageTextToText.from_pretrained(path, local_files_only=True)
            self._processor: Any = AutoProcessor.from_pretrained(path, local_files_only=True)
        has_both = hasattr(self._processor, "image_processor") and hasattr(
            self._processor, "tokenizer"
        )
        require("path", str(path), has_both, "a processor of images with a tokenizer in the folder")
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._text_key = text_key
        self._device = device

    def check_prompts(self, prompts: Sequence[str], rows: Rows) -> None:
        """Raise `RewardConfigError` for a prompt that does not say which text is wanted."""
        for prompt, row in zip(prompts, rows, strict=True):
            self._requested_text(prompt, row)

    def __call__(self, images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]."""
        requested = [
            self._requested_text(prompt, row) for prompt, row in zip(prompts, rows, strict=True)
        ]
        texts = zip(self.read(images), requested, strict=True)
        return np.array([text_similarity(read, text) for read, text in texts])

    @torch.no_grad()
    def read(self, images: Images) -> list[str]:
        """Return the text in each image."""
        inputs = self._processor(images=list(images), return_tensors="pt").to(self._device)
        ids = self._model.generate(**inputs, do_sample=False, max_new_tokens=_MAX_TOKENS)
        # A model with a decoder alone returns its prompt, too.
        if "input_ids" in inputs:
            ids = ids[:, inputs["input_ids"].shape[1] :]
        return self._processor.batch_decode(ids, skip_special_tokens=True)

    def _requested_text(self, prompt: str, row: Mapping[str, Any]) -> str:
        if self._text_key:
            text = row.get(self._text_key)
            expected = f"a row with a text in the column {self._text_key!r}"
        else:
            text = next(iter(_QUOTED.findall(prompt)), "")
            expected = "one with the wanted text in double quotes, or reward.text_key"
        if not isinstance(text, str) or not _plain(text):
            raise RewardConfigError(f"prompt is {prompt!r:.300}; expected {expected}")
        return text


def text_similarity(read: str, wanted: str) -> float:
    """Return 1 - min(N, L) / L; see `OCRReward`."""
    a = _plain(read)
    b = _plain(wanted)
    if b in a:
        return 1.0
    return 1 - min(_edit_distance(a, b), len(b)) / len(b)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()


def _edit_distance(a: str, b: str) -> int:
    """Return the Levenshtein distance: the fewest insertions, deletions and substitutions of a character."""
    row = list(range(len(b) + 1))
    for i, in_a in enumerate(a, start=1):
        diagonal = row[0]
        row[0] = i
        for j, in_b in enumerate(b, start=1):
            above = row[j]
            row[j] = min(above + 1, row[j - 1] + 1, diagonal + (in_a != in_b))
            diagonal = above
    return row[-1]
