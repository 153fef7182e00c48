"""The page's gallery: images of held-out prompts by prompt and step, with their scores."""

import base64
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gcore_runs.errors import UserError
from gcore_runs.report.panels import amount
from gcore_runs.report.run import Row
from gcore_runs.run_folder import read_jsonl

MAX_STEPS = 8
"""Most evaluations shown: the first, the last, and others at equal distances."""
MAX_BYTES = 6 * 2**20
"""Most bytes of images in the page; in base64 they take a third more. Prompts that no longer fit are left out."""
_SMALL = 64
"""Pixels of images, in width, up to which they are shown pixel by pixel."""
_KEYS = {"prompt", "file", "columns", "width", "height", "scores"}


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """The prompts that are shown, with a sheet of images for each step, and how many there are in all."""

    prompts: list[tuple[str, list[Row]]]
    num_prompts: int
    steps: list[int]
    num_steps: int

    @property
    def seen(self) -> str:
        """The caption."""
        counts = ((len(self.prompts), self.num_prompts, "prompts"), (len(self.steps), self.num_steps, "evaluations"))
        parts = [f"{shown} of {found} {name} are shown" for shown, found, name in counts if shown < found]
        return f"{', '.join(parts)}; the others are in samples/." if parts else ""


def read_gallery(samples: Path, notes: list[str]) -> Gallery | None:
    """Return the gallery of the folders `step-*` in ``samples``; None: there is none. What is unreadable is noted."""
    folders = {int(folder.name.removeprefix("step-")): folder for folder in samples.glob("step-*/")}
    places = np.linspace(0, len(folders) - 1, min(len(folders), MAX_STEPS)).round().astype(int)
    steps: list[int] = np.array(sorted(folders))[places].tolist() if folders else []
    by_prompt: dict[tuple[str, str], list[Row]] = {}
    for step in steps:
        rows = folders[step] / "prompts.jsonl"
        try:
            for row in read_jsonl(rows):
                if row.keys() >= _KEYS:
                    # The file's name says which of several equal prompts it is.
                    by_prompt.setdefault((row["file"], row["prompt"]), []).append(_shown(step, folders[step], row))
        except (UserError, OSError, TypeError, ValueError) as error:
            notes.append(f"{rows.relative_to(samples.parent)} could not be read, and is left out ({error}).")
    prompts: list[tuple[str, list[Row]]] = []
    left = MAX_BYTES
    for (_, prompt), sheets in by_prompt.items():
        left -= sum(sheet["size"] for sheet in sheets)
        if left < 0:
            break
        prompts.append((prompt, sheets))
    if not prompts:
        return None
    return Gallery(prompts=prompts, num_prompts=len(by_prompt), steps=steps, num_steps=len(folders))


def _shown(step: int, folder: Path, row: Row) -> Row:
    content = (folder / Path(row["file"]).name).read_bytes()
    scores: dict[str, list[float]] = row["scores"]
    of_images = list(zip(*scores.values(), strict=True))
    columns, width, height = (int(row[name]) for name in ("columns", "width", "height"))
    rows = -(-len(of_images) // columns)
    return {
        "step": step,
        "size": len(content),
        "base64": base64.b64encode(content).decode(),
        "names": ", ".join(scores),
        "means": ", ".join(f"{name} {amount(statistics.fmean(own))}" for name, own in scores.items()),
        "images": [(_place(*divmod(i, columns), rows, columns), map(amount, own)) for i, own in enumerate(of_images)],
        "columns": columns,
        "rows": rows,
        "ratio": round(width / columns / (height / rows), 4),
        "is_small": width / columns <= _SMALL,
    }


def _place(row: int, column: int, rows: int, columns: int) -> str:
    """Return the position of an image in its sheet, as that of a background in CSS."""
    return f"{100 * column / max(1, columns - 1):.4g}% {100 * row / max(1, rows - 1):.4g}%"
