"""The command: parts in turn, each in a process of its own, and the report after each."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from acceptance.forked import ForkedPart
from acceptance.machine import ROOT
from acceptance.parts import PARTS, Part
from acceptance.report import Figure, Result, number, read_results, write_result
from acceptance.wheels import WheelError, download, install

_DESCRIPTION = """\
Measure gcore on one GPU, in fourteen parts, and write gpu-report.md and gpu-report.json.

It needs torch 2.11 or newer with CUDA, transformers 5, and no network: models are random, in the shapes of Qwen2.5.
The packages are used from their source folders. What else they need is installed from a folder of wheels:

  scripts/gpu/accept --make-wheels wheels --python 3.12     (where there is a network, in the workspace's environment)
  scripts/gpu/accept --wheels wheels --out report           (on the machine with the GPU)

Every part runs in a process of its own, with a time limit; one that fails does not end the run. The report is written
after each part. Calls with the same --out and other --parts add to one report, for where a command may take 10 minutes:

  scripts/gpu/accept --out report --parts 1,2,4,5 --budget-minutes 9
  scripts/gpu/accept --out report --parts 3 --budget-minutes 9
  scripts/gpu/accept --out report --parts 6,7,8,9,10,11,12,13 --budget-minutes 9
  scripts/gpu/accept --out report --parts multi --budget-minutes 9

The exit code is 0 when the run is complete, whatever it has measured; with --strict 1 if a part failed, was not run or
missed an aim.

The parts:

"""
_MACHINE_LIMIT_S = 300
_LEAST_S = 5.0
"""With less time left, a part is not started."""
_STOP_S = 10.0

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    options = _parser().parse_args(arguments)
    say = _printer()
    try:
        if options.make_wheels:
            names = download(options.make_wheels, python=options.python)
            say(
                f"{len(names)} wheels for Python {options.python} in {options.make_wheels}: {', '.join(names)}"
            )
            return 0
        needs = options.out.absolute() / "needs"
        if options.wheels:
            say(
                f"installed from {options.wheels}: {', '.join(install(options.wheels, needs)) or 'nothing was missing'}"
            )
    except WheelError as error:
        say(f"error: {error}")
        return 2
    return _run_parts(options, say, _environment(needs, small=options.small))


def _parser() -> argparse.ArgumentParser:
    parts = "\n".join(f"  {part.number:2} {part.name}" for part in PARTS)
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/accept",
        description=f"{_DESCRIPTION}{parts}\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-report"),
        help="folder of the report (default: %(default)s)",
    )
    parser.add_argument(
        "--parts",
        type=_numbers,
        default=[p.number for p in PARTS],
        help="such as 1,3,multi (default: all)",
    )
    parser.add_argument(
        "--budget-minutes", type=float, default=25.0, help="most minutes of all parts (default: 25)"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    parser.add_argument(
        "--small",
        action="store_true",
        help="tiny shapes, which no aim is compared with: about a minute",
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit code 1 if a part failed or missed an aim"
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="existing folder for models and checkpoints, 40 GB (default: a temporary one)",
    )
    parser.add_argument(
        "--wheels",
        type=Path,
        help="folder of wheels, of which those are used that this Python lacks",
    )
    parser.add_argument(
        "--make-wheels",
        type=Path,
        metavar="DIR",
        help="download the wheels into this folder, and end",
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python",
        default=here,
        help="Python of the image, for --make-wheels (default: %(default)s)",
    )
    return parser


def _numbers(text: str) -> list[int]:
    numbers: dict[str, int] = {}
    for part in PARTS:
        numbers |= {part.name: part.number, str(part.number): part.number}
    words = text.split(",")
    if not numbers.keys() >= set(words):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected numbers of 1 to {max(numbers.values())} or names without a comma, such as multi, with "
            "commas between them"
        )
    return sorted({numbers[word] for word in words})


def _printer() -> Say:
    """Return what prints a line: rich's console where there is one."""
    try:
        from rich.console import Console
    except ImportError:
        return lambda line: print(line, flush=True)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    return lambda line: console.print(line)


def _environment(needs: Path, *, small: bool) -> dict[str, str]:
    """Return the environment of the parts' processes: the packages' source folders, and what was installed."""
    sources = [
        str(path)
        for folder in ("packages", "apps")
        for path in sorted((ROOT / folder).glob("*/src"))
    ]
    # Last: what the image has comes first where both have it.
    path = [*sources, *filter(None, [os.environ.get("PYTHONPATH")]), str(needs)]
    threads = {"OMP_NUM_THREADS": "1"} if small else {}
    # Without it, a process that has looked for CUDA cannot be forked to use it.
    by_nvml = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # As the commands of gcore do.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return {
        **by_nvml,
        **allocator,
        **os.environ,
        **threads,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
    }


def _run_parts(options: argparse.Namespace, say: Say, environment: dict[str, str]) -> int:
    deadline = time.monotonic() + 60 * options.budget_minutes
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    machine = _machine(options.device, environment, say)
    with tempfile.TemporaryDirectory(prefix="gcore-accept-", dir=options.work) as work:
        for part in (part for part in PARTS if part.number in options.parts):
            left_s = deadline - time.monotonic()
            if left_s < _LEAST_S:
                reason = f"Not run: the {options.budget_minutes:g} minutes of the run were over."
                result = Result(number=part.number, name=part.name, machine=machine, notes=[reason])
            else:
                say(f"{part.number:2}. {part.name} (at most {min(part.limit_s, left_s):.0f} s)")
                limit_s = min(part.limit_s, left_s)
                result = _run(
                    part,
                    limit_s,
                    options,
                    Path(work),
                    logs,
                    machine=machine,
                    environment=environment,
                )
            write_result(options.out, result)
            for line in _summary(result):
                say(line)
    say(f"report: {options.out / 'gpu-report.md'}")
    chosen = [result for result in read_results(options.out) if result.number in options.parts]
    is_missed = any(result.status in ("failed", "not run", "not met") for result in chosen)
    return 1 if options.strict and is_missed else 0


def _machine(device: str, environment: dict[str, str], say: Say) -> dict[str, Any]:
    command = [sys.executable, "-m", "acceptance.machine", device]
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "timeout": _MACHINE_LIMIT_S,
        "check": False,
    }
    try:
        finished = subprocess.run(command, env=environment, **options)
    except subprocess.TimeoutExpired:
        # The first import of torch, or a driver that does not answer.
        return _undescribed(device, f"no answer after {_MACHINE_LIMIT_S} s", say)
    if finished.returncode:
        return _undescribed(device, finished.stderr.strip().rpartition("\n")[2], say)
    facts = json.loads(finished.stdout.splitlines()[-1])
    say(", ".join(f"{name} {value}" for name, value in facts.items()))
    return facts


def _undescribed(device: str, error: str, say: Say) -> dict[str, Any]:
    say(f"the machine cannot be described: {error}")
    return {"device": device, "error": error}


def _run(
    part: Part,
    limit_s: float,
    options: argparse.Namespace,
    work: Path,
    logs: Path,
    *,
    machine: dict[str, Any],
    environment: dict[str, str],
) -> Result:
    """Run a part in a process of its own, and end all that it started if it takes longer than its limit."""
    lines, log = work / f"{part.number:02}.jsonl", logs / f"{part.number:02}.log"
    lines.touch()
    shapes = "small" if options.small else "full"
    arguments = [part.function, str(lines), options.device, shapes, str(work)]
    begin, error = time.monotonic(), ""
    start = _start if options.device == "cuda" else ForkedPart
    try:
        process = start(arguments, log, environment)
    except OSError as failure:
        error = f"the part's process did not start: {failure}"
        return Result.of_lines(
            [], number=part.number, name=part.name, error=error, seconds=0.0, machine=machine
        )
    try:
        code = process.wait(limit_s)
        if code:
            ending = f"signal {-code}" if code < 0 else f"exit code {code}"
            error = f"{log.read_text(errors='replace')}\nthe part's process ended with {ending}"
    except subprocess.TimeoutExpired:
        error = f"{log.read_text(errors='replace')}\nended after {limit_s:.0f} s, its limit"
    finally:
        _end(process)
    seconds = time.monotonic() - begin
    written = lines.read_text().splitlines()
    lines.unlink()
    return Result.of_lines(
        written, number=part.number, name=part.name, error=error, seconds=seconds, machine=machine
    )


def _start(
    arguments: Sequence[str], log: Path, environment: dict[str, str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "acceptance.trial", *arguments]
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _end(process: "subprocess.Popen[bytes] | ForkedPart") -> None:
    """End a part's process with the processes that it started, which are of its session."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _summary(result: Result) -> list[str]:
    lines = [f"    {_line(figure)}" for figure in result.figures]
    lines += [f"    {error.strip().splitlines()[-1]}" for error in result.errors]
    return [*lines, f"    {result.status} ({result.seconds:.0f} s)"]


def _line(figure: Figure) -> str:
    verdict = {True: "met", False: "NOT MET", None: "not compared"}[figure.is_met]
    aim = f" (aim {figure.aim}: {verdict})" if figure.aim else ""
    return f"{figure.name}: {number(figure.value)} {figure.unit}".rstrip() + aim
