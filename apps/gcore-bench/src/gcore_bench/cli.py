"""The `gcore-bench` command."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

from gcore_bench.harness.report import BenchError, BenchSession
from gcore_runs.command_line import ends_with_its_reader, print_completion, print_version

_BENCHES = {
    "grpo": "GRPO steps under gcore and TRL's GRPOTrainer: the same task, model, batch and step count",
    "algorithms": "learning curves of six algorithms on the demo task of gcore-llm train",
    "ckpt": "saves and loads of one state under gcore-ckpt, DCP and others, against memory and disk",
    "trainer": "training steps, log-probabilities and long sequences under gcore-trainer, TRL's and verl's losses",
    "rollout": "generation and new weights under gcore-rollout, bare vLLM, transformers and a copy in memory",
    "controller": "large payloads under gcore-controller and verl's single driver",
    "diffusion": "Flow-GRPO steps under gcore-diffusion and a plain loop on diffusers",
    "data": "starts on a million prompts, and the order of 100 million rows, against verl's way and RandomSampler",
    "agents": "processor time of calls to the endpoint of agents, against a bare server that reads the same bodies",
    "placement": "sequences distributed over ranks, against verl; predictions against measured runs; live runs",
}
"""A line of help for each command NAME, a module with a `NameOptions` and a `run`."""

_COMMANDS = "\n".join(f"  {name:<12}{summary}" for name, summary in _BENCHES.items())

_USAGE = f"""usage: gcore-bench COMMAND [options]

Every claim gcore makes, measured against a peer or a physical limit.

commands:
{_COMMANDS}

options:
  --version                 print the version
  --print-completion SHELL  print what completes commands and options in bash or zsh

gcore-bench COMMAND --help documents every option."""


@ends_with_its_reader()
def main(argv: Sequence[str] | None = None) -> None:
    """Run a command; wrong input, or a contender that fails, ends it with exit code 2 and one message."""
    args = list(sys.argv[1:] if argv is None else argv)
    match args:
        case [] | ["-h" | "--help", *_]:
            print(_USAGE)
            raise SystemExit(0 if args else 2)
        case ["--version", *_]:
            print_version("gcore-bench")
        case ["--print-completion", *shell]:
            options = {bench: _options_class(bench) for bench in _BENCHES}
            print_completion("gcore-bench", options, shell)
        case [name, *words] if name in _BENCHES:
            _run_command(name, words)
        case _:
            expected = ", ".join(_BENCHES)
            raise SystemExit(f"gcore-bench: the command is {args[0]!r}; expected one of {expected}")


def _run_command(name: str, words: Sequence[str]) -> None:
    # rich assumes 80 columns of a file or a pipe, in which the tables would be folded.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    try:
        options: Any = tyro.cli(_options_class(name), args=words, prog=f"gcore-bench {name}")
        run_bench(name, options, console)
    except BenchError as error:
        print(f"gcore-bench: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_bench(name: str, options: Any, console: Console) -> None:
    """Measure, print and write the figures of a bench."""
    options = options.resize_if_quick()
    with BenchSession(options, console) as session:
        _load_bench(name).run(options, session)


def _options_class(name: str) -> type:
    return getattr(_load_bench(name), f"{name.capitalize()}Options")


def _load_bench(name: str) -> Any:
    """Import the module of a bench; no other bench is imported."""
    return import_module(
        "gcore_bench.placement.bench" if name == "placement" else f"gcore_bench.{name}"
    )
