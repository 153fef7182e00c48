"""`gcore-llm simulate`: the real program, in times that formulas give, and device-seconds that add up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from command_line import Cli, step_rows

from gcore_controller import Context, run_simulated
from gcore_controller.trainer_group import deal
from gcore_llm.learning.preparation import workload_of
from gcore_llm.simulate import parse_simulate, simulate
from gcore_placement import RunningLedger
from gcore_placement.simulation.live import IDLE, WORK
from gcore_rollout import Completion, Request, RolloutError, SamplingParams
from gcore_runs.errors import UserError
from gcore_runs.simulation import cluster as cluster_module
from gcore_runs.simulation.cluster import Simulation
from gcore_runs.simulation.config import (
    EngineModel,
    LearnerModel,
    LengthModel,
    RewardModel,
    SessionModel,
    SimulateConfig,
)
from gcore_runs.simulation.engine import ModelledEngine
from gcore_runs.simulation.services import (
    LoadMeter,
    ModelledLearner,
    ModelledReward,
    SharedState,
    now_s,
    sample_name,
)
from gcore_runs.simulation.tokens import SimulatedTokens, coarse_workload, drawn_prompts

COLUMNS = (*WORK, *IDLE)
SMALL = SimulateConfig(
    devices=8,
    controllers=2,
    steps=3,
    token_unit=16,
    train_batch_size=16,
    n=4,
    max_prompt_length=256,
    max_response_length=2048,
    prompt_length=LengthModel(median=64, sigma=0.5),
    response_length=LengthModel(median=300, sigma=0.9),
    ppo_max_token_len=8192,
    learner=LearnerModel(devices_per_replica=2, collectives=False, sync_gb_per_s=10.0),
)
EQUAL = replace(
    SMALL,
    devices=4,
    steps=2,
    token_unit=1,
    train_batch_size=8,
    prompt_length=LengthModel(median=30, sigma=0),
    response_length=LengthModel(median=100, sigma=0),
    filter_groups=False,
    engine=EngineModel(
        devices_per_replica=2, base_s=0.03, per_sample_s=0.001, prefill_tokens_per_s=1000
    ),
)


@pytest.mark.parametrize("controllers", [1, 2])
@pytest.mark.parametrize("max_num_seqs", [16, 4])
def test_equal_lengths_take_what_the_formula_says(max_num_seqs: int, controllers: int) -> None:
    config = replace(
        EQUAL, controllers=controllers, engine=replace(EQUAL.engine, max_num_seqs=max_num_seqs)
    )
    # Either of two replicas has four prompts of 30 tokens, each with four responses of 100.
    rounds = 16 // max_num_seqs
    gen_s = 4 * 30 / 1000 + rounds * 100 * (0.03 + 0.001 * max_num_seqs)
    workload = coarse_workload(config.model, config.token_unit, workload_of)
    train_s = 4 * float(workload.group_flops(30, np.full(4, 100))) / (2 * 989e12 * 0.4)
    sync_s = workload.weights_bytes / 10e9
    for step in simulate(config).steps:
        assert step.step_s == pytest.approx(gen_s + train_s + sync_s, abs=1e-6)
        assert step.num_tokens == 8 * 4 * (30 + 100)
        assert step.metrics["perf/tflops/actor"] == pytest.approx(0.4 * 989)
        expected = {"generation": 4 * gen_s, "training": 4 * train_s, "sync": 4 * sync_s}
        assert step.device_s == pytest.approx({**dict.fromkeys(COLUMNS, 0.0), **expected}, abs=1e-5)


SESSIONS = SessionModel(
    turns=LengthModel(median=3, sigma=0),
    message_length=LengthModel(median=20, sigma=0),
    tool_s=LengthModel(median=5, sigma=0),
    start_s=2.0,
)


@pytest.mark.parametrize("controllers", [1, 2])
def test_sessions_of_equal_turns_take_what_the_formula_says(controllers: int) -> None:
    """Engines are idle while the agents start, and while their tools run."""
    engine = replace(EQUAL.engine, max_num_seqs=16)
    config = replace(EQUAL, controllers=controllers, engine=engine, sessions=SESSIONS)
    # Either of two replicas has 16 sessions, each of a prompt of 30 tokens, three turns of 100 and two messages of 20.
    generation_s = 16 * (30 + 2 * 20) / 1000 + 3 * 100 * (0.03 + 0.001 * 16)
    idle_s = 2.0 + 3 * 5.0
    workload = coarse_workload(config.model, config.token_unit, workload_of)
    train_s = 4 * float(workload.group_flops(30, np.full(4, 340))) / (2 * 989e12 * 0.4)
    sync_s = workload.weights_bytes / 10e9
    for step in simulate(config).steps:
        assert step.metrics["timing_s/gen"] == pytest.approx(generation_s + idle_s, abs=1e-6)
        assert step.step_s == pytest.approx(generation_s + idle_s + train_s + sync_s, abs=1e-6)
        assert step.num_tokens == 8 * 4 * (30 + 340)
        assert step.device_s["generation"] == pytest.approx(4 * generation_s, abs=1e-5)
        assert step.device_s["long_tail"] == pytest.approx(4 * idle_s, abs=1e-5)


def test_the_built_in_model_is_qwen_7b() -> None:
    assert coarse_workload("", 16, workload_of).weights_bytes / 2 == pytest.approx(
        7.615e9, rel=1e-3
    )


def test_a_judge_is_waited_for() -> None:
    """Eight places for 32 calls of 5 s, which all begin as the responses end together."""
    judge = RewardModel(latency_s=5.0, latency_sigma=0.0, max_concurrency=8)
    by_rule, judged = (
        simulate(replace(EQUAL, reward=reward)).steps[0] for reward in (EQUAL.reward, judge)
    )
    assert judged.step_s == pytest.approx(by_rule.step_s + 32 / 8 * 5.0, abs=1e-6)
    assert judged.device_s["waiting_for_reward"] + judged.device_s["barriers"] == pytest.approx(
        4 * 20.0, abs=1e-5
    )


DRAWN = SessionModel(
    turns=LengthModel(median=3, sigma=0.5), tool_s=LengthModel(median=2, sigma=1), start_s=1.0
)
EVERYTHING = replace(
    SMALL,
    controllers=3,
    kl_loss_coef=0.1,
    old_log_probs="trainer",
    ppo_mini_batch_size=8,
    reward=RewardModel(
        acceptance=0.6, latency_s=3.0, devices=2, devices_per_replica=1, max_concurrency=4
    ),
)


@pytest.mark.parametrize("sessions", [SessionModel(), DRAWN], ids=["", "sessions"])
@pytest.mark.parametrize("fields", [{}, {"partial_rollout": True}, {"tail_batching": True}])
def test_device_seconds_add_up(fields: dict[str, Any], sessions: SessionModel) -> None:
    steps = simulate(replace(EVERYTHING, sessions=sessions, **fields)).steps
    assert [step.step for step in steps] == [1, 2, 3]
    for step in steps:
        assert step.device_s.keys() == set(COLUMNS)
        assert sum(step.device_s.values()) == pytest.approx(8 * step.step_s, rel=1e-9)
        assert all(step.device_s[work] > 0 for work in WORK)
        assert all(step.device_s[idle] >= -1e-9 for idle in IDLE)
        assert all(load > 0 for load in step.controller_load)
        assert len(step.controller_load) == 3
    assert all(sum(step.device_s[idle] for step in steps) > 0 for idle in IDLE)


class Spy:
    """What the program asked the services of a simulation for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tickets: list[int] = []
        self.updates: list[list[tuple[int, int, float]]] = []
        """Of every update: each sample's name, length and advantage."""
        self.versions: list[set[int]] = []
        spy = self

        class Engine(ModelledEngine):
            def generate(self, requests: Sequence[Request]) -> Any:
                spy.tickets += [
                    int(r.request_id)
                    for r in requests
                    if not r.prefixes and len(r.sample_indices) == r.n
                ]
                return spied(super().generate(requests))

        async def spied(completions: AsyncIterator[Completion]) -> AsyncIterator[Completion]:
            async for completion in completions:
                spy.versions.append(set(completion.weight_versions.tolist()))
                yield completion

        class Learner(ModelledLearner):
            async def train_step(
                self, role: str, micro_batches: Sequence[Sequence[Any]]
            ) -> dict[str, float]:
                spy.updates.append(
                    sorted(
                        (int(s.response_ids[0]), s.response_ids.size, float(s.advantages[0]))
                        for batch in micro_batches
                        for s in batch
                        if s.advantages is not None
                    )
                )
                return await super().train_step(role, micro_batches)

        monkeypatch.setattr(cluster_module, "ModelledEngine", Engine)
        monkeypatch.setattr(cluster_module, "ModelledLearner", Learner)

    @property
    def lengths(self) -> dict[int, int]:
        """Of all responses that were trained on, by name."""
        return {name: size for update in self.updates for name, size, _ in update}


def spied(config: SimulateConfig) -> tuple[Spy, Simulation]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy = Spy(monkeypatch)
        return spy, simulate(config)


@pytest.fixture(scope="module")
def alone() -> tuple[Spy, Simulation]:
    return spied(replace(SMALL, controllers=1))


def test_every_prompt_is_sampled_and_trained_on_once(alone: tuple[Spy, Simulation]) -> None:
    spy, simulation = alone
    assert sorted(spy.tickets) == list(range(len(spy.tickets)))
    # Among 10,000 prompts: some groups were of no use, and others were sampled for them.
    assert (
        len(spy.tickets) == round(simulation.steps[-1].metrics["sampling/epoch"] * 10_000) > 3 * 16
    )
    assert [len(update) for update in spy.updates] == [16 * 4] * 3
    assert len(spy.lengths) == 3 * 16 * 4


@pytest.mark.parametrize("prompts", ["stealing", "own", "shared"])
def test_the_number_of_controllers_changes_no_sample(
    alone: tuple[Spy, Simulation], prompts: Literal["stealing", "own", "shared"]
) -> None:
    spy, simulation = spied(
        replace(
            SMALL, controllers=4, engine=EngineModel(max_num_seqs=8, base_s=0.02, prompts=prompts)
        )
    )
    assert spy.updates == alone[0].updates
    assert sorted(spy.tickets) == sorted(alone[0].tickets)
    assert [s.num_tokens for s in simulation.steps] == [s.num_tokens for s in alone[1].steps]


def test_prompts_are_stolen_where_work_is_skewed() -> None:
    """A few prompts with long responses: what is left of their controllers' slices is generated elsewhere."""
    skewed = SimulateConfig(
        devices=128,
        controllers=16,
        steps=1,
        train_batch_size=512,
        filter_groups=False,
        prompt_share=1.0,
        response_length=LengthModel(median=1500, sigma=1.2),
    )
    own, stealing = (
        simulate(replace(skewed, engine=EngineModel(max_num_seqs=16, prompts=prompts)))
        for prompts in ("own", "stealing")
    )
    assert [s.num_tokens for s in own.steps] == [s.num_tokens for s in stealing.steps]
    own_s, stealing_s = (sum(s.step_s for s in run.steps) for run in (own, stealing))
    assert stealing_s < 0.85 * own_s


def test_partial_rollout_cuts_the_tail_and_no_length(alone: tuple[Spy, Simulation]) -> None:
    spy, simulation = spied(replace(SMALL, partial_rollout=True))
    common = spy.lengths.keys() & alone[0].lengths.keys()
    assert len(common) > 16
    assert {name: spy.lengths[name] for name in common} == {
        name: alone[0].lengths[name] for name in common
    }
    assert any(len(versions) > 1 for versions in spy.versions)
    tails = [
        sum(s.device_s["long_tail"] for s in steps) for steps in (simulation.steps, alone[1].steps)
    ]
    assert tails[0] < tails[1] / 2


def test_a_share_of_groups_has_scores_that_differ() -> None:
    rule = ModelledReward(state(replace(SMALL, reward=RewardModel(acceptance=0.6))), n=4).rule
    groups = [[rule("", str(sample_name(seed, i)), {}) for i in range(4)] for seed in range(4000)]
    assert np.mean([len(set(scores)) > 1 for scores in groups]) == pytest.approx(0.6, abs=0.03)
    assert np.mean(groups) == pytest.approx(0.5, abs=0.03)


def test_lengths_are_log_normal_and_cut() -> None:
    prompts = drawn_prompts(replace(SMALL, token_unit=1), seed=0, longest=256, at_least=20_000)
    lengths = np.array([len(prompt.token_ids) for prompt in prompts])
    assert np.median(lengths) == pytest.approx(64, rel=0.03)
    assert np.std(np.log(lengths)) == pytest.approx(0.5, rel=0.03)
    assert lengths.max() == 256


def state(config: SimulateConfig) -> SharedState:
    """What the services of a cluster without a trainer share."""
    workload = coarse_workload("", config.token_unit, workload_of)
    # A sync takes a second.
    learner = replace(config.learner, sync_gb_per_s=workload.weights_bytes / 1e9)
    modality = SimulatedTokens(config, workload, seed=0, flops=len)
    ledger = RunningLedger(
        num_devices=config.devices, num_reward_devices=0, num_controllers=1, clock=now_s
    )
    return SharedState(
        config=replace(config, learner=learner),
        modality=modality,
        seed=0,
        meter=LoadMeter(1),
        ledger=ledger,
    )


def on_engine(config: SimulateConfig, use: Callable[[ModelledEngine], Any]) -> Any:
    """What ``use`` returns, in simulated time."""

    async def program(_: Context[None]) -> Any:
        return await use(ModelledEngine(state(config), config.num_engine_replicas))

    return run_simulated(program, roles=None)[0]


ONE = replace(
    SMALL,
    devices=2,
    controllers=1,
    engine=EngineModel(base_s=0.03, per_sample_s=0.01, prefill_tokens_per_s=1000),
)


def request(n: int, seed: int = 0, cut_short: tuple[Completion, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=128)
    return Request(
        request_id="r",
        prompt_token_ids=(7,) * 2,
        sampling=sampling,
        n=n,
        seed=seed,
        prefixes=cut_short,
    )


def test_responses_share_the_steps() -> None:
    async def use(engine: ModelledEngine) -> list[tuple[int, float]]:
        clock = asyncio.get_running_loop().time
        return [(c.token_ids.size * 16, clock()) async for c in engine.generate([request(6)])]

    found = on_engine(ONE, use)
    at_s, before = 32 / 1000, 0
    for number, (size, ended_s) in enumerate(found):
        at_s += (size - before) * (0.03 + 0.01 * (6 - number))
        before = size
        assert ended_s == pytest.approx(at_s, abs=1e-6)
    assert len({size for size, _ in found}) > 3


def test_an_aborted_response_continues_to_the_same_length() -> None:
    async def use(
        engine: ModelledEngine,
    ) -> tuple[list[Completion], list[Completion], list[Completion]]:
        whole = [c async for c in engine.generate([request(4)])]

        async def cut() -> list[Completion]:
            return [c async for c in engine.generate([request(4)])]

        task = asyncio.create_task(cut())
        await asyncio.sleep(10)
        await engine.abort(["another"])
        await engine.abort(["r"])
        first = await task
        await engine.update_weights([], version=1)
        cut_short = tuple(c for c in first if c.finish_reason == "abort")
        rest = replace(request(4, cut_short=cut_short), indices=tuple(c.index for c in cut_short))
        return whole, first, [c async for c in engine.generate([rest])]

    whole, first, rest = on_engine(ONE, use)
    assert {c.finish_reason for c in whole} <= {"stop", "length"}
    cut_short = {c.index: c for c in first if c.finish_reason == "abort"}
    # 10 s without 0.032 of prefilling are 142 steps of four responses, which are 8 whole units of 16 tokens.
    assert cut_short
    assert {c.token_ids.size for c in cut_short.values()} == {8}
    lengths = {c.index: c.token_ids.size for c in whole}
    assert {c.index: c.token_ids.size for c in rest} == {i: lengths[i] for i in cut_short}
    assert all(
        set(c.weight_versions[:8]) == {0} and set(c.weight_versions[8:]) == {1} for c in rest
    )


async def first(engine: ModelledEngine) -> int:
    """Entries of a lone response."""
    (completion,) = [c async for c in engine.generate([request(1)])]
    return completion.token_ids.size


def test_a_paused_engine_stands_still() -> None:
    async def use(engine: ModelledEngine) -> list[float]:
        clock = asyncio.get_running_loop().time
        task = asyncio.create_task(first(engine))
        await asyncio.sleep(1)
        with pytest.raises(RolloutError, match="1 samples are unfinished"):
            await engine.sleep()
        await engine.pause()
        await asyncio.sleep(100)
        assert engine.stats().num_running == 1
        await engine.resume()
        size = await task
        await engine.sleep()
        second = asyncio.create_task(first(engine))
        start_s = clock()
        await asyncio.sleep(50)
        assert not second.done()
        with pytest.raises(RolloutError, match="asleep"):
            await engine.update_weights([], version=1)
        await engine.wake()
        await second
        alone_s = 32 / 1000 + size * 16 * 0.04
        return [start_s - 100 - alone_s, clock() - start_s - 50 - alone_s]

    assert on_engine(ONE, use) == pytest.approx([0, 0], abs=1e-6)


def test_micro_batches_are_dealt_there_and_back() -> None:
    assert deal([2.0, 5.0, 1.0, 4.0, 3.0], 2) == [[1, 0, 2], [3, 4]]
    assert deal([2.0, 5.0], 3) == [[1], [0], []]


@pytest.mark.slow
def test_a_controllers_load_is_its_own_code() -> None:
    def spin(seconds: float) -> None:
        end_s = time.thread_time() + seconds
        while time.thread_time() < end_s:
            pass

    meter = LoadMeter(2)

    async def child() -> None:
        spin(0.05)
        await asyncio.sleep(1)
        with meter.exclude():
            spin(0.2)

    async def program(ctx: Context[None]) -> None:
        async def run() -> None:
            if ctx.rank == 1:
                await asyncio.gather(child(), asyncio.create_task(child()))
            await ctx.group.barrier()

        await meter.run(ctx.rank, run())

    run_simulated(program, roles=None, world_size=2)
    idle_s, busy_s = meter.cut()
    # The code of either child is 0.05 s, what it excludes 0.2 s.
    assert idle_s < 0.05
    assert 0.1 <= busy_s < 0.3
    assert meter.cut() == [0.0, 0.0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config.json alone."""
    folder = tmp_path_factory.mktemp("model")
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "vocab_size": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", **shape, **heads}))
    return folder


def test_a_unit_of_tokens_scales_the_work(model: Path) -> None:
    exact, coarse = workload_of(model), coarse_workload(str(model), 64, workload_of)
    assert coarse.flops_per_token == 64 * exact.flops_per_token
    for entries in (1, 10, 100):
        pairs = (64 * entries) * (64 * entries + 1) / 2
        assert coarse.flops(entries) - entries * coarse.flops_per_token == pytest.approx(
            exact.flops_per_attended_pair * pairs, rel=1 / entries
        )
    assert coarse.weights_bytes == 2 * (
        4 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 384) + 2 * 128 * 128
    )


def test_command_prints_its_table(cli: Cli, model: Path) -> None:
    out = cli.ok(
        *(
            "simulate",
            "--devices",
            "16",
            "--controllers",
            "2",
            "--steps",
            "2",
            "--model",
            model,
            "--json",
            "out.json",
        ),
        *("--reward.latency-s", "2", "--reward.devices", "4", "--engine.max-num-seqs", "8"),
    )
    assert "16 simulated devices, 2 controllers, 2 steps" in out
    for row in (
        "step time, mean",
        "tokens a second",
        "idle: long tail of generation",
        "busiest controller's load",
    ):
        assert row in out
    written = json.loads((cli.cwd / "out.json").read_text())
    assert written["config"]["devices"] == 16
    assert [step["step"] for step in written["steps"]] == [1, 2]
    assert all(
        sum(s["device_s"].values()) == pytest.approx(16 * s["step_s"], rel=1e-9)
        for s in written["steps"]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "0"], "devices is 0[:;] .*1"),
        (["--controllers", "0"], "controllers is 0[:;] .*1"),
        (
            ["--token-unit", "100"],
            r"token_unit is 100; expected a divisor of max_prompt_length \(1024\)",
        ),
        (
            ["--devices", "6", "--controllers", "1"],
            r"learner.devices_per_replica is 8; expected a divisor of devices \(6\), such as 2 or 6",
        ),
        (
            ["--devices", "13", "--controllers", "1", "--engine.devices-per-replica", "1"],
            r"learner.devices_per_replica is 8; expected a divisor of devices \(13\), such as 1 or 13",
        ),
        (
            ["--engine.devices-per-replica", "3"],
            "engine.devices_per_replica is 3; expected a divisor of the devices that",
        ),
        (["--engine.base-s", "0"], "engine.base_s is 0.0; expected a finite number above 0"),
        (["--reward.acceptance", "0"], "reward.acceptance is 0.0; expected a number in"),
        (
            ["--reward.devices", "4"],
            r"reward.latency_s is 0; expected above 0 where reward.devices is above 0 \(4\)",
        ),
        (
            ["--reward.devices", "512", "--reward.latency-s", "1"],
            r"expected fewer than devices \(512\)",
        ),
        (
            ["--response-length.median", "inf"],
            "response_length.median is inf; expected a finite number above 0",
        ),
        (
            ["--learner.device", "abacus"],
            "learner.device is 'abacus'; expected one of B200, H200, H100",
        ),
        (["--learner.utilisation", "1.5"], "learner.utilisation is 1.5; expected a number in"),
        (["--prompt-share", "2"], "prompt_share is 2.0; expected a number in"),
        (
            ["--controllers", "300"],
            r"controllers is 300; expected at most the replicas of the engine \(256\)",
        ),
        (["--n", "1"], "rollout.n is 1; expected at least 2 for algorithm.adv_estimator"),
        (["--n", "70000"], "n is 70000; expected at most 65536"),
    ],
)
def test_wrong_settings_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_simulate(options)


def test_wrong_folders_are_refused(cli: Cli) -> None:
    assert "model is 'nowhere'; expected a Hugging Face folder with config.json" in cli.refused(
        "simulate", "--model", "nowhere"
    )
    assert "json is 'no/out.json'; expected a file in an existing" in cli.refused(
        "simulate", "--json", "no/out.json"
    )
    assert not list(cli.cwd.iterdir())


def test_a_run_in_simulated_time(cli: Cli) -> None:
    """``simulate train``: the records of a run, in times that are the same each time; nothing is trained or resumed."""
    args = ["simulate", "train", "--controllers", "2", "--trainer.total-training-steps", "3"]
    args += ["--sim.devices", "16", "--sim.token-unit", "4", "--sim.response-length.median", "20"]
    out = cli.ok(*args, "--sim.reward.latency-s", "2")
    assert "simulated: 16 devices" in out
    assert "export" not in out
    cli.ok(*args, "--sim.reward.latency-s", "2")
    first, second = (step_rows(cli.cwd / "runs" / name) for name in ("default", "default-2"))
    assert first == second
    assert [row["step"] for row in first] == [1, 2, 3]
    for row in first:
        assert row["timing_s/step"] > row["timing_s/reward"] > 1
        assert row["response_length/max"] <= 32 / 4
        assert 0 < row["ledger/idle_share"] < 1
    spans = [
        json.loads(line) for line in (cli.cwd / "runs/default/spans.jsonl").read_text().splitlines()
    ]
    assert spans[1]["start_s"] == pytest.approx(first[0]["timing_s/step"], abs=1e-3)
    assert {"engine 0", "engine 1", "trainer 0", "trainer 1"} <= spans[0]["devices"].keys()
    assert (cli.cwd / "runs/default/report.html").is_file()
    assert not (cli.cwd / "runs/default/export").exists()
    assert "is a run of the command simulate; expected one of train" in cli.refused(
        "sample", "runs/default", "3+4="
    )
    assert cli.ok("report", "runs/default").strip() == "runs/default/report.html"
    for options, message in (
        (
            ["--trainer.schedule", "async"],
            "trainer.schedule is 'async'; expected the schedule 'sync', single turns",
        ),
        (
            ["--sim.token-unit", "5"],
            "sim.token_unit is 5; expected a divisor of data.max_prompt_length (16)",
        ),
        (
            ["--sim.devices", "12"],
            "sim.learner.devices_per_replica is 8; expected a divisor of sim.devices (12)",
        ),
        (["--model", "nowhere"], "model is 'nowhere'"),
        (["--runtime", "ray"], "runtime is 'ray'; expected 'inline' in a simulation"),
        (
            ["--rollout.colocated", "true"],
            "rollout.colocated is true; expected false with a simulation",
        ),
        (
            ["--placement.lend-ranks", "true", "--rollout.num-processes", "1"],
            "false with a simulation, whose roles",
        ),
    ):
        assert message in cli.refused(*args, *options)
