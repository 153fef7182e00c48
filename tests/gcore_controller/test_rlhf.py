"""The RLHF loop with a small modality: the same training for any number of controllers, resumption, schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from tones import NUM_TONES, Roles, Streams, Synthesizer, Take, Tones, Trainer

from gcore_controller import (
    Context,
    Evaluated,
    Event,
    Generated,
    Prepared,
    RLHFConfig,
    RLHFLoop,
    RunStart,
    State,
    Stepped,
    TrainingBatch,
    Updating,
    Wave,
    run_inline,
    run_simulated,
)
from gcore_controller.errors import ControllerError
from gcore_controller.rlhf.dynamic_sampling import exchange
from gcore_placement import predict_ages

CONFIG = RLHFConfig(
    total_steps=12, train_batch_size=6, test_freq=4, filter_groups=True, max_num_gen_batches=8
)
CLOCKS = ("timing_s/", "perf/throughput")


@dataclass
class Notebook:
    """A recorder that keeps everything."""

    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    samples: list[list[dict[str, Any]]] = field(default_factory=list[list[dict[str, Any]]])
    states: list[list[State]] = field(default_factory=list[list[State]])
    weights: list[Any] = field(default_factory=list[Any])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    num_updating: int = 0
    first_step: int = 0
    logits: Any = None

    async def __call__(self, event: Event) -> None:
        match event:
            case Evaluated(step=step, evaluation=evaluation):
                self.evaluations[step] = evaluation
            case Updating():
                self.num_updating += 1
            case Stepped(step=step, metrics=metrics, spans=spans):
                self.samples.append(event.samples)
                assert step == self.num_updating + self.first_step
                assert all(spans) or metrics["timing_s/step"] == 0
                self.metrics.append(
                    {name: value for name, value in metrics.items() if not name.startswith(CLOCKS)}
                )
                self.states.append(event.controllers)
                self.weights.append(self.logits.copy())
            case _:
                pass


def run(
    config: RLHFConfig,
    start: RunStart | None = None,
    *,
    world_size: int = 1,
    logits: Any = None,
    seconds: float = 0.01,
    modality: Callable[[list[int]], Tones] = Tones,
) -> Notebook:
    """Run a job in simulated time."""
    logits = np.zeros(NUM_TONES) if logits is None else logits.copy()
    start = start or RunStart()
    recorder = Notebook(logits=logits, first_step=start.first_step)
    policy = Synthesizer(seconds=seconds)

    async def program(ctx: Context[Synthesizer]) -> None:
        roles = Roles(policy=ctx.roles, learner=Trainer(logits, ctx.group, seconds=seconds))
        await RLHFLoop(ctx.with_roles(roles), modality([5] * 30), config, start, recorder).run()

    run_simulated(program, roles=policy, world_size=world_size)
    return recorder


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_same_training_with_any_number_of_controllers(world_size: int) -> None:
    alone, together = run(CONFIG), run(CONFIG, world_size=world_size)
    assert together.metrics == alone.metrics
    assert together.evaluations == alone.evaluations
    assert alone.evaluations.keys() == {0, 4, 8, 12}
    assert alone.evaluations[12] > alone.evaluations[0] + 0.5
    assert alone.num_updating == len(alone.metrics) == 12
    for version, row in enumerate(alone.metrics):
        assert row["sampling/groups"] == 6
        assert row["sampling/oldest_version"] == version
        assert row["training/has_signal"] == 1


def test_a_curriculum_passes_over_prompts_whose_takes_were_all_alike() -> None:
    """Later epochs ask more often for what is neither learned nor out of reach; resumed, they ask for the same."""
    config = replace(CONFIG, curriculum=True, total_steps=40, train_batch_size=8)
    alone = run(config, world_size=1)
    assert run(config, world_size=3).metrics == alone.metrics
    assert alone.metrics[0]["curriculum/passed_over"] == 0
    assert alone.metrics[-1]["curriculum/known_prompts"] == 30
    states = alone.states[19]
    scores = states[0]["curriculum"]["scores"]
    assert alone.metrics[19]["curriculum/score"] == pytest.approx(scores[:, 0].mean())
    assert alone.metrics[19]["curriculum/alike"] == pytest.approx(np.mean(scores[:, 1] == 0))
    start = RunStart(first_step=20, is_evaluated=True, controllers=states, is_policy_behind=True)
    resumed = run(config, start, world_size=2, logits=alone.weights[19])
    assert resumed.metrics == alone.metrics[20:]
    passed_over = [row["curriculum/passed_over"] for row in alone.metrics]
    assert sum(passed_over[20:]) > sum(passed_over[:20]) > 0
    assert "curriculum/score" not in run(CONFIG).metrics[0]


def test_a_step_that_takes_no_time() -> None:
    """As a coarse clock has it."""
    assert run(CONFIG, seconds=0.0).metrics == run(CONFIG).metrics


class ShownTones(Tones):
    """Shows takes, trained on and filtered, in an order that depends on the step and the prompt."""

    def samples(
        self, ctx: Any, step: int, batch: TrainingBatch[Take], prepared: Prepared[Any] | None
    ) -> list[tuple[int, dict[str, Any]]]:
        del ctx
        assert (prepared is None) == (batch.num_groups == 0)
        assert not any(take.has_signal for take in batch.filtered)
        return [
            (
                hash((step, take.prompt_index)),
                {"prompt_index": take.prompt_index, "is_filtered": is_filtered},
            )
            for takes, is_filtered in ((batch.groups, False), (batch.filtered, True))
            for take in takes
        ]


def test_the_same_samples_are_shown_by_any_number_of_controllers() -> None:
    config = replace(CONFIG, log_samples=3)
    alone, together = (run(config, world_size=size, modality=ShownTones).samples for size in (1, 4))
    assert together == alone
    assert all(len(rows) == 3 for rows in alone)
    assert {row["is_filtered"] for rows in alone for row in rows} == {True, False}
    assert not any(run(CONFIG, modality=ShownTones).samples)


@pytest.mark.parametrize("schedule", ["sync", "one_step_off", "async"])
@pytest.mark.parametrize("partial_rollout", [False, True])
def test_resumption_with_another_number_of_controllers(
    schedule: Any, *, partial_rollout: bool
) -> None:
    """Groups that wait in the surplus, and unfinished ones, have one owner each again."""
    config = replace(
        CONFIG,
        schedule=schedule,
        max_staleness=3,
        partial_rollout=partial_rollout,
        over_sample_rate=0.5,
    )
    modality = Streams if partial_rollout and schedule == "async" else Tones
    first = run(replace(config, total_steps=6), world_size=2, modality=modality)
    if partial_rollout:
        assert any(state["unfinished"] for state in first.states[-1])
    assert (
        sum(len(state["sampler"]["surplus"]) for states in first.states for state in states)
        or schedule == "sync"
    )
    waiting = sorted(
        group["ticket"]
        for state in first.states[-1]
        for group in (*state["sampler"]["surplus"], *state["unfinished"])
    )
    assert len(set(waiting)) == len(waiting)
    start = RunStart(
        first_step=6, controllers=first.states[-1], is_policy_behind=True, is_evaluated=True
    )
    resumed = run(config, start, world_size=3, logits=first.weights[-1], modality=modality)
    assert [row["sampling/groups"] for row in resumed.metrics] == [6] * 6
    if schedule == "sync" and not partial_rollout:
        whole = run(config)
        assert resumed.metrics == whole.metrics[6:]
        assert resumed.weights[-1].tolist() == whole.weights[-1].tolist()


def test_staleness_of_schedules() -> None:
    """An engine as slow as this one is a step behind, or as far as it may be."""
    config = replace(CONFIG, filter_groups=False, max_staleness=3)
    rows = run(replace(config, schedule="one_step_off"), world_size=2, seconds=1.0).metrics
    assert [row["sampling/oldest_version"] for row in rows] == [
        max(0, step - 2) for step in range(1, 13)
    ]
    rows = run(replace(config, schedule="async"), world_size=2, seconds=1.0).metrics
    staleness = [step - row["sampling/oldest_version"] for step, row in enumerate(rows)]
    assert 1 <= max(staleness) <= 3


STREAMED = replace(
    CONFIG,
    filter_groups=False,
    schedule="async",
    partial_rollout=True,
    total_steps=24,
    train_batch_size=8,
    log_samples=1000,
)


def trained(notebook: Notebook) -> list[int]:
    return [row["prompt_index"] for rows in notebook.samples for row in rows]


@pytest.mark.parametrize("strategy", [True, "wait"])
@pytest.mark.parametrize("filter_groups", [False, True])
@pytest.mark.parametrize("max_staleness", [1, 3])
@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_no_group_is_too_old_and_none_is_lost(
    strategy: Any, max_staleness: int, seconds: float, *, filter_groups: bool
) -> None:
    """Whether engines or training take longer; what is dropped is sampled again, also after a run is killed."""
    players: list[Streams] = []

    def play(prompts: Sequence[int]) -> Streams:
        players.append(Streams(prompts))
        players[-1].sigma = 1.5
        return players[-1]

    config = replace(
        STREAMED,
        partial_rollout=strategy,
        max_staleness=max_staleness,
        filter_groups=filter_groups,
    )
    first = run(config, seconds=seconds, world_size=2, modality=play)
    stale = sum(row["sampling/stale_groups"] for row in first.metrics)
    assert stale == sum(player.num_dropped for player in players[:2])
    if not filter_groups:
        assert (stale > 0) == (strategy is True)
    reached = first.states[11]
    start = RunStart(first_step=12, controllers=reached, is_policy_behind=True, is_evaluated=True)
    resumed = run(
        config, start, logits=first.weights[11], seconds=seconds, world_size=3, modality=play
    )
    for row in first.metrics + resumed.metrics:
        assert row["sampling/groups"] == 8
        assert row["sampling/age/max"] <= max_staleness
        shares = {n: v for n, v in row.items() if n.startswith("sampling/age/share/")}
        assert sum(shares.values()) == pytest.approx(1)
        mean = sum(int(name.rpartition("/")[2]) * share for name, share in shares.items())
        assert row["sampling/age/mean"] == pytest.approx(mean)
    indices = [row["prompt_index"] for rows in first.samples[:12] for row in rows]
    indices += trained(resumed)
    for state in resumed.states[-1]:
        for take in (*state["unfinished"], *state["sampler"]["surplus"]):
            indices.append(take["ticket"])
    loader = resumed.states[-1][0]["loader"]
    indices += loader["returned"]
    assert len(set(indices)) == len(indices)
    if not filter_groups:
        assert sorted(indices) == list(range(loader["cursor"]))


@pytest.mark.parametrize(("max_staleness", "strategy"), [(8, True), (8, "wait"), (2, True)])
def test_ages_are_those_of_the_closed_form(max_staleness: int, strategy: Any) -> None:
    """Engines have 12 groups for batches of 8 at every moment: one starts as another ends, or is dropped."""
    players: list[Streams] = []

    def play(prompts: Sequence[int]) -> Streams:
        players.append(Streams(prompts))
        players[-1].slots = 12
        return players[-1]

    config = replace(
        STREAMED, partial_rollout=strategy, max_staleness=max_staleness, total_steps=400
    )
    notebook = run(config, seconds=0.5, modality=play)
    [player] = players
    # The run's end holds back what no batch could use.
    assert {count for _, count in player.playing[:-100]} == {12}
    rows = notebook.metrics[20:]
    shares = [
        np.mean([row.get(f"sampling/age/share/{age}", 0.0) for row in rows])
        for age in range(max_staleness + 1)
    ]
    draws = np.random.default_rng(1).lognormal(-(player.sigma**2) / 2, player.sigma, 20_000)
    predicted = predict_ages(
        player.mean_s * draws,
        num_in_flight=12,
        train_batch_size=8,
        update_s=2 * 0.5,
        max_staleness=max_staleness,
        strategy="wait" if strategy == "wait" else "drop",
    )
    assert predicted.shares == pytest.approx(shares, abs=0.03)
    stale = sum(row["sampling/stale_groups"] for row in notebook.metrics)
    assert predicted.stale_share == pytest.approx(stale / (stale + 8 * 400), abs=0.02)


class _Louder(Tones):
    """A modality with a metric of its own: one entry of `sampled_metrics`."""

    def sampled_metrics(self, parts: Sequence[list[float]]) -> dict[str, float]:
        return super().sampled_metrics(parts) | {"critic/score/max": max(map(max, parts))}


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_metric_is_recorded_once_the_modality_returns_it(world_size: int) -> None:
    plain, louder = (
        run(CONFIG, world_size=world_size, modality=kind).metrics for kind in (Tones, _Louder)
    )
    assert [row.pop("critic/score/max") for row in louder] == [0.0] * 12
    assert louder == plain


class _Stale(Tones):
    async def generate(self, ctx: Context[Roles], wave: Wave[int]) -> Generated[Take]:
        generated = await super().generate(ctx, wave)
        return Generated(
            groups=[replace(g, oldest_version=-g.prompt_index) for g in generated.groups]
        )


def test_a_sample_of_other_weights_is_an_error() -> None:
    message = "a sample of prompt 1 was generated by weights of version -1; expected only version 0, the present one"
    config = replace(CONFIG, filter_groups=False)
    with pytest.raises(RuntimeError, match=message):
        run(config, modality=_Stale)
    run(replace(config, schedule="one_step_off"), modality=_Stale)


@dataclass(frozen=True)
class _Failure:
    kind: str
    message: str
    count: int


class _Failing(Tones):
    """Every third call of its reward fails."""

    def drain_failures(self, ctx: Context[Roles]) -> tuple[int, list[Any]]:
        del ctx
        return 12, [_Failure("ValueError at reward.py:3", "no tone", 4)]


def test_too_many_failed_rewards_end_the_run() -> None:
    rows = run(replace(CONFIG, max_failed_share=0.5), world_size=2, modality=_Failing).metrics
    assert {row["reward/failed_fraction"] for row in rows} == {1 / 3}
    message = r"of the last \d+ rewards failed.*max_failed_share = 0.25.*ValueError at reward.py:3: no tone"
    with pytest.raises(ControllerError, match=message):
        run(replace(CONFIG, max_failed_share=0.25), modality=_Failing)


async def test_exchange_gives_every_controller_its_part() -> None:
    """Parts are those of ``balance`` over all groups by prompt index, computed by the first controller alone."""

    def heaviest_first(costs: list[float], num_parts: int) -> list[list[int]]:
        order = sorted(range(len(costs)), key=lambda i: -costs[i])
        return [order[part::num_parts] for part in range(num_parts)]

    async def program(ctx: Context[None]) -> list[int]:
        mine = range(ctx.rank * 3, ctx.rank * 3 + 3)
        groups = [Take(i, np.zeros(1, np.int64), np.zeros(1), 0) for i in mine]
        costs = [float(i * i % 7) for i in mine]
        return [
            g.prompt_index
            for g in await exchange(groups, costs, balance=heaviest_first, group=ctx.group)
        ]

    parts = await run_inline(program, roles=None, world_size=3)
    all_costs = [float(i * i % 7) for i in range(9)]
    assert parts == [sorted(part) for part in heaviest_first(all_costs, 3)]
