"""The page's viewer of samples of training, by step."""

import json
from collections.abc import Sequence

import numpy as np

from gcore_runs.report.panels import amount
from gcore_runs.report.run import ReportedRun, Row, number

MAX_BYTES = 4 * 2**20
"""Most bytes of samples in the page, as JSON; of longer runs every second or n-th step is shown."""
MAX_TEXT_CHARS = 2000
_TEXTS = "prompt", "response"


def training_samples(run: ReportedRun) -> Row | None:
    """Return the samples of training that are shown, ``by_step``, and a caption, ``seen``; None: none is recorded."""
    # Scores of images are of any scale.
    verified = run.kind.has_samples and are_verified(run.training_samples)
    by_step: dict[int, list[Row]] = {}
    for row in run.training_samples:
        by_step.setdefault(row["step"], []).append(_show(row, verified=verified))
    if not by_step:
        return None
    steps = sorted(by_step)
    num_characters = sum(len(json.dumps(rows)) for rows in by_step.values())
    count = max(1, min(len(steps), int(len(steps) * MAX_BYTES / num_characters)))
    chosen: list[int] = np.array(steps)[
        np.linspace(0, len(steps) - 1, count).round().astype(int)
    ].tolist()
    seen = f"{len(run.training_samples):,} random samples of {len(steps):,} steps, filtered ones included"
    if count < len(steps):
        seen += f"; {count:,} of the steps are shown, the others are in samples.jsonl"
    return {"by_step": [(step, by_step[step]) for step in chosen], "seen": seen}


def _show(row: Row, *, verified: bool) -> Row:
    """Return what the page shows of a sample: its texts or image, its verdict, and its numbers by name."""
    score = number(row.get("score"))
    facts = [("score", "none" if score is None else amount(score))]
    parts = row.get("parts")
    if isinstance(parts, dict):
        facts.extend((str(name), _text(value)) for name, value in parts.items())
    advantage = number(row.get("advantage"))
    if advantage is not None:
        facts.append(("advantage", f"{advantage:+.3g}"))
    version = row.get("weight_version")
    oldest = row.get("oldest_version")
    if version is not None:
        facts.append(
            (
                "weights of step",
                f"{oldest}-{version}" if oldest not in (None, version) else str(version),
            )
        )
    if "response_tokens" in row:
        facts.append(("tokens", f"{row.get('prompt_tokens')} + {row['response_tokens']}"))
    if "stop" in row:
        facts.append(("ended by", str(row["stop"])))
    sample: Row = {name: clip(row[name]) for name in _TEXTS if name in row}
    image = row.get("image")
    if isinstance(image, str):
        sample["image"] = image
    if "pieces" in row:
        sample["pieces"] = _show_pieces(row["pieces"])
    sample["filtered"] = bool(row.get("is_filtered"))
    sample["verdict"] = verdict(score, verified=verified)
    sample["facts"] = facts
    return sample


def _show_pieces(pieces: Sequence[Row]) -> list[Row]:
    """Return what the page shows of the pieces of a conversation that may branch.

    ``title`` says who wrote a piece. ``fork`` says what it follows if that is not the piece before it, and ``depth``
    how many branches it is inside of.
    """
    depths: list[int] = []
    shown: list[Row] = []
    for place, piece in enumerate(pieces):
        parent = int(piece["parent"])
        title = "given"
        if piece["is_sampled"]:
            title = f"sampled by the weights of step {piece['version']}"
        for name in ("agent", "credit", "advantage"):
            if name in piece:
                title += f", {name} {_text(piece[name])}"
        fork = ""
        depth = 0
        if parent == -2:
            fork = "a conversation of its own"
        elif place > 0 and parent != place - 1:
            fork = f"branch after piece {parent + 1}" if parent >= 0 else "branch after the prompt"
            depth = 1
        if parent >= 0:
            depth += depths[parent]
        depths.append(depth)
        shown.append(
            {
                "text": clip(piece["text"]),
                "name": "sampled" if piece["is_sampled"] else "given",
                "title": f"piece {place + 1}, {title}",
                "fork": fork,
                "depth": depth,
            }
        )
    return shown


def are_verified(rows: Sequence[Row]) -> bool:
    """Return whether all samples have a score in [-1, 1], as of a reward that checks answers."""
    scores = [number(row.get("score")) for row in rows]
    return all(score is not None and -1 <= score <= 1 for score in scores)


def verdict(score: float | None, *, verified: bool) -> str:
    """Return right, wrong or partly if scores are ``verified``, in [-1, 1] with 1 for right; otherwise scored."""
    if not verified or score is None:
        return "scored"
    if score >= 1:
        return "right"
    return "wrong" if score <= 0 else "partly"


def clip(value: object) -> str:
    """Return a text that is not too long for the page, of anything that JSON can hold."""
    text = value if isinstance(value, str) else json.dumps(value)
    left_out = len(text) - MAX_TEXT_CHARS
    if left_out <= 0:
        return text
    return f"{text[:MAX_TEXT_CHARS]} … {left_out:,} more characters"


def _text(value: object) -> str:
    as_number = number(value)
    return str(value) if as_number is None else amount(as_number)
