"""Runs of `gcore-llm train` on its built-in task, all from one model, and what they give; some are killed."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Spec, run_processes, start_server
from gcore_llm import TrainConfig, embedded
from gcore_runs import read_jsonl

REWARD = "critic/score/mean"
"""Metric of the curves: the mean reward of a step's responses."""
_CLOCKED = ("timing_s/", "perf/", "ledger/", "forecast/", "training/rollout_log_probs_diff")
"""Metrics that depend on the machine's speed, or are rounding alone."""
_WORK = "gcore_bench.ckpt.training_work"


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The way in which a run saves."""

    period: int
    """Steps between two checkpoints; 0: none before the end."""
    waits: bool = False
    """Training waits until a checkpoint is committed."""

    @property
    def name(self) -> str:
        """The way in words."""
        if not self.period:
            return "none before the end"
        return f"{'synchronous' if self.waits else 'asynchronous'}, every {self.period}"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The events of one process of a run, in seconds on the machine's clock."""

    started_s: float
    training_s: float | None = None
    """When training started or was resumed; None: the process ended before."""
    first_step: int = 0
    """Last step of the checkpoint that it was resumed from."""
    ended_s: float
    """When it was killed, or had ended."""
    was_killed: bool = False
    work: float = 0.0
    """Steps, and the part of one, that it made until it was killed."""
    steps_s: tuple[float, ...] = ()
    """The end of each step that it made."""
    stalls_s: tuple[float, ...] = ()
    """Stall of each checkpoint."""

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> "Attempt":
        """Return the attempt that noted these events."""
        training = next((row for row in rows if row["event"] == "training"), None)
        return cls(
            started_s=rows[0]["at_s"],
            training_s=training["at_s"] if training else None,
            first_step=training["step"] if training else 0,
            ended_s=rows[-1]["at_s"],
            was_killed=rows[-1]["event"] == "killed",
            work=rows[-1].get("after", 0.0),
            steps_s=tuple(row["at_s"] for row in rows if row["event"] == "step"),
            stalls_s=tuple(row["stall_s"] for row in rows if row["event"] == "saved"),
        )

    def end_of(self, step: int) -> float:
        """Return when it had made a step, or was where it was resumed from."""
        if step <= self.first_step:
            assert self.training_s is not None
            return self.training_s
        return self.steps_s[step - self.first_step - 1]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a run gives apart from what a clock gave, and how long it took."""

    metrics: list[dict[str, float]]
    """Metrics of each step and of each evaluation."""
    weights: str
    """Digest of the exported policy."""
    attempts: tuple[Attempt, ...]

    def is_same(self, other: "Outcome") -> bool:
        """Return whether every metric and every bit of the policy are equal."""
        return self.metrics == other.metrics and self.weights == other.weights

    @property
    def rewards(self) -> list[float]:
        """The reward of each step."""
        return [row[REWARD] for row in self.metrics if REWARD in row]

    @property
    def stall_s(self) -> float:
        """Median stall of a checkpoint."""
        return median(stall for attempt in self.attempts for stall in attempt.stalls_s)

    @property
    def work(self) -> float:
        """Steps of all attempts, those that failures undid included."""
        return sum(one.work if one.was_killed else len(one.steps_s) for one in self.attempts)

    @property
    def step_s(self) -> float:
        """Median seconds from the end of a step to the end of the next one, its checkpoint included."""
        return median(np.diff(self.attempts[0].steps_s))


class TrainingRuns:
    """Makes runs below a folder, all from the same warmed-up model, each in processes of their own."""

    def __init__(self, options: CkptOptions, folder: Path, say: Callable[[str], object]) -> None:
        self._options, self._folder, self._say = options, folder, say
        self._count = 0
        self._model: Path | None = None
        start_server(threads=1)

    def make(self, saving: Saving, seed: int, *, kills: Sequence[float | None] = (None,)) -> Outcome | None:
        """Make a run of all steps, and resume it as often as it is killed.

        ``kills`` are the steps after which each process is killed, until one is done before that, or is not to be
        killed. Returns None where all were killed.
        """
        model = self._model = self._model or self._options.model or self._made_model()
        self._count += 1
        name = f"run-{self._count}"
        run = self._folder / "runs" / name
        run.mkdir(parents=True)
        shutil.copytree(model, run / "model")
        config, attempts = self._config(saving, seed, name), list[Attempt]()
        for kill_after in kills:
            events = self._folder / f"{name}-{len(attempts)}.jsonl"
            attempts.append(self._attempt(config, saving, events, kill_after))
            if not attempts[-1].was_killed:
                outcome = Outcome(metrics=_metrics(run), weights=_digest(run), attempts=tuple(attempts))
                shutil.rmtree(run)
                return outcome
        shutil.rmtree(run)
        return None

    def _made_model(self) -> Path:
        self._say("warm-up: the embedded model learns from worked examples")
        # A run of one step, of which only the model that it starts from is needed.
        config = self._config(Saving(period=1), 0, "warm-up", steps=1)
        self._attempt(config, Saving(period=1), self._folder / "warm-up.jsonl", None)
        return self._folder / "runs/warm-up/model"

    def _attempt(self, config: TrainConfig, saving: Saving, events: Path, kill_after: float | None) -> Attempt:
        """Start or resume a run in a process of its own, which is killed after so many steps."""
        options = {"config": config, "waits": saving.waits, "events": str(events), "kill_after": kill_after}
        options["warmup_steps"] = self._options.warmup_steps
        spec = Spec(work=_WORK, contender=saving.name, folder=str(self._folder), options=options)
        try:
            run_processes([spec])
        except BenchError:
            # A process that was killed leaves an event and no result.
            if not events.exists() or not Attempt.of(read_jsonl(events)).was_killed:
                raise
        return Attempt.of(read_jsonl(events))

    def _config(self, saving: Saving, seed: int, name: str, *, steps: int | None = None) -> TrainConfig:
        """Return the settings of `gcore-llm train` without options, but for the sizes, the seed and the checkpoints."""
        options, built_in = self._options, embedded()
        steps = steps or options.train_steps
        trainer = replace(
            built_in.trainer,
            total_training_steps=steps,
            save_freq=saving.period or steps,
            test_freq=steps,
            tensorboard=False,
        )
        return replace(
            built_in,
            name=name,
            runs_dir=str(self._folder / "runs"),
            seed=seed,
            threads=1,
            device="cpu",
            trainer=trainer,
            data=replace(built_in.data, train_batch_size=options.train_batch_size, shuffle_seed=seed),
            task=replace(built_in.task, num_val=options.held_out),
        )


def _metrics(run: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(_CLOCKED)}
        for row in read_jsonl(run / "metrics.jsonl")
    ]


def _digest(run: Path) -> str:
    return hashlib.sha256((run / "export/model.safetensors").read_bytes()).hexdigest()
