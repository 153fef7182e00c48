"""From runs to one line a contender."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from gcore_bench.grpo.measure import StepFigures
from gcore_bench.grpo.rounds import FLOOR, Run


@dataclass(frozen=True, kw_only=True)
class Line:
    """One contender over all rounds. Seconds are medians over all measured steps of all rounds."""

    contender: str
    num_steps: int
    samples_per_step: int
    samples_per_s: float
    """Completions trained on, over the median step."""
    step_s: float
    gen_s: float
    reward_s: float
    train_s: float
    other_s: float
    cpu_s: float | None
    """None of several processes."""
    peak_pss_bytes: int
    """Of the process and all that it started; highest of all rounds."""
    num_processes: int
    """Most at one time."""
    mean_length: float
    """Of all completions, in tokens."""
    max_length: int
    score: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Every contender of a workload, and how much faster gcore is than each peer."""

    lines: list[Line]
    floor: Line | None
    speed_ratios: dict[str, dict[str, float]]
    """Samples a second of a gcore contender over those of a peer: [gcore contender][peer]."""
    cpu_ratios: dict[str, dict[str, float]]
    """CPU seconds a step of the peer over those of the gcore contender, which neighbours on the cores disturb less."""
    load: float
    """Mean load of the machine before the runs."""


def summarise(runs: Sequence[Run]) -> Summary:
    """Medians over all rounds, and their ratios."""
    names = list(dict.fromkeys(r.contender for r in runs))
    by_name = {name: _line(name, [r for r in runs if r.contender == name]) for name in names}
    floor = by_name.pop(FLOOR, None)
    ours = [line for name, line in by_name.items() if name.startswith("gcore")]
    peers = [line for name, line in by_name.items() if not name.startswith("gcore")]
    return Summary(
        lines=list(by_name.values()),
        floor=floor,
        speed_ratios={o.contender: {p.contender: p.step_s / o.step_s for p in peers} for o in ours},
        cpu_ratios={
            o.contender: {p.contender: p.cpu_s / o.cpu_s for p in peers if p.cpu_s is not None}
            for o in ours
            if o.cpu_s is not None
        },
        load=fmean(r.load for r in runs),
    )


def _line(contender: str, runs: Sequence[Run]) -> Line:
    steps: list[StepFigures] = [s for r in runs for s in r.steps]
    step_s = median(s.wall_s for s in steps)
    cpu_s = [s.cpu_s for s in steps if s.cpu_s is not None]
    samples_per_step = steps[0].num_samples
    return Line(
        contender=contender,
        num_steps=len(steps),
        samples_per_step=samples_per_step,
        samples_per_s=samples_per_step / step_s,
        step_s=step_s,
        gen_s=median(s.gen_s for s in steps),
        reward_s=median(s.reward_s for s in steps),
        train_s=median(s.train_s for s in steps),
        other_s=median(s.other_s for s in steps),
        cpu_s=median(cpu_s) if cpu_s else None,
        peak_pss_bytes=max(r.footprint.pss_bytes for r in runs),
        num_processes=max(r.footprint.num_processes for r in runs),
        mean_length=fmean(s.mean_length for s in steps),
        max_length=max(s.max_length for s in steps),
        score=fmean(s.score for s in steps),
    )
