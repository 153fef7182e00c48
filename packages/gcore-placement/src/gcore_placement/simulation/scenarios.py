"""Jobs and traces to compare strategies on, read from ``scenarios.toml``."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from gcore_placement.costs import EngineCosts, JobCosts, SwapCosts, TrainingCosts
from gcore_placement.partition.space import PartitionSpace, RoleLimits
from gcore_placement.quantities import check_known
from gcore_placement.simulation.simulator import Simulator
from gcore_placement.workload.recorded_runs import published_trace
from gcore_placement.workload.traces import Drift, Trace, TraceRecipe, steady

_TABLES = tomllib.loads(
    files("gcore_placement").joinpath("simulation/scenarios.toml").read_text(encoding="utf-8")
)
_DRIFTING = ("response_median", "judge_median", "acceptance")


def _make_job(policy: str, judge: str) -> JobCosts:
    models = _TABLES["models"]
    return JobCosts(
        policy=EngineCosts(**models[policy]["engine"]),
        reward=EngineCosts(**models[judge]["engine"]),
        training=TrainingCosts(**models[policy]["training"]),
        swap=SwapCosts(**models[judge]["swap"]),
    )


JOBS = {name: _make_job(**models) for name, models in _TABLES["jobs"].items()}
"""Costs by the size of the policy; the judge has the same size, or its own."""

SCALES = {
    37: (148, 1),
    64: (256, 4),
    512: (1024, 16),
    10_000: (8192, 400),
}
"""The batch size of a cluster by its devices, and the least devices to move at once: a replica, nodes, or racks.

Batches grow less than clusters do: 64, 64, 32 and 13 responses per device, 16 per prompt. On 37 devices, engines of 4
leave one unassigned."""


def _make_recipe(name: str) -> TraceRecipe:
    fields: dict[str, Any] = {"name": name, **_collect_fields(name)}
    course = fields.pop("swings", None)
    if course is not None:
        fields["response_median"] = {"first": 4000, "last": 1000, **course}
        fields["judge_median"] = {"first": 300, "last": 2400, **course}
    for drifting in _DRIFTING:
        value = fields[drifting]
        fields[drifting] = Drift(**value) if isinstance(value, Mapping) else steady(value)
    return TraceRecipe(**fields)


def _collect_fields(name: str) -> dict[str, Any]:
    """Return the fields of a trace, with those of the traces that it is like."""
    fields = {**_TABLES["scenarios"], **_TABLES["family"]}[name]
    like = fields.get("like")
    if like is None:
        return dict(fields)
    collected = _collect_fields(like) | fields
    del collected["like"]
    return collected


SCENARIOS = {name: _make_recipe(name) for name in _TABLES["scenarios"]}
"""Trace recipes by name; the scale sets their sizes."""
FAMILY = {name: _make_recipe(name) for name in _TABLES["family"]}
"""Trace recipes by name on which dynamic must not be much slower than the best split."""
PUBLISHED: dict[str, dict[str, Any]] = _TABLES["published"]
"""Response lengths of published runs, by name: their ``source``, and arguments of `published_trace`."""


def scenario(
    name: str,
    job: str,
    num_devices: int,
    *,
    num_steps: int | None = None,
    seed: int = 0,
    trace: Trace | None = None,
    costs: JobCosts | None = None,
    progress: Callable[[int], None] | None = None,
) -> Simulator:
    """Return the simulator of a scenario: of SCENARIOS, FAMILY or PUBLISHED, for one of JOBS and of SCALES.

    Args:
        num_steps: the scenario's if None, 60 of a published run; the drift is over as many.
        trace: in the place of the scenario's.
        costs: in the place of the job's, for as many devices a replica.
        progress: see `Simulator`.
    """
    recipes = SCENARIOS | FAMILY
    check_known("scenario", name, recipes | PUBLISHED)
    check_known("job", job, JOBS)
    check_known("devices", num_devices, SCALES)
    costs = costs or JOBS[job]
    train_batch_size, unit_devices = SCALES[num_devices]
    if trace is None and name in PUBLISHED:
        curve = {field: value for field, value in PUBLISHED[name].items() if field != "source"}
        trace = published_trace(
            name, **curve, num_steps=num_steps or 60, num_prompts=train_batch_size, seed=seed
        )
    elif trace is None:
        trace = resize(
            recipes[name], num_steps=num_steps, train_batch_size=train_batch_size, seed=seed
        ).trace()
    assert costs.reward is not None
    policy = RoleLimits(devices_per_replica=costs.policy.devices_per_replica)
    reward = RoleLimits(devices_per_replica=costs.reward.devices_per_replica)
    space = PartitionSpace(
        num_devices=num_devices, roles=(policy, reward), unit_devices=unit_devices
    )
    return Simulator(trace, costs, space, progress=progress)


def resize(
    recipe: TraceRecipe, *, num_steps: int | None, train_batch_size: int, seed: int
) -> TraceRecipe:
    """Return the recipe with another number of steps, with jumps at the same fractions of them; periods stay."""
    steps = recipe.num_steps if num_steps is None else num_steps

    def move(step: int | None) -> int | None:
        return None if step is None else round(step * steps / recipe.num_steps)

    def over(drift: Drift) -> Drift:
        return replace(drift, jump_step=move(drift.jump_step), back_step=move(drift.back_step))

    return replace(
        recipe,
        num_steps=steps,
        train_batch_size=train_batch_size,
        seed=seed,
        response_median=over(recipe.response_median),
        judge_median=over(recipe.judge_median),
        acceptance=over(recipe.acceptance),
    )
