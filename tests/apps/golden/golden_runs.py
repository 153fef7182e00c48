"""The runs whose metrics are kept in this folder, and how a run of today is compared with its file."""

import json
import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from command_line import Cli, read_rows
from tiny_jobs import EVENS, make_chatty_model, own_job

FOLDER = Path(__file__).parent / "metrics"

MACHINE = ("timing_s/", "perf/", "ledger/", "forecast/", "controller/")
"""Prefixes of metrics that depend on the machine and its load."""
COUNTS = ("perf/total_num_tokens", "perf/computed_tokens")
"""Metrics under these prefixes that do not."""


GROUPING = frozenset({"perf/computed_tokens"})
"""Metrics that depend on which responses share a forward pass: in several processes that is a matter of time."""


@dataclass(frozen=True, kw_only=True)
class GoldenRun:
    """A command whose metrics are recorded.

    Attributes:
        args: the command line, run in an empty folder that holds ``evens.py``.
        app: the application, as a module.
        is_exact: on the processor and torch of the record all numbers are equal to the bit; otherwise within
            `TOLERANCE`.
        has_long_tail: the arguments follow those of a job on a model whose responses differ much in length.
        figures: the file of the simulator's figures, for a command that writes no run folder.
    """

    args: tuple[str, ...]
    app: str = "gcore_llm"
    is_exact: bool = True
    has_long_tail: bool = False
    figures: str = ""


NUM_STEPS = 20
STEPS = (
    "--trainer.total-training-steps",
    str(NUM_STEPS),
    "--trainer.test-freq",
    "10",
    "--trainer.tensorboard",
    "False",
)
TASK = ("--task.num-train", "500", "--task.num-val", "8", "--task.params.max-terms", "2")
TRAIN = (
    *("train", "--threads", "1", "--device", "cpu", "--reward", "evens.py:reward", *TASK, *STEPS),
    *("--warmup.max-steps", "8", "--warmup.batch-size", "64", "--warmup.test-freq", "4"),
    *("--data.train-batch-size", "4", "--rollout.n", "4", "--data.max-response-length", "12"),
    *("--actor.optim.lr", "1e-3", "--actor.loss.kl-loss-coef", "0.05"),
    *("--actor.optim.lr-scheduler-type", "constant"),
)
FINETUNE = ("--threads", "1", "--device", "cpu", *TASK, *STEPS, "--data.train-batch-size", "8")
PAIRS = (*FINETUNE, "--warmup-steps", "4")
MEGATRON = ("--trainer.num-processes", "2", "--trainer.backend", "megatron")
TENSOR_PARALLEL = ("--trainer.parallel.tensor-model-parallel-size", "2")
PARTIAL = (
    *(
        "--rollout.partial-rollout",
        "True",
        "--rollout.over-sample-rate",
        "1",
        "--data.max-response-length",
        "48",
    ),
    *("--data.train-batch-size", "4", "--data.val-size", "4", *STEPS),
)

RUNS: dict[str, GoldenRun] = {
    "train": GoldenRun(args=TRAIN),
    "train-4-controllers": GoldenRun(args=(*TRAIN, "--controllers", "4")),
    "train-ppo": GoldenRun(args=(*TRAIN, "--algorithm.adv-estimator", "gae")),
    "train-partial-rollout": GoldenRun(args=PARTIAL, has_long_tail=True),
    "train-megatron": GoldenRun(args=(*TRAIN, *MEGATRON, *TENSOR_PARALLEL), is_exact=False),
    "simulate": GoldenRun(
        args=(
            *(
                "simulate",
                "--devices",
                "8",
                "--controllers",
                "2",
                "--steps",
                "20",
                "--train-batch-size",
                "16",
            ),
            *("--n", "4", "--max-response-length", "2048", "--json", "figures.json"),
        ),
        figures="figures.json",
    ),
    "sft": GoldenRun(args=("sft", *FINETUNE)),
    "dpo": GoldenRun(args=("dpo", *PAIRS)),
    "reward-model": GoldenRun(args=("reward-model", *PAIRS)),
    "diffusion-train": GoldenRun(
        app="gcore_diffusion",
        args=(
            *(
                "train",
                "--device",
                "cpu",
                "--demo.num-steps",
                "6",
                "--demo.batch-size",
                "16",
                *STEPS,
            ),
            *("--demo.cache-dir", "cache", "--data.train-batch-size", "2", "--rollout.n", "4"),
            *("--rollout.num-inference-steps", "4", "--rollout.eval-n", "2"),
        ),
    ),
}
SLOW = ("train-megatron", "train-4-controllers", "train-partial-rollout", "diffusion-train")
"""Runs of several processes, and others that take long."""

FIRST_STEPS = 3
"""Steps that are compared on another processor: it rounds otherwise, and later on that flips a sampled token."""
TOLERANCE = {"rel_tol": 2e-3, "abs_tol": 1e-4}

Columns = dict[str, list[float | None]]


def records(name: str) -> list[Path]:
    """Return the records of a run: one, and further ones of machines with the same fingerprint that round otherwise."""
    return sorted(FOLDER.glob(f"{name}.json")) + sorted(FOLDER.glob(f"{name}.[0-9].json"))


def fingerprint() -> dict[str, str]:
    """Return what decides how a run in one thread rounds."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    kind = [cpu.get(key, "") for key in ("model name", "cpu family", "model")]
    return {
        "processor": " ".join(kind),
        "architecture": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": version("torch"),
    }


def execute(name: str, cli: Cli) -> dict[str, Any]:
    """Run a command and return its metrics by name, and a digest of the model that it exported."""
    run = RUNS[name]
    (cli.cwd / "evens.py").write_text(EVENS)
    args = list(run.args)
    if run.has_long_tail:
        args = [*_long_tailed_job(cli.cwd), *args]
    finished = cli(*args)
    assert finished.code == 0, finished
    if run.figures:
        steps = json.loads((cli.cwd / run.figures).read_text())["steps"]
        return {"metrics": columns(_flat(step, "") for step in steps), "export": {}}
    (folder,) = (cli.cwd / "runs").iterdir()
    models = sorted((folder / "export").rglob("*.safetensors"))
    digests = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()
        for path in models
    }
    return {"metrics": columns(read_rows(folder / "metrics.jsonl")), "export": digests}


def _long_tailed_job(folder: Path) -> list[str]:
    """Return a command on a random model whose responses differ much in length."""
    from gcore_llm.tiny_model import make_tiny_model

    make_tiny_model(folder / "tiny", seed=0)
    make_chatty_model(folder / "model", tiny=folder / "tiny")
    return own_job(folder, folder / "model")


def _flat(values: dict[str, Any], prefix: str) -> dict[str, float]:
    """Return the numbers of nested tables under dotted names; the controllers' own seconds are a clock's."""
    found: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif key != "controller_load":
            found[f"{prefix}{key}"] = value
    return found


def columns(rows: Iterable[dict[str, float]]) -> Columns:
    """Return each metric's values by row, None where the row lacks it, without the machine's own."""
    table = list(rows)
    names = {
        name: None
        for row in table
        for name in row
        if not name.startswith(MACHINE) or name in COUNTS
    }
    return {name: [row.get(name) for row in table] for name in names}


def differences(
    found: dict[str, Any], expected: dict[str, Any], *, num_steps: int, is_exact: bool
) -> list[str]:
    """Return a line for each metric that differs within the first steps, and for each exported file."""
    ours: Columns = found["metrics"]
    golden: Columns = expected["metrics"]
    lines = [f"{name} is recorded, and missing" for name in golden.keys() - ours.keys()]
    lines += [f"{name} is not recorded" for name in ours.keys() - golden.keys()]
    for name in golden.keys() & ours.keys() - (frozenset() if is_exact else GROUPING):
        if len(ours[name]) != len(golden[name]):
            lines.append(f"{name} has {len(ours[name])} rows; expected {len(golden[name])}")
            continue
        for step, value, wanted in zip(
            golden.get("step", range(len(ours[name]))), ours[name], golden[name], strict=True
        ):
            if (step is not None and step > num_steps) or _equal(value, wanted, is_exact=is_exact):
                continue
            lines.append(f"{name} is {value} in step {step}; expected {wanted}")
            break
    if is_exact and found["export"] != expected["export"]:
        lines.append(f"export is {found['export']}; expected {expected['export']}")
    return sorted(lines)


def _equal(value: float | None, wanted: float | None, *, is_exact: bool) -> bool:
    if is_exact or value is None or wanted is None:
        return value == wanted
    return math.isclose(value, wanted, **TOLERANCE)
