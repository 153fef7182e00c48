"""Numbers and sentences of the page: tiles, captions, and pairs of samples."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from gcore_runs.report.charts import mean_window
from gcore_runs.report.run import Row, Run, number, series
from gcore_runs.report.text import amount, clipped, duration


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One number of the page's first row."""

    label: str
    value: str = ""
    note: str = "no step recorded yet"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """`verdict` is right, wrong, partly, or scored where the score does not say which."""

    text: str
    score: str
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt with its completions before and after training, None where there is none yet."""

    prompt: str
    answer: str | None
    before: Completion | None
    after: Completion | None


def tiles(run: Run) -> list[Tile]:
    steps, rewards = series(run.metrics, run.kind.key)
    _, throughput = series(run.metrics, "perf/throughput")
    _, step_times = series(run.metrics, "timing_s/step")
    reward_tile, throughput_tile, step_tile, wall_tile = (
        Tile(label=label)
        for label in (f"{run.kind.name.capitalize()}, last step", "Throughput", "Step time", "Wall time")
    )
    if rewards:
        recent = rewards[-mean_window(len(rewards)) :]
        mean = f"mean of last {len(recent)}: {amount(statistics.fmean(recent))}"
        note = mean if len(recent) > 1 else f"step {steps[-1]:.0f}"
        reward_tile = replace(reward_tile, value=amount(rewards[-1]), note=note)
    if throughput:
        value = amount(statistics.median(throughput))
        throughput_tile = replace(throughput_tile, value=value, note=f"{run.kind.throughput_unit}, median")
    if step_times:
        slowest = f"median; slowest {duration(max(step_times))}"
        step_tile = replace(step_tile, value=duration(statistics.median(step_times)), note=slowest)
        wall_tile = replace(wall_tile, value=duration(sum(step_times)), note=f"in {len(step_times):,} training steps")
    return [_evaluation_tile(run), reward_tile, throughput_tile, step_tile, wall_tile]


def _evaluation_tile(run: Run) -> Tile:
    measure = run.kind.measure
    for way, key in run.kind.evaluations.items():
        steps, scores = series(run.metrics, key)
        if not steps:
            continue
        is_share = measure in ("score", "accuracy") and min(scores) >= 0 and max(scores) <= 1
        first, last = (f"{score:.0%}" if is_share else amount(score) for score in (scores[0], scores[-1]))
        shown = "accuracy" if is_share else measure
        label = f"Held-out {shown}, {way}" if way else f"Held-out {shown}"
        if len(steps) == 1:
            return Tile(label=label, value=first, note=f"step {steps[0]:.0f}; not evaluated again yet")
        return Tile(label=label, value=f"{first} → {last}", note=f"step {steps[0]:.0f} → step {steps[-1]:.0f}")
    return Tile(label=f"Held-out {'accuracy' if measure == 'score' else measure}", note="not evaluated yet")


def reward_seen(run: Run) -> str:
    steps, rewards = series(run.metrics, run.kind.key)
    window = mean_window(len(rewards))
    if window == 1:
        absent = "No training step yet" if run.metrics else "Nothing yet: metrics.jsonl is missing or empty"
        return f"Too few steps for a trend yet: {len(steps)}" if steps else absent
    first, last = (amount(statistics.fmean(part)) for part in (rewards[:window], rewards[-window:]))
    return f"From {first} over the first {window} steps to {last} over the last {window}"


def warmup_seen(run: Run) -> str:
    for way, key in reversed(run.kind.evaluations.items()):
        _, scores = series(run.warmup, key)
        if scores:
            return f"Held-out score, {way}: {amount(scores[0])} → {amount(scores[-1])}"
    return run.kind.after_warmup


def paired_samples(run: Run) -> list[Sample]:
    pairs: list[tuple[Row | None, Row | None]] = list(zip_longest(run.before, run.after))
    if not run.has_paired_samples:
        pairs = [*((old, None) for old in run.before), *((None, new) for new in run.after)]
    scores = [number(row.get("score")) for row in (*run.before, *run.after)]
    verified = all(score is not None and -1 <= score <= 1 for score in scores)
    return [_sample(old, new, verified=verified) for old, new in pairs]


def _sample(before: Row | None, after: Row | None, *, verified: bool) -> Sample:
    either = before or after or {}
    answer = either.get("answer")
    return Sample(
        prompt=clipped(either.get("prompt")),
        answer=None if answer is None else clipped(answer),
        before=_completion(before, verified=verified) if before else None,
        after=_completion(after, verified=verified) if after else None,
    )


def _completion(row: Row, *, verified: bool) -> Completion:
    """Return a completion with its verdict, if ``verified``: scores are in [-1, 1], 1 is right and 0 or less wrong."""
    score = number(row.get("score"))
    verdict = "scored"
    if verified and score is not None:
        verdict = "right" if score >= 1 else "wrong" if score <= 0 else "partly"
    shown = "not scored" if score is None else amount(score)
    return Completion(text=clipped(row.get("completion", "")), score=shown, verdict=verdict)


def samples_seen(samples: Sequence[Sample]) -> str:
    said: list[str] = []
    sides = {"before": [sample.before for sample in samples], "after": [sample.after for sample in samples]}
    for when, side in sides.items():
        verdicts = [completion.verdict for completion in side if completion]
        if verdicts and "scored" not in verdicts:
            said.append(f"{verdicts.count('right')} of {len(verdicts)} right {when} training")
    return ", ".join(said)
