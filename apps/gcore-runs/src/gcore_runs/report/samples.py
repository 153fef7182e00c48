"""The page's viewer of samples of training, by step."""

import json
from dataclasses import dataclass

import numpy as np

from gcore_runs.report.panels import amount
from gcore_runs.report.run import Row, Run, number

MAX_BYTES = 4 * 2**20
"""Most bytes of samples in the page, as JSON; of longer runs every second or n-th step is shown."""
MAX_TEXT_CHARS = 2000
_TEXTS = "prompt", "response"


@dataclass(frozen=True, kw_only=True)
class SampleViewer:
    """The samples that are shown, by step."""

    by_step: list[tuple[int, list[Row]]]
    seen: str
    """The caption."""


def training_samples(run: Run) -> SampleViewer | None:
    """Return the samples of training; None: none is recorded."""
    scores = [number(row.get("score")) for row in run.training_samples]
    # Scores of images are of any scale.
    verified = run.kind.has_samples and all(score is not None and -1 <= score <= 1 for score in scores)
    found: dict[int, list[Row]] = {}
    for row in run.training_samples:
        found.setdefault(row["step"], []).append(_shown(row, verified=verified))
    if not found:
        return None
    steps = sorted(found)
    sizes = sum(len(json.dumps(rows)) for rows in found.values())
    count = max(1, min(len(steps), int(len(steps) * MAX_BYTES / sizes)))
    chosen: list[int] = np.array(steps)[np.linspace(0, len(steps) - 1, count).round().astype(int)].tolist()
    seen = f"{sum(map(len, found.values())):,} random samples of {len(steps):,} steps, filtered ones included"
    if count < len(steps):
        seen += f"; {count:,} of the steps are shown, the others are in samples.jsonl"
    return SampleViewer(by_step=[(step, found[step]) for step in chosen], seen=seen)


def _shown(row: Row, *, verified: bool) -> Row:
    """Return what the page shows of a sample: its texts or image, its verdict, and its numbers by name."""
    score = number(row.get("score"))
    facts = [("score", "none" if score is None else amount(score))]
    parts = row.get("parts")
    for name, value in parts.items() if isinstance(parts, dict) else ():
        facts.append((str(name), _text(value)))
    if (advantage := number(row.get("advantage"))) is not None:
        facts.append(("advantage", f"{advantage:+.3g}"))
    version = row.get("weight_version")
    oldest = row.get("oldest_version")
    if version is not None:
        facts.append(("weights of step", f"{oldest}-{version}" if oldest not in (None, version) else str(version)))
    if "response_tokens" in row:
        facts.append(("tokens", f"{row.get('prompt_tokens')} + {row['response_tokens']}"))
    if "stop" in row:
        facts.append(("ended by", str(row["stop"])))
    texts = {name: clipped(row[name]) for name in _TEXTS if name in row}
    image = row.get("image")
    return {
        **texts,
        **({"image": image} if isinstance(image, str) else {}),
        "filtered": bool(row.get("is_filtered")),
        "verdict": verdict(score, verified=verified),
        "facts": facts,
    }


def verdict(score: float | None, *, verified: bool) -> str:
    """Return right, wrong or partly if scores are ``verified``, in [-1, 1] with 1 for right; otherwise scored."""
    if not verified or score is None:
        return "scored"
    return "right" if score >= 1 else "wrong" if score <= 0 else "partly"


def clipped(value: object) -> str:
    """Return a text that is not too long for the page, of anything that JSON can hold."""
    text = value if isinstance(value, str) else json.dumps(value)
    left_out = len(text) - MAX_TEXT_CHARS
    return text if left_out <= 0 else f"{text[:MAX_TEXT_CHARS]} … {left_out:,} more characters"


def _text(value: object) -> str:
    found = number(value)
    return str(value) if found is None else amount(found)
