"""The command `gcore-placement plan`."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore_placement.cluster import DEVICES, Cluster, Device
from gcore_placement.errors import PlacementError, refusal
from gcore_placement.forecast import RUN_FILE, Correction, Job
from gcore_placement.planning.planner import plan
from gcore_placement.quantities import Lengths
from gcore_placement.strategies import PLANNED
from gcore_placement.workload.model_shape import ModelShape


def main(argv: Sequence[str]) -> int:
    """Plan and print; return the exit code."""
    arguments = _parser().parse_args(argv)
    cluster = Cluster(
        num_devices=arguments.gpus,
        device=Device.named(arguments.device),
        devices_per_node=arguments.gpus_per_node,
        inter_node_bytes_per_s=arguments.inter_node_gb_per_s * 1e9,
    )
    found = plan(
        cluster,
        _job(arguments),
        strategy=arguments.strategy,
        correction=Correction.load(arguments.correction) if arguments.correction else None,
        most_num_seqs=arguments.max_num_seqs,
    )
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return 0
    from gcore_placement.cli.tables import print_plan

    print_plan(found)
    return 0


def read_model(path: str) -> ModelShape:
    """Read the shape of the model in a Hugging Face folder or `config.json`.

    Raises:
        PlacementError: the file does not exist, or is not the config.json of a known model.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config: Any = json.loads(file.read_text())
    except FileNotFoundError:
        raise refusal("model", path, "a Hugging Face folder or its config.json") from None
    except ValueError as error:
        raise PlacementError(f"{file} is not JSON; expected a Hugging Face config.json ({error})") from None
    if not isinstance(config, dict):
        raise PlacementError(f"{file} is a JSON {type(config).__name__}; expected an object")
    return ModelShape.from_config(config)


def _job(arguments: argparse.Namespace) -> Job:
    policy = read_model(arguments.model)
    judge = read_model(arguments.judge) if arguments.judge else None

    def lengths(role: str) -> Lengths:
        given = vars(arguments)
        return Lengths.log_normal(
            median=given[f"{role}_median"], sigma=given[f"{role}_sigma"], longest=given[f"max_{role}_length"]
        )

    return Job(
        policy=policy,
        prompt_lengths=lengths("prompt"),
        response_lengths=lengths("response"),
        train_batch_size=arguments.train_batch_size,
        n=arguments.n,
        acceptance=arguments.acceptance,
        judge=judge,
        judge_lengths=lengths("judge") if judge else None,
        reference=arguments.reference,
        critic=policy if arguments.critic else None,
        old_log_probs=arguments.old_log_probs,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-placement plan",
        description="Choose strategy, layouts, partition and micro-batches, and show the costs of all options.",
        epilog="example: gcore-placement plan --model Qwen2.5-7B --judge Qwen2.5-32B --gpus 64 --device H100",
    )

    def number(name: str, kind: type, default: float, text: str) -> None:
        parser.add_argument(
            name, type=kind, default=default, metavar="N" if kind is int else "X", help=f"{text} (%(default)s)"
        )

    parser.add_argument(
        "--model", required=True, metavar="PATH", help="the policy: a Hugging Face folder or config.json"
    )
    parser.add_argument("--judge", metavar="PATH", help="a generative reward model, if there is one")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="devices")
    parser.add_argument("--device", choices=DEVICES, default="H100", help="what they are (%(default)s)")
    number("--gpus-per-node", int, 8, "devices of a node")
    number("--inter-node-gb-per-s", float, 50.0, "GB/s of each device to other nodes")
    number("--train-batch-size", int, 512, "prompts that a step trains on")
    number("--n", int, 8, "responses to each")
    number("--acceptance", float, 1.0, "share of prompts whose responses do not all score alike")
    for role, median, sigma, longest in (
        ("prompt", 256, 0.5, 1024),
        ("response", 1500, 0.8, 8192),
        ("judge", 500, 0.6, 2048),
    ):
        number(f"--{role}-median", float, median, f"median tokens of a {_NAMES[role]}")
        number(f"--{role}-sigma", float, sigma, "standard deviation of their logarithm")
        number(f"--max-{role}-length", float, longest, "longest")
    parser.add_argument("--reference", action="store_true", help="a reference model scores responses (KL)")
    parser.add_argument("--critic", action="store_true", help="a value model of the policy's shape is trained too")
    parser.add_argument("--old-log-probs", action="store_true", help="the trainer scores responses before it trains")
    parser.add_argument("--strategy", choices=PLANNED, help="use this one instead of the fastest")
    number("--max-num-seqs", int, 1024, "most sequences of an engine at once")
    parser.add_argument(
        "--correction",
        metavar="FILE",
        help=f"correct the laws by the measurements of a run: its folder, or its {RUN_FILE}",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser


_NAMES = {"prompt": "prompt", "response": "response", "judge": "judgement"}
