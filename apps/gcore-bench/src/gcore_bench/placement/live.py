"""The part live: real runs on Ray whose load moves from one role to the other, under every placement."""

import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gcore_bench.harness.processes import run_training
from gcore_bench.harness.report import BenchError, BenchSession, Row, verdict
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.tables import FigureTable, format_cell
from gcore_llm.tiny_model import make_tiny_model
from gcore_placement.ledger import CAUSES, Ledger, read_spans
from gcore_runs import write_jsonl


@dataclass(frozen=True, kw_only=True)
class LiveSizes:
    """The size and the pace of a run: a few cores stand for many devices, because steps wait."""

    num_devices: int
    phase_steps: int
    """Steps of each of the three phases."""
    batch: int
    """Prompts of a step, each with four responses."""
    step_s: float
    """Least seconds of a decoding step."""
    train_s: float
    """Seconds for which a rank waits per token that it trains on."""
    swap_s: float
    """Seconds in which an engine goes to sleep, and in which it wakes: a device's swap is one of each."""


FULL = LiveSizes(
    num_devices=4,
    phase_steps=5,
    batch=8,
    step_s=0.032,
    train_s=0.008,
    swap_s=1.0,
)
QUICK = LiveSizes(
    num_devices=3,
    phase_steps=1,
    batch=4,
    step_s=0.001,
    train_s=0.0001,
    swap_s=0.02,
)
PHASE_TOKENS = (8, 72, 8)
"""Tokens of a response in each phase. A verdict has 24: judging takes 3/4 of the work, then 1/4, then 3/4 again."""

_CONFIG = """
model = "{model}"
seed = {seed}
runtime = "ray"
threads = 1
device = "cpu"

[data]
train_files = ["prompts.jsonl"]
val_size = 1
train_batch_size = {sizes.batch}
max_prompt_length = 64
max_response_length = 72

[rollout]
engine = "{engine}:policy"
n = 4
max_num_seqs = 4

[reward_model]
kind = "judge"
path = "{model}"

[reward_model.judge]
engine = "{engine}:judge"
# Rare enough in verdicts of a random model that about half of the groups have no signal and are replaced.
pattern = '(\\d)\\d'
unparsable_score = 0.25
max_response_length = 24

[actor.loss]
loss_mode = "{engine}:loss"

[actor.optim]
# So low that rounding, which differs with the number of ranks, changes no sample in the whole run.
lr = 1e-9

[trainer]
tensorboard = false
total_training_steps = {num_steps}
test_freq = 100000
save_freq = 100000
"""
_ENGINE = """
from functools import partial
from pathlib import Path
from gcore_bench.placement.paced_engine import PacedEngine, compute_paced_loss, get_phase_tokens

judge = partial(PacedEngine.load, step_s={sizes.step_s}, swap_s={sizes.swap_s})
policy = partial(judge, most_tokens=partial(get_phase_tokens, Path("{metrics}"), {sizes.phase_steps}, {phase_tokens}))
loss = partial(compute_paced_loss, {sizes.train_s})
"""
_PROGRESS = "live: {run}: {step_s:.1f} s a step, idle {idle_percent:.1f} %, load {load:.1f}"
_MOVE = re.compile(r"(\d+) engines? moved from the (\w+)[\w ]* to the \w+")
_COMPARED = (
    "sampling/waves",
    "response_length/mean",
    "response_length/max",
    "critic/score/mean",
    "critic/score/min",
    "critic/score/max",
    "actor/pg_loss",
    "actor/grad_norm",
)
"""Metrics of each step that are alike in all runs: the samples, the scores and the training."""
_TOLERANCE = 1e-4

COLUMNS = {
    "": "{run}",
    "step s": "{step_s:.1f}",
    "phases s": "{phases}",
    "moves": "{moves}",
    "train %": "{training_percent:.1f}",
    "idle %": "{idle_percent:.1f}",
    "swap %": "{swap:.1f}",
}


def run(options: PlacementOptions, session: BenchSession) -> list[FigureTable]:
    """Make all runs, one after the other, and compare their time and their idle devices.

    Raises:
        BenchError: a run had other samples, scores or gradients than the first one: a request was lost, or came twice.
    """
    sizes = QUICK if options.quick else FULL
    # The folder is kept, because error messages name logs in it.
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-live-"))
    disable_progress_bar()
    _make_model(folder / "model", seed=options.seed)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{i}+{i % 7}="} for i in range(400)])
    rows: list[Row] = []
    expected: list[dict[str, Any]] = []
    for name, placement in list_runs(sizes.num_devices).items():
        if options.quick and not name.startswith(("split", "dynamic")):
            continue
        load = os.getloadavg()[0]
        run_folder = folder / "runs" / f"run-{len(rows)}"
        config = write_config(folder, run_folder, sizes, seed=options.seed)
        steps = run_training(
            "gcore_llm",
            ["--config", str(config), *placement],
            name=run_folder.name,
            folder=folder,
            environment={"OMP_NUM_THREADS": "1"},
        )
        expected = expected or steps
        if not are_alike(steps, expected):
            raise BenchError(
                f"{name} had other samples or training than {rows[0]['run']} (see {run_folder})"
            )
        log = folder / f"{run_folder.name}.log"
        row = {"run": name, "load": load, **read_figures(run_folder, log, sizes)}
        rows.append(row)
        session.say(format_cell(_PROGRESS, row))
    title = "real runs on Ray; shares of the time of all devices"
    return [
        FigureTable(
            title=title,
            columns=COLUMNS,
            rows=rows,
            aims=check_aims(rows),
        )
    ]


def list_runs(num_devices: int) -> dict[str, list[str]]:
    """Return the runs on so many devices, with the options of `gcore-llm train` for each.

    split: half of the devices train, the others generate and judge. In the others all devices train while all engines
    sleep. colocated: all generate, then all judge; static: a run for every division into devices that generate and
    devices that judge; dynamic: starts with an even division, which follows the load.
    """
    half = num_devices // 2
    policy = (num_devices - half + 1) // 2
    judge = num_devices - half - policy
    split = [*_list_options("split", policy, judge, half), "--rollout.colocated=False"]
    runs = {
        f"split {policy} + {judge} + {half}": split,
        "colocated": _list_options("colocated", num_devices, num_devices, num_devices),
    }
    for count in range(1, num_devices):
        rest = num_devices - count
        runs[f"static {count} + {rest}"] = _list_options("split", count, rest, num_devices)
    runs["dynamic"] = _list_options("dynamic", half, num_devices - half, num_devices)
    return runs


def _list_options(strategy: str, policy: int, judge: int, ranks: int) -> list[str]:
    return [
        "--rollout.colocated=True",
        f"--placement.strategy={strategy}",
        f"--rollout.num-processes={policy}",
        f"--reward-model.judge.num-processes={judge}",
        f"--trainer.num-processes={ranks}",
    ]


def _make_model(path: Path, *, seed: int) -> None:
    """Make the embedded model with a single layer, which computes faster than the pace of the engines."""
    make_tiny_model(path, seed=seed)
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)


def write_config(folder: Path, run_folder: Path, sizes: LiveSizes, *, seed: int) -> Path:
    """Write the settings of a run and the module of its engines; return the file of the settings."""
    values: dict[str, Any] = {
        "sizes": sizes,
        "seed": seed,
        "model": folder / "model",
        "engine": folder / f"engine_{run_folder.name.replace('-', '_')}.py",
        "metrics": run_folder / "metrics.jsonl",
        "phase_tokens": PHASE_TOKENS,
        "num_steps": sizes.phase_steps * len(PHASE_TOKENS),
    }
    values["engine"].write_text(_ENGINE.format(**values))
    config = folder / f"{run_folder.name}.toml"
    config.write_text(_CONFIG.format(**values))
    return config


def read_figures(run_folder: Path, log: Path, sizes: LiveSizes) -> Row:
    """Return the seconds of a run, moves included, the engines that moved, and shares of all devices' time."""
    steps = read_spans(run_folder)
    phases: list[str] = []
    for first in range(0, len(steps), sizes.phase_steps):
        phase_s = _seconds_of(steps[first : first + sizes.phase_steps])
        phases.append(f"{phase_s:.0f}")
    moved = Counter[str]()
    for count, source in _MOVE.findall(log.read_text(errors="replace")):
        moved[source] += int(count)
    ledger = Ledger.of(steps)
    seconds = _seconds_of(steps)
    return {
        "seconds": seconds,
        "step_s": seconds / len(steps),
        "phases": ", ".join(phases),
        "moved_to_judge": moved["policy"],
        "moved_to_policy": moved["judge"],
        "moves": f"{moved['policy']} + {moved['judge']}",
        "training_percent": 100 * ledger.share("training"),
        "idle_percent": 100 * ledger.idle_share(),
        **{cause: 100 * ledger.share(cause) for cause in CAUSES},
    }


def _seconds_of(steps: Sequence[Any]) -> float:
    return (steps[-1].stop_ns - steps[0].start_ns) / 1e9


def are_alike(steps: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all steps have the samples, the scores and the training of the expected ones."""
    if len(steps) != len(expected):
        return False
    for step, other in zip(steps, expected, strict=True):
        for name in _COMPARED:
            if abs(step[name] - other[name]) > _TOLERANCE * max(1.0, abs(other[name])):
                return False
    return True


def check_aims(rows: Sequence[Row]) -> list[str]:
    """Compare the dynamic run with the least idle one of each other kind, and with the fastest."""
    *others, dynamic = rows
    moves = min(dynamic["moved_to_judge"], dynamic["moved_to_policy"])
    lines = [
        f"aim: dynamic moves an engine each way ({verdict(moves > 0)}), and no request is lost (met: every step has "
        "the samples, scores and gradients of all runs)"
    ]
    least_idle: dict[str, Row] = {}
    for row in sorted(others, key=itemgetter("idle_percent")):
        least_idle.setdefault(row["run"].split()[0], row)
    for strategy, row in sorted(least_idle.items()):
        is_met = dynamic["idle_percent"] < row["idle_percent"]
        idle = "{:.1f}% to {idle_percent:.1f}% ({run}; ".format(dynamic["idle_percent"], **row)
        lines.append(f"aim: dynamic idles less than {strategy}: {idle}{verdict(is_met)})")
    fastest = min(others, key=itemgetter("seconds"))
    ratio = fastest["seconds"] / dynamic["seconds"]
    lines.append(
        f"the run takes {ratio:.2f} times as long with the best of the others ({fastest['run']})"
    )
    return lines
