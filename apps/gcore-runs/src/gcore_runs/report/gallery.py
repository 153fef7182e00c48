"""The page's gallery: images of held-out prompts by prompt and step, with their scores."""

import base64
import statistics
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


def read_gallery(samples: Path, notes: list[str]) -> Row | None:
    """Return the gallery of the folders `step-*` in ``samples``; None: there is none. What is unreadable is noted.

    It has the ``prompts`` that are shown, each with a sheet of images for each step, and a caption, ``seen``.
    """
    folders = {int(folder.name.removeprefix("step-")): folder for folder in samples.glob("step-*/")}
    if not folders:
        return None
    indices = np.linspace(0, len(folders) - 1, min(len(folders), MAX_STEPS)).round().astype(int)
    steps: list[int] = np.array(sorted(folders))[indices].tolist()
    by_prompt: dict[tuple[str, str], list[Row]] = {}
    for step in steps:
        rows = folders[step] / "prompts.jsonl"
        try:
            for row in read_jsonl(rows):
                if row.keys() >= _KEYS:
                    # The file's name says which of several equal prompts it is.
                    by_prompt.setdefault((row["file"], row["prompt"]), []).append(
                        _sheet(step, folders[step], row)
                    )
        except (UserError, OSError, TypeError, ValueError) as error:
            notes.append(
                f"{rows.relative_to(samples.parent)} could not be read, and is left out ({error})."
            )
    prompts: list[tuple[str, list[Row]]] = []
    num_bytes = 0
    for (_, prompt), sheets in by_prompt.items():
        num_bytes += sum(sheet["size"] for sheet in sheets)
        if num_bytes > MAX_BYTES:
            break
        prompts.append((prompt, sheets))
    if not prompts:
        return None
    left_out: list[str] = []
    if len(prompts) < len(by_prompt):
        left_out.append(f"{len(prompts)} of {len(by_prompt)} prompts are shown")
    if len(steps) < len(folders):
        left_out.append(f"{len(steps)} of {len(folders)} evaluations are shown")
    caption = f"{', '.join(left_out)}; the others are in samples/." if left_out else ""
    return {"prompts": prompts, "seen": caption}


def _sheet(step: int, folder: Path, row: Row) -> Row:
    """Return the images of a prompt at a step, with their positions in the sheet and their scores."""
    content = (folder / Path(row["file"]).name).read_bytes()
    scores: dict[str, list[float]] = row["scores"]
    columns = int(row["columns"])
    width = int(row["width"])
    height = int(row["height"])
    image_scores = list(zip(*scores.values(), strict=True))
    rows = -(-len(image_scores) // columns)
    images: list[tuple[str, list[str]]] = []
    for index, values in enumerate(image_scores):
        row_index, column = divmod(index, columns)
        # As that of a background in CSS.
        position = (
            f"{100 * column / max(1, columns - 1):.4g}% {100 * row_index / max(1, rows - 1):.4g}%"
        )
        images.append((position, list(map(amount, values))))
    return {
        "step": step,
        "size": len(content),
        "base64": base64.b64encode(content).decode(),
        "names": ", ".join(scores),
        "means": ", ".join(
            f"{name} {amount(statistics.fmean(values))}" for name, values in scores.items()
        ),
        "images": images,
        "columns": columns,
        "rows": rows,
        "ratio": round(width / columns / (height / rows), 4),
        "is_small": width / columns <= _SMALL,
    }
