"""The interface of a tracker, and the one that every run may have without an extra."""

import base64
import io
import json
import logging
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Images = Mapping[str, NDArray[np.uint8]]
"""Images [H, W, 3], by name."""

Rows = Sequence[Mapping[str, Any]]
"""Samples of training, as the lines of samples.jsonl."""
_LEFT_OUT = ("image", "pieces")
"""Fields of samples that are no text of their own: images are shown as such, and pieces are those of the response."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers show it."""

    project: str
    name: str
    run_id: str
    """Distinguishes it from others of its name, and is the same after it was resumed."""
    folder: Path
    config: Mapping[str, Any]


class Tracker(AbstractContextManager[Any]):
    """Gets every metric of a run, until it is closed."""

    keeps_history: ClassVar[bool] = True
    """Whether it would show a value twice that is written again for the same step."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show some metrics of a step."""

    def write_images(self, step: int, images: Images) -> None:
        """Show images of a step, where the tracker can."""
        del step, images

    def write_samples(self, step: int, samples: Rows) -> None:
        """Show samples of training of a step, where the tracker can."""
        del step, samples


class TensorBoard(Tracker):
    """Event files in a folder; what others there have of the steps after ``last_step`` is hidden."""

    keeps_history = False

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def write_images(self, step: int, images: Images) -> None:
        for name, image in images.items():
            self._board.add_image(name, image, step, dataformats="HWC")

    def write_samples(self, step: int, samples: Rows) -> None:
        for index, sample in enumerate(samples):
            self._board.add_text(f"samples/{index}", f"<pre>{escape(as_text(sample))}</pre>", step)

    def __exit__(self, *error: object) -> None:
        self._board.close()


def images_of(samples: Rows) -> Images:
    """Return the images that samples have, as encoded files in base64."""
    encoded = {
        f"samples/{index}": sample["image"]
        for index, sample in enumerate(samples)
        if "image" in sample
    }
    if not encoded:
        return {}
    from PIL import Image

    images: dict[str, NDArray[np.uint8]] = {}
    for name, content in encoded.items():
        image = Image.open(io.BytesIO(base64.b64decode(content)))
        images[name] = np.asarray(image.convert("RGB"))
    return images


def as_table(samples: Rows) -> tuple[list[str], list[list[str | float | None]]]:
    """Return the columns of samples, and a row for each; what is no text or number is JSON."""
    columns = [
        name for name in dict.fromkeys(chain.from_iterable(samples)) if name not in _LEFT_OUT
    ]
    return columns, [[_as_cell(sample.get(name)) for name in columns] for sample in samples]


def _as_cell(value: Any) -> str | float | None:
    if value is None or isinstance(value, str | float):
        return value
    return json.dumps(value)


def as_text(sample: Mapping[str, Any]) -> str:
    """Return a sample as text: its texts last, each under its name."""
    lines: list[str] = []
    texts: list[str] = []
    for name, value in sample.items():
        if name in _LEFT_OUT:
            continue
        if not isinstance(value, str):
            lines.append(f"{name}: {json.dumps(value)}")
        else:
            texts.append(f"\n--- {name} ---\n{value}")
    return "\n".join(lines + texts)


@contextmanager
def logged_output() -> Generator[None]:
    """Log what a library prints inside the block: the terminal shows the run's progress."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, map(str.strip, printed.getvalue().splitlines())):
            _logger.info("%s", line)
