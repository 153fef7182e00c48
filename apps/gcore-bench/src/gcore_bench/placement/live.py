"""The part live: real runs on Ray whose load moves from one role to another, under every placement."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import Program, run_program
from gcore_bench.harness.report import Row, figures_table, verdict
from gcore_bench.placement.options import LIVE_STRATEGIES, PlacementOptions
from gcore_llm.tiny_model import make_tiny_model
from gcore_placement.ledger import CAUSES, Ledger, read_spans
from gcore_runs import read_jsonl, write_jsonl

PHASE_TOKENS = (8, 72, 8)
"""Tokens of a response in each phase. A verdict has 24: judging takes 3/4 of the work, then 1/4, then most again."""
SHOWN_CAUSES = ("long_tail", "waiting_for_generation", "waiting_for_reward", "waiting_for_weights", "swap", "imbalance")

ROLE_PHASES = ((72, 8, 8), (8, 72, 8), (8, 8, 72))
"""With two judges, the tokens of a response, of a verdict and of one of the second judge, in each phase."""
_VERDICT_TOKENS = 24
_SCORE = r"(\d)\d"
"""Rare enough in verdicts of a random model that about half of the groups have no signal and are replaced."""
_ANY_SCORE = r"(\d)"
"""With two judges, whose sum says enough: few groups are replaced."""
_SLOTS = 4
"""Samples that an engine runs at once."""
_N = 4
_LEARNING_RATE = "1e-9"
"""So low that rounding, which differs with the number of ranks, changes no sample in the whole run."""
_MOVE = re.compile(r"(\d+) engines? moved from the (\w+)[\w ]* to the \w+")
_ALIKE = (
    *("sampling/waves", "response_length/mean", "response_length/max", "critic/score/mean", "critic/score/min"),
    *("critic/score/max", "actor/pg_loss", "actor/grad_norm"),
)
_TOLERANCE = 1e-4


def run_options(
    num_devices: int, strategies: Sequence[str] = LIVE_STRATEGIES, num_judges: int = 1
) -> dict[str, list[str]]:
    """Return the runs of each strategy on so many devices, and the options of gcore-llm for each.

    The name of a split has the devices of the policy, of each judge and of training; that of a static partition those
    of the policy and of each judge.
    """
    num_roles = 1 + num_judges
    even, half = _even(num_devices, num_roles), num_devices // 2
    sampling = _even(num_devices - half, num_roles)[::-1]
    counts = product(range(1, num_devices), repeat=num_roles)
    partitions = [own for own in counts if sum(own) == num_devices]
    processes = {
        f"split {_sum(sampling)} + {half}": ("split", sampling, half),
        "colocated": ("colocated", (num_devices,) * num_roles, num_devices),
        **{f"static {_sum(own)}": ("split", own, num_devices) for own in partitions},
        f"even {_sum(even)}": ("split", even, num_devices),
        "dynamic": ("dynamic", even, num_devices),
    }
    return {
        name: [
            *("--placement.strategy", strategy, "--rollout.num-processes", str(own[0])),
            *("--reward-model.judge.num-processes", str(own[1]), "--trainer.num-processes", str(ranks)),
            *("--rollout.colocated", str(ranks == num_devices)),
            *(f"--reward-model.judges.second.num-processes={count}" for count in own[2:]),
        ]
        for name, (strategy, own, ranks) in processes.items()
        if name.split()[0] in strategies
    }


def _even(num_devices: int, num_roles: int) -> tuple[int, ...]:
    """Return the devices of each role, as alike as they can be; the last roles have the rest."""
    return tuple((num_devices + role) // num_roles for role in range(num_roles))


def _sum(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Make all runs, one after the other.

    Returns:
        ``rows``, one a run: its ``seconds``, from the start of the first step to the end of the last, moves included;
        those of each phase and, on average, of a step; engines moved; the share of all devices' time that is training,
        and those that are idle, in all and by cause; and ``is_alike``: each step had the samples, the scores and the
        training of the first run, so that no request was lost, and none came twice.
    """
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-live-"))
    disable_progress_bar()
    _make_model(folder / "model", seed=options.seed)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{i}+{i % 7}="} for i in range(400)])
    rows: list[Row] = []
    first: list[dict[str, Any]] = []
    strategies = run_options(options.live_devices, options.live_strategies, options.live_judges)
    for number, (strategy, chosen) in enumerate(strategies.items()):
        name, load = f"run-{number}", os.getloadavg()[0]
        run, log = folder / "runs" / name, folder / f"{name}.log"
        main = "from gcore_llm.cli import main; main()"
        command = [sys.executable, "-c", main, *_job(folder, name, options), *chosen]
        program = Program(command=command, environment={"OMP_NUM_THREADS": "1"}, folder=folder)
        run_program(program, name=strategy, log=log)
        steps = [row for row in read_jsonl(run / "metrics.jsonl") if "timing_s/step" in row]
        first = first or steps
        row = {"strategy": strategy, **_figures(run, log, options), "is_alike": _are_alike(steps, first), "load": load}
        rows.append(row)
        say(
            f"live: {strategy}: {row['step_s']:.1f} s a step, idle {row['idle_share']:.1%}, moved "
            f"{row['moved_to_judge']} to the judge and {row['moved_to_policy']} to the policy, load {load:.1f}"
        )
        if not row["is_alike"]:
            raise BenchError(f"{strategy} had other samples or training than {rows[0]['strategy']} (see {run})")
    return {"rows": rows}


def _make_model(path: Path, *, seed: int) -> None:
    """Make the embedded model with a single layer: what it computes is to take less time than its pace."""
    make_tiny_model(path, seed=seed)
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)


def _job(folder: Path, name: str, options: PlacementOptions) -> list[str]:
    """Return the part of the command that all strategies have in common."""
    metrics, engine = folder / "runs" / name / "metrics.jsonl", folder / f"engine_{name}.py"
    phases = ROLE_PHASES if options.live_judges > 1 else (PHASE_TOKENS,)
    roles = dict(zip(("policy", "judge", "second"), phases, strict=False))
    engine.write_text(
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from gcore_bench.placement.paced_engine import PacedEngine, paced_loss, phase_tokens\n"
        f"pace = {{'step_s': {options.live_step_ms / 1000}, 'swap_s': {options.live_swap_ms / 1000}}}\n"
        "judge = partial(PacedEngine.paced, **pace)\n"
        f"phase = partial(phase_tokens, Path({str(metrics)!r}), {options.live_phase_steps})\n"
        "paced = judge\n"
        + "".join(f"{role} = partial(paced, most_tokens=partial(phase, {own}))\n" for role, own in roles.items())
        + f"loss = partial(paced_loss, {options.live_train_ms / 1000})\n"
    )
    model, num_steps = str(folder / "model"), options.live_phase_steps * len(PHASE_TOKENS)
    longest, score = str(_VERDICT_TOKENS), _SCORE
    if options.live_judges > 1:
        longest, score = str(max(PHASE_TOKENS)), _ANY_SCORE
    second = "--reward-model.judges.second"
    of_second = [
        *(f"{second}.path={model}", f"{second}.engine={engine}:second", f"{second}.pattern={_ANY_SCORE}"),
        *(f"{second}.unparsable-score=0.25", f"{second}.max-response-length={longest}"),
    ]
    return [
        *("train", "--name", name, "--runtime", "ray", "--threads", "1", "--device", "cpu", "--model", model),
        *("--data.train-files", "prompts.jsonl", "--data.val-size", "1"),
        *("--data.train-batch-size", str(options.live_batch), "--rollout.n", str(_N)),
        *("--data.max-prompt-length", "64", "--data.max-response-length", str(max(PHASE_TOKENS))),
        *("--rollout.engine", f"{engine}:policy", "--rollout.max-num-seqs", str(_SLOTS)),
        *("--seed", str(options.seed)),
        *("--reward-model.kind", "judge", "--reward-model.path", model),
        *("--reward-model.judge.engine", f"{engine}:judge", "--reward-model.judge.pattern", score),
        *("--reward-model.judge.unparsable-score", "0.25"),
        *("--reward-model.judge.max-response-length", longest),
        *(of_second if options.live_judges > 1 else ()),
        *("--actor.loss.loss-mode", f"{engine}:loss", "--actor.optim.lr", _LEARNING_RATE),
        *("--trainer.tensorboard", "False"),
        *("--trainer.total-training-steps", str(num_steps), "--trainer.test-freq", "100000"),
        *("--trainer.save-freq", "100000"),
    ]


def _figures(run: Path, log: Path, options: PlacementOptions) -> Row:
    steps = read_spans(run)
    ledger = Ledger.of(steps)
    phases = [steps[i : i + options.live_phase_steps] for i in range(0, len(steps), options.live_phase_steps)]
    moves = _MOVE.findall(log.read_text(errors="replace"))
    seconds = (steps[-1].stop_ns - steps[0].start_ns) / 1e9
    return {
        "seconds": seconds,
        "phase_s": [(phase[-1].stop_ns - phase[0].start_ns) / 1e9 for phase in phases],
        "step_s": seconds / len(steps),
        "moved_to_judge": sum(int(count) for count, left in moves if left == "policy"),
        "moved_to_policy": sum(int(count) for count, left in moves if left == "judge"),
        "train_share": ledger.share("training"),
        "idle_share": ledger.idle_share(),
        "shares": {cause: ledger.share(cause) for cause in CAUSES},
    }


def _are_alike(steps: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> bool:
    return len(steps) == len(expected) and all(
        abs(step[name] - other[name]) <= _TOLERANCE * max(1.0, abs(other[name]))
        for step, other in zip(steps, expected, strict=True)
        for name in _ALIKE
    )


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each run."""
    rows = figures["rows"]
    phases = [f"phase {i} s" for i in range(1, len(rows[0]["phase_s"]) + 1)]
    causes = [f"{name.replace('_', ' ')} %" for name in SHOWN_CAUSES]
    title = "real runs on Ray, of all devices"
    shown = figures_table(title, "step s", *phases, "moves", "train %", "idle %", *causes, "other %")
    for row in rows:
        found = [row["shares"][name] for name in SHOWN_CAUSES]
        shares = [row["train_share"], row["idle_share"], *found, row["idle_share"] - sum(found)]
        moves = f"{row['moved_to_judge']} + {row['moved_to_policy']}" if row["strategy"] == "dynamic" else "-"
        seconds = [f"{seconds:.1f}" for seconds in (row["step_s"], *row["phase_s"])]
        shown.add_row(row["strategy"], *seconds, moves, *(f"{100 * share:.1f}" for share in shares))
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether gcore's aims are met; none where dynamic was not compared with another strategy."""
    runs = {row["strategy"]: row for row in rows}
    dynamic, others = runs.pop("dynamic", None), runs.values()
    if dynamic is None or not others:
        return []
    moves = min(dynamic["moved_to_judge"], dynamic["moved_to_policy"])
    kinds = {name.split()[0]: [row for row in others if row["strategy"].startswith(name.split()[0])] for name in runs}
    compared: list[str] = []
    for kind, found in kinds.items():
        least = min(found, key=itemgetter("idle_share"))
        compared.append(
            f"aim: dynamic idles less than {kind}: {dynamic['idle_share']:.1%} to {least['idle_share']:.1%} "
            f"({least['strategy']}; {verdict(dynamic['idle_share'] < least['idle_share'])})"
        )
    fastest = min(others, key=itemgetter("seconds"))
    return [
        f"aim: dynamic moves an engine each way ({verdict(moves > 0)}), and no request is lost (met: every "
        "step has the samples, scores and gradients of all runs)",
        *compared,
        f"the run takes {fastest['seconds'] / dynamic['seconds']:.2f} times as long with the best of the others "
        f"({fastest['strategy']})",
    ]
