"""Statements of other systems that are no steps: weight syncs, savings by lending, and the tail of a rollout.

Each has inputs that are not published; what stands for them is printed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_bench.harness.report import Row
from gcore_bench.placement.oracles.models import CONFIGS
from gcore_bench.placement.oracles.prediction import lengths_of_mean, whole_sync_s
from gcore_placement import Cluster, Device, Efficiency, Lengths, ModelShape, Replica, ReplicaRequest
from gcore_placement.planning.options import EngineRoofline

_LENDING = "verl, docs/advance/dynamic_schedule.md (2026-07), Qwen3.5-35B-A3B, DAPO, 32 H20"
_SYNC = "verl, docs/advance/fully_async.md (2026-08), H20"
_TAIL = "Seer (arXiv 2511.14617)"

SAVED = {"8 + 24": 0.153, "16 + 16": 0.175}
"""Share of the time saved by lending the idle ones of 16 training devices to 16 that generate, against 32 in two
fixed parts: ranks and engines. With 16 ranks engines are what is waited for, with 8 the ranks are."""
TAIL_SHARE = (0.0, 0.5)
"""Share of a rollout in which its last 10 % of responses are finished, of Moonlight and Qwen2-VL-72B: up to a half."""
TAIL_SAVED = (0.75, 0.93)
"""Share of these seconds that is saved by moving requests between engines, and starting long ones first."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One of Seer's tasks, on H800."""

    model: str
    num_devices: int
    prompts: int
    longest: int
    n: int
    """Not given by task in what was read: 8 or 16."""
    engine_devices: int
    """Not given: those that the weights need in bfloat16."""


ROLLOUTS = (
    Rollout(model="Moonlight 16B-A3B", num_devices=32, prompts=400, longest=65_536, n=8, engine_devices=1),
    Rollout(model="Qwen2-VL 72B", num_devices=128, prompts=600, longest=40_960, n=16, engine_devices=8),
)
"""The tasks whose tail is stated."""
_PROMPT_TOKENS = 512
MEAN_SHARES, SIGMAS = (0.2, 0.35), (0.5, 1.0)
"""Mean responses, as shares of the longest, and deviations of their logarithms: assumed, all pairs of them."""


SYNCS = {
    "Qwen2.5 7B": (8, 0.02, 0.12),
    "Qwen3 30B-A3B": (32, 4.38, 15.76),
    "Qwen3 235B-A22B": (128, 23.70, 58.57),
}
"""Ranks of training and engines together, and the seconds of a weight sync with and without the checkpoint engine."""


def lending_savings() -> dict[str, float]:
    """Predict the savings of lending without any loss, from the ratio of the two fixed parts' times alone.

    With G and T device-seconds of a step's generation and training, 16 engines take G / 16, 8 ranks T / 8, and devices
    that are never idle (G + T) / 32.
    """
    slower = (1 - SAVED["16 + 16"]) / (1 - SAVED["8 + 24"])
    training_s = 1.0
    generation_s = 2 * training_s / slower
    lent_s = (generation_s + training_s) / 32
    return {"8 + 24": 1 - lent_s / (training_s / 8), "16 + 16": 1 - lent_s / (generation_s / 16)}


def tail_of(rollout: Rollout, lengths: Lengths, *, seed: int = 0) -> tuple[float, float]:
    """Simulate a rollout, and return its tail's share of it, and the share of the tail that repacking saves.

    As it is, each prompt goes to the next engine with all of its responses, and waits there. Repacked, each response
    goes to the engine with the least tokens so far, the longest one first, as if lengths were known.
    """
    cluster = Cluster(num_devices=rollout.num_devices, device=Device.named("H800"))
    efficiency = Efficiency()
    roofline = EngineRoofline(
        model=ModelShape.from_config(CONFIGS[rollout.model]),
        cluster=cluster,
        tp=rollout.engine_devices,
        compute_bytes=2,
        efficiency=efficiency,
    )
    free_bytes = (
        cluster.device.memory_bytes * efficiency.free_memory - roofline.weights_bytes - roofline.workspace_bytes
    )
    prompt = Lengths.recorded([_PROMPT_TOKENS])
    most = max(1, int(free_bytes / roofline.sequence_bytes(prompt, lengths)))
    costs = roofline.laws(np.array([float(most)])).costs(0)
    num_engines = rollout.num_devices // rollout.engine_devices
    drawn = np.random.default_rng(seed).random(rollout.prompts * rollout.n)
    tokens = lengths.values[np.searchsorted(lengths.edges, drawn, side="right") - 1]

    def tail_s(order: NDArray[np.intp], engines: NDArray[np.intp]) -> tuple[float, float]:
        finish: list[float] = []
        for engine in range(num_engines):
            replica = Replica[ReplicaRequest](costs)
            lengths_here = tokens[order[engines == engine]].tolist()
            prefill_s = _PROMPT_TOKENS * costs.prefill_per_token_s
            replica.submit(
                [ReplicaRequest(length=each, prefill_s=prefill_s, context=_PROMPT_TOKENS) for each in lengths_here], 0.0
            )
            while (now_s := replica.next_end_s) is not None:
                finish += [now_s] * len(replica.complete(now_s))
        finish.sort()
        return finish[-1] - finish[int(0.9 * len(finish))], finish[-1]

    asked = np.arange(tokens.size)
    as_it_is, whole_s = tail_s(asked, asked // rollout.n % num_engines)
    longest_first = np.argsort(-tokens, kind="stable")
    held, packed = np.zeros(num_engines), np.zeros(tokens.size, dtype=np.intp)
    for place, item in enumerate(longest_first.tolist()):
        packed[place] = held.argmin()
        held[packed[place]] += tokens[item]
    repacked, _ = tail_s(longest_first, packed)
    return as_it_is / whole_s, 1 - repacked / as_it_is


def statement_rows() -> list[Row]:
    """Return each statement with the least and the most of what is stated and predicted: shares, or seconds."""
    rows: list[Row] = []
    for model, (num_devices, least_s, most_s) in SYNCS.items():
        cluster = Cluster(num_devices=num_devices, device=Device.named("H20"))
        predicted_s = whole_sync_s(ModelShape.from_config(CONFIGS[model]), cluster, num_devices, Efficiency())
        name = f"weight sync of {model} over {num_devices} devices"
        assumed = "each device gets the whole model, over links between nodes where there are several"
        rows.append(_row(name, _SYNC, (least_s, most_s), [predicted_s], assumed, unit="s"))
    for parts, saved in lending_savings().items():
        rows.append(
            _row(
                f"time saved by lending, against {parts} devices",
                _LENDING,
                (SAVED[parts], SAVED[parts]),
                [saved],
                "no loss by moving; the ratio of the two fixed parts is taken from the statements",
            )
        )
    for rollout in ROLLOUTS:
        found = [
            tail_of(rollout, lengths_of_mean(share * rollout.longest, sigma, float(rollout.longest)))
            for share in MEAN_SHARES
            for sigma in SIGMAS
        ]
        assumed = (
            f"means of {' and '.join(f'{share:.0%}' for share in MEAN_SHARES)} of the longest, sigma of "
            f"{' and '.join(map(str, SIGMAS))}, {rollout.n} responses, engines of {rollout.engine_devices}"
        )
        name = f"{rollout.model} on {rollout.num_devices} H800"
        rows.append(_row(f"{name}: last 10 % of responses", _TAIL, TAIL_SHARE, [tail for tail, _ in found], assumed))
        rows.append(_row(f"{name}: tail saved by repacking", _TAIL, TAIL_SAVED, [saved for _, saved in found], assumed))
    return rows


def _row(
    name: str, source: str, stated: tuple[float, float], predicted: list[float], assumed: str, *, unit: str = "%"
) -> Row:
    row: Row = {"name": name, "source": source, "unit": unit, "stated_least": stated[0], "stated_most": stated[1]}
    return row | {"predicted_least": min(predicted), "predicted_most": max(predicted), "assumed": assumed}
