"""The `gcore-placement` command and its subcommands.

Exit code 0: fine. 2: wrong use, or an error, in one line. 130: Ctrl-C. 141: the reader of the output has gone.
"""

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from gcore_placement.cli.run_settings import run_settings
from gcore_placement.cluster import DEVICES, Cluster, Device
from gcore_placement.errors import PlacementError, read_json, refusal
from gcore_placement.forecast import RUN_FILE, Correction, Job
from gcore_placement.ledger import Ledger, read_spans, select_steps
from gcore_placement.planning.planner import plan
from gcore_placement.quantities import Lengths, check_positive
from gcore_placement.simulation.role_run import RoleRun
from gcore_placement.simulation.scenarios import (
    FAMILY,
    JOBS,
    PUBLISHED,
    SCALES,
    SCENARIOS,
    scenario,
)
from gcore_placement.simulation.simulator import Comparison, Simulator, compare
from gcore_placement.simulation.waves import run_wave
from gcore_placement.strategies import PLANNED
from gcore_placement.workload.model_shape import ModelShape
from gcore_placement.workload.recorded_runs import run_trace
from gcore_placement.workload.traces import Trace

_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130
_EXIT_NO_READER = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; wrong use raises `SystemExit(2)`."""
    parser = argparse.ArgumentParser(
        prog="gcore-placement",
        description="Placement of RLHF work.",
        epilog="gcore-placement COMMAND --help shows its options. Exit codes: 0 fine, 2 an error, 130 interrupted.",
    )
    parser.add_argument(
        "--version", action="version", version=f"gcore-placement {version('gcore-placement')}"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (run, add_options, text, description, example) in COMMANDS.items():
        command = commands.add_parser(
            name, help=text, description=description, epilog=f"example: {example}"
        )
        add_options(command)
        command.set_defaults(run=run)
    if sys.stdout is None:  # closed by the caller
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            arguments = parser.parse_args(argv)
            arguments.run(arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has gone. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_NO_READER
    except (PlacementError, OSError) as error:
        print(f"gcore-placement: error: {str(error).replace(chr(10), ' ')}", file=sys.stderr)
        return _EXIT_ERROR
    return 0


def _plan_options(parser: argparse.ArgumentParser) -> None:
    def add_numbers(number_type: type, *options: tuple[str, float, str]) -> None:
        metavar = "N" if number_type is int else "X"
        for name, default, text in options:
            parser.add_argument(
                name,
                type=number_type,
                default=default,
                metavar=metavar,
                help=f"{text} (%(default)s)",
            )

    parser.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="the policy: a Hugging Face folder or config.json",
    )
    parser.add_argument(
        "--judge", metavar="PATH", help="a generative reward model, if there is one"
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices")
    parser.add_argument(
        "--device", choices=DEVICES, default="H100", help="what they are (%(default)s)"
    )
    add_numbers(
        int,
        ("--gpus-per-node", 8, "devices of a node"),
        ("--train-batch-size", 512, "prompts that a step trains on"),
        ("--ppo-mini-batch-size", 0, "prompts of an update; 0: all of the step, in one update"),
        ("--n", 8, "responses to each"),
        ("--max-num-seqs", 1024, "most sequences of an engine at once"),
    )
    add_numbers(
        float,
        ("--inter-node-gb-per-s", 50.0, "GB/s of each device to other nodes"),
        ("--host-gb-per-gpu", 200.0, "GB of the host's memory for each device"),
        ("--acceptance", 1.0, "share of prompts whose responses do not all score alike"),
    )
    for role, name, median, sigma, longest in (
        ("prompt", "prompt", 256, 0.5, 1024),
        ("response", "response", 1500, 0.8, 8192),
        ("judge", "judgement", 500, 0.6, 2048),
    ):
        add_numbers(
            float,
            (f"--{role}-median", median, f"median tokens of a {name}"),
            (f"--{role}-sigma", sigma, "standard deviation of their logarithm"),
            (f"--max-{role}-length", longest, "longest"),
        )
    parser.add_argument(
        "--reference", action="store_true", help="a reference model scores responses (KL)"
    )
    parser.add_argument(
        "--critic", action="store_true", help="a value model of the policy's shape is trained too"
    )
    parser.add_argument(
        "--old-log-probs", action="store_true", help="the trainer scores responses before it trains"
    )
    text = "train LoRA adapters of this rank; 0: all parameters (default: adapters where nothing else fits)"
    parser.add_argument("--lora-rank", type=int, metavar="N", help=text)
    parser.add_argument("--strategy", choices=PLANNED, help="use this one instead of the fastest")
    text = f"correct the laws by the measurements of a run: its folder, or its {RUN_FILE}"
    parser.add_argument("--correction", metavar="FILE", help=text)
    text = "also layouts for which no settings are written: Megatron-Core's, and engines over several nodes"
    parser.add_argument("--all-layouts", action="store_true", help=text)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON instead of tables")
    text = "print the settings of gcore-llm train under which it is the plan, for its --config"
    form.add_argument("--toml", action="store_true", help=text)


def _plan(arguments: argparse.Namespace) -> None:
    cluster = Cluster(
        num_devices=arguments.gpus,
        device=Device.named(arguments.device),
        devices_per_node=arguments.gpus_per_node,
        inter_node_bytes_per_s=arguments.inter_node_gb_per_s * 1e9,
        host_memory_bytes=arguments.host_gb_per_gpu * 1e9,
    )
    if arguments.toml and arguments.all_layouts:
        raise refusal(
            "--all-layouts",
            True,
            "none with --toml, whose settings are of layouts that gcore-llm runs",
        )
    job = _read_job(arguments)
    correction = None
    if arguments.correction:
        correction = Correction.load(arguments.correction)
    best = plan(
        cluster,
        job,
        strategy=arguments.strategy,
        correction=correction,
        most_num_seqs=arguments.max_num_seqs,
        runnable=not arguments.all_layouts,
        lora_rank=arguments.lora_rank,
    )
    if arguments.toml:
        print(run_settings(best, job, model=arguments.model, judge=arguments.judge or ""), end="")
        return
    if arguments.json:
        print(json.dumps(best.to_dict(), indent=2))
        return
    from gcore_placement.cli.tables import print_plan

    print_plan(best)


def _read_job(arguments: argparse.Namespace) -> Job:
    policy = _read_model(arguments.model)
    judge = _read_model(arguments.judge) if arguments.judge else None

    def lengths(role: str) -> Lengths:
        values = vars(arguments)
        return Lengths.log_normal(
            median=values[f"{role}_median"],
            sigma=values[f"{role}_sigma"],
            longest=values[f"max_{role}_length"],
        )

    return Job(
        policy=policy,
        prompt_lengths=lengths("prompt"),
        response_lengths=lengths("response"),
        train_batch_size=arguments.train_batch_size,
        ppo_mini_batch_size=arguments.ppo_mini_batch_size,
        n=arguments.n,
        acceptance=arguments.acceptance,
        judge=judge,
        judge_lengths=lengths("judge") if judge else None,
        reference=arguments.reference,
        critic=policy if arguments.critic else None,
        old_log_probs=arguments.old_log_probs,
    )


def _read_model(path: str) -> ModelShape:
    """Read the shape of the model in a Hugging Face folder or `config.json`."""
    accepted = "a Hugging Face folder or its config.json"
    content = "a Hugging Face config.json"
    return ModelShape.from_config(
        read_json("model", path, "config.json", accepted=accepted, content=content)
    )


def _simulate_options(parser: argparse.ArgumentParser) -> None:
    names = SCENARIOS | FAMILY | PUBLISHED
    parser.add_argument(
        "--scenario", choices=names, default="growing", help="recipe of the trace (%(default)s)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--trace", type=Path, metavar="FILE", help="use a trace that Trace.save has written"
    )
    instead.add_argument(
        "--from-run", type=Path, metavar="RUN", help="use the steps of a run of gcore-llm"
    )
    text = "median of the run's judgements, which it does not record (%(default)g)"
    parser.add_argument("--judge-length", type=float, default=800.0, metavar="TOKENS", help=text)
    parser.add_argument(
        "--job", choices=JOBS, default="32B", help="models and their costs (%(default)s)"
    )
    parser.add_argument(
        "--devices", type=int, choices=SCALES, default=64, help="of the cluster (%(default)s)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="of the trace")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the trace (%(default)s)"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with timelines and idle bars"
    )
    parser.add_argument("--save-trace", type=Path, metavar="FILE", help="write the trace, as .npz")


def _simulate(arguments: argparse.Namespace) -> None:
    from gcore_placement.cli.page import page
    from gcore_placement.cli.tables import counting, print_comparison

    for option, path in (("--html", arguments.html), ("--save-trace", arguments.save_trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise refusal(option, str(path), "a path in a folder that exists")
    if arguments.steps is not None:
        check_positive("--steps", arguments.steps)
    with counting("waves simulated") as counted:
        simulator = scenario(
            arguments.scenario,
            arguments.job,
            arguments.devices,
            num_steps=arguments.steps,
            seed=arguments.seed,
            trace=_load_trace(arguments),
            progress=counted,
        )
        comparison = compare(simulator.trace.name, simulator)
    print_comparison(comparison)
    if simulator.trace.name in PUBLISHED:
        print(f"responses: {PUBLISHED[simulator.trace.name]['source']}")
    if arguments.save_trace is not None:
        simulator.trace.save(arguments.save_trace)
    if arguments.html is not None:
        arguments.html.write_text(page(comparison, _simulate_timelines(simulator, comparison)))
        print(f"page: {arguments.html}")


def _load_trace(arguments: argparse.Namespace) -> Trace | None:
    """Return the trace of --trace or --from-run, which replaces the scenario's; None without these options."""
    if arguments.trace is not None:
        return Trace.load(arguments.trace)
    if arguments.from_run is None:
        return None
    folder: Path = arguments.from_run
    try:
        config = tomllib.loads((folder / "config.toml").read_text())
        n = int(config["rollout"]["n"])
        longest = float(config["reward_model"]["judge"]["max_response_length"])
    except (OSError, KeyError, ValueError) as error:
        raise PlacementError(
            f"--from-run is {str(folder)!r}; expected a gcore-llm run, with config.toml and metrics.jsonl ({error!r})"
        ) from error
    return run_trace(
        folder,
        n=n,
        judge_median=arguments.judge_length,
        max_judge_length=longest,
        seed=arguments.seed,
    )


def _simulate_timelines(
    simulator: Simulator, comparison: Comparison
) -> list[tuple[str, tuple[RoleRun, RoleRun]]]:
    """Return the first wave of the middle step, colocated and on the partition of dynamic."""
    step = simulator.trace.num_steps // 2
    wave = next(simulator.trace.waves(step))
    dynamic = comparison["dynamic"].steps[step].partitions[0]
    return [
        (
            f"colocated, step {step}",
            run_wave(simulator.costs, wave, simulator.space.num_devices),
        ),
        (f"dynamic, step {step}", run_wave(simulator.costs, wave, dynamic)),
    ]


def _ledger_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", help="a run's folder, or the spans.jsonl in it"
    )
    parser.add_argument(
        "--steps",
        default=":",
        metavar="FIRST:LAST",
        help="only these, both included (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _ledger(arguments: argparse.Namespace) -> None:
    steps = select_steps(read_spans(arguments.run_folder), arguments.steps)
    ledger = Ledger.of(steps)
    if arguments.json:
        print(json.dumps({"steps": [steps[0].step, steps[-1].step], **ledger.to_dict()}, indent=2))
        return
    from gcore_placement.cli.tables import print_ledger

    print_ledger(ledger, steps)


_Command = tuple[
    Callable[[argparse.Namespace], None], Callable[[argparse.ArgumentParser], None], str, str, str
]
COMMANDS: dict[str, _Command] = {
    "plan": (
        _plan,
        _plan_options,
        "choose the devices of each role, and predict a step's seconds and memory",
        "Choose strategy, layouts, partition and micro-batches, and show the costs of all options.",
        "gcore-placement plan --model Qwen2.5-7B --judge Qwen2.5-32B --gpus 64 --device H100 --toml",
    ),
    "simulate": (
        _simulate,
        _simulate_options,
        "compare placement strategies on a trace: step time, and causes of idleness",
        "Compare colocated, the best static split, dynamic and clairvoyant placement on one trace.",
        "gcore-placement simulate --scenario judge_grows --devices 64 --html page.html",
    ),
    "ledger": (
        _ledger,
        _ledger_options,
        "divide the device time of a run into work and causes of idleness",
        "Assign each device-second of a run to a role, and to work or one cause of idleness.",
        "gcore-placement ledger runs/default --steps 10:20",
    ),
}
"""A command's function and options, its help in a line, its description and an example."""
