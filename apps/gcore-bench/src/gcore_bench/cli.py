"""The `gcore-bench` command."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

import tyro
from rich.console import Console

from gcore_bench.grpo.errors import BenchError
from gcore_bench.grpo.options import GrpoOptions

_USAGE = """usage: gcore-bench COMMAND [options]

Every claim gcore makes, measured beside a peer or a physical limit.

commands:
  grpo        GRPO steps under gcore and under TRL's GRPOTrainer or verl: the same task, model, batch and step count
  ckpt        saves and loads of the same state under gcore-ckpt, DCP, Orbax and others, beside memory and disk
  trainer     training steps, log-probabilities and long sequences under gcore-trainer, beside TRL's and verl's losses
  rollout     generation, new weights and sandboxed programs under gcore-rollout, beside bare vLLM and transformers
  controller  large payloads under gcore-controller beside verl's single driver, and its load in simulated clusters
  diffusion   Flow-GRPO steps under gcore-diffusion beside a plain loop on diffusers; samplers and a judge, simulated
  placement   sequences shared out over ranks, beside verl; the planner beside measured runs; live runs that drift

gcore-bench COMMAND --help documents every option.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; wrong input, or a contender that fails, ends it with exit code 2 and one message."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        raise SystemExit(0 if args else 2)
    if args[0] not in _COMMANDS:
        raise SystemExit(f"gcore-bench: unknown command {args[0]!r}: {', '.join(_COMMANDS)} are known")
    try:
        _COMMANDS[args[0]](args[1:])
    except BenchError as error:
        print(f"gcore-bench: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _grpo(args: Sequence[str]) -> None:
    options = tyro.cli(GrpoOptions, args=args, prog="gcore-bench grpo")
    from gcore_bench.grpo.rounds import run_rounds
    from gcore_bench.grpo.summary import summarise
    from gcore_bench.grpo.table import notes, table
    from gcore_bench.grpo.workload import WORKLOADS

    console = _console()
    results: list[dict[str, object]] = []
    names = list(WORKLOADS) if options.workload == "all" else [options.workload]
    for name in names:
        runs = run_rounds(WORKLOADS[name], options, say=console.print)
        summary = summarise(runs)
        console.print(table(WORKLOADS[name], summary))
        results.append({"workload": name, "summary": asdict(summary), "runs": [asdict(r) for r in runs]})
    for note in notes(options):
        console.print(note, soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"options": _plain(options), "workloads": results}, indent=1) + "\n")


def _plain(options: GrpoOptions) -> dict[str, object]:
    return {name: value if isinstance(value, int | tuple) else str(value) for name, value in asdict(options).items()}


def _ckpt(args: Sequence[str]) -> None:
    from gcore_bench.ckpt.options import CkptOptions

    options = tyro.cli(CkptOptions, args=args, prog="gcore-bench ckpt")
    from gcore_bench.ckpt.command import run

    run(options, _console())


def _trainer(args: Sequence[str]) -> None:
    from gcore_bench.trainer.options import TrainerOptions

    options = tyro.cli(TrainerOptions, args=args, prog="gcore-bench trainer")
    from gcore_bench.trainer.command import run

    run(options, _console())


def _rollout(args: Sequence[str]) -> None:
    from gcore_bench.rollout.options import RolloutOptions

    options = tyro.cli(RolloutOptions, args=args, prog="gcore-bench rollout")
    from gcore_bench.rollout.command import run

    run(options, _console())


def _controller(args: Sequence[str]) -> None:
    from gcore_bench.controller.options import ControllerOptions

    options = tyro.cli(ControllerOptions, args=args, prog="gcore-bench controller")
    from gcore_bench.controller.command import run

    run(options, _console())


def _diffusion(args: Sequence[str]) -> None:
    from gcore_bench.diffusion.options import DiffusionBenchOptions

    options = tyro.cli(DiffusionBenchOptions, args=args, prog="gcore-bench diffusion")
    from gcore_bench.diffusion.command import run

    run(options, _console())


def _placement(args: Sequence[str]) -> None:
    from gcore_bench.placement.options import PlacementOptions

    options = tyro.cli(PlacementOptions, args=args, prog="gcore-bench placement")
    from gcore_bench.placement.command import run

    run(options, _console())


def _console() -> Console:
    # A table is not worth much folded into 80 columns, which is what rich assumes of a file or a pipe.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "grpo": _grpo,
    "ckpt": _ckpt,
    "trainer": _trainer,
    "rollout": _rollout,
    "controller": _controller,
    "diffusion": _diffusion,
    "placement": _placement,
}

if __name__ == "__main__":
    main()
