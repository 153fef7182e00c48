"""A run's metrics and images for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

from gcore_runs.trackers.base import Images, Tracker


class TensorBoard(Tracker):
    """Event files in a folder; what others there have of the steps after ``last_step`` is hidden."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)

    def write_images(self, step: int, images: Images) -> None:
        for name, image in images.items():
            self._board.add_image(name, image, step, dataformats="HWC")

    def __exit__(self, *error: object) -> None:
        self._board.close()
