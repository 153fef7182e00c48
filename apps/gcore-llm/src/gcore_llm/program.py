"""The controllers' program: LLM RLHF from generation to training, the same function under every runtime."""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, Program, Recorder, Span, seconds_by_stage
from gcore_llm.config import TrainConfig
from gcore_llm.evaluate import Evaluation, evaluate
from gcore_llm.exchange import sample_flops, split_in_micro_batches
from gcore_llm.groups import Group
from gcore_llm.mismatch import alone, choose, mismatch, probe
from gcore_llm.performance import speed
from gcore_llm.preparation import kl_controller, prepare
from gcore_llm.prompts import PromptSets
from gcore_llm.reward_watch import RewardWatch
from gcore_llm.roles import Roles
from gcore_llm.sampling import Batch, Batches, Sampling, State
from gcore_llm.trainer_worker import has_critic, has_reference, needs_old_log_probs
from gcore_placement import TransformerWorkload
from gcore_rollout import SamplingParams
from gcore_rollout.rewards import Failure
from gcore_runs.devices import generation_metrics, merged
from gcore_runs.job import RunJob
from gcore_runs.learning_signal import SIGNAL
from gcore_runs.spans import on_wall_clock
from gcore_trainer import MicroBatch, Sample


@dataclass(frozen=True, kw_only=True)
class Job(RunJob[TrainConfig]):
    """What the program needs to know beyond its roles."""

    prompts: PromptSets
    workload: TransformerWorkload


def is_evaluation_due(config: TrainConfig, step: int) -> bool:
    """Whether the policy is evaluated after this step."""
    return step % config.trainer.test_freq == 0 or step == config.trainer.total_training_steps


def rlhf_program(job: Job, recorder: Recorder[Evaluation]) -> Program[Roles, None]:
    """The program of one job, to be run by a runtime on every controller."""

    async def program(ctx: Context[Roles]) -> None:
        await _Controller(ctx, job, recorder).run()

    return program


class _Controller:
    """One controller's slice of the run."""

    def __init__(self, ctx: Context[Roles], job: Job, recorder: Recorder[Evaluation]) -> None:
        config = job.config
        self._recorder = recorder
        self._ctx = ctx
        self._job = job
        self._config = config
        self._kl = kl_controller(config.algorithm.kl_ctrl)
        self._cpu_s = time.process_time()
        state = None if job.controllers is None else _share(job.controllers, ctx.rank, ctx.world_size)
        if state is not None:
            self._kl.load_state(state["kl"])
        self._rewards = RewardWatch(ctx.roles, config.reward_calls)
        num_batches = config.trainer.total_training_steps - job.first_step
        self._batches = Batches(ctx, config, num_batches=num_batches)
        self._sampling = Sampling(self._batches.ctx, config, job.prompts, job.workload, state)

    async def run(self) -> None:
        """The rest of the job."""
        ctx, job = self._ctx, self._job
        if job.is_policy_behind:
            await ctx.roles.learner.update_policy(ctx.roles.policy, version=job.first_step)
        else:
            await ctx.roles.learner.check_policy(ctx.roles.policy)
        if not job.is_evaluated:
            await self.evaluate(job.first_step)
        # What came before the first step is no part of it.
        ctx.roles.devices.drain()
        async with self._batches.made_by(self._sampling):
            for step in range(job.first_step + 1, job.config.trainer.total_training_steps + 1):
                await self.step(step)
                if is_evaluation_due(job.config, step):
                    await self.evaluate(step)

    async def evaluate(self, step: int) -> None:
        """Held-out evaluation, recorded by rank 0."""
        if not self._job.prompts.val:
            return
        result = await evaluate(
            self._ctx.roles,
            self._job.prompts.val,
            group=self._ctx.group,
            timer=self._ctx.timer,
            max_tokens=self._config.data.max_response_length,
            temperature=self._config.rollout.temperature,
        )
        failures, _ = self._rewards.merged(await self._ctx.group.all_gather(self._rewards.drain()))
        if self._ctx.rank == 0:
            await self._report(step, failures)
            await self._recorder.evaluated(step, result)
        self._rewards.check()
        self._ctx.timer.drain()
        self._ctx.roles.devices.drain()

    async def step(self, step: int) -> None:
        """Generation, rewarding, preparation, training, and the new weights back to the engine."""
        ctx = self._ctx
        start_s = ctx.clock()
        batch = await self._batches.next()
        metrics = {**batch.metrics, SIGNAL: 0.0}
        if ctx.rank == 0:
            await self._recorder.updating()
        if batch.num_groups:
            metrics |= await self._train(step, batch)
        step_s = ctx.clock() - start_s
        spans = ctx.timer.drain()
        metrics |= _timings(step_s, [*spans, *batch.spans], metrics)
        state = {**batch.state, "kl": self._kl.state()}
        now_s = ctx.clock()
        ahead = {f"sampling {ctx.rank}": on_wall_clock(batch.spans, now_s)} if batch.spans else {}
        generated = Counter(ctx.roles.devices.generated)
        own_devices = ahead | ctx.roles.devices.drain()
        own = (state, on_wall_clock(spans, now_s), own_devices, generated, self._load(step_s), self._rewards.drain())
        states, trained, devices, generated, loads, rewards = zip(*await ctx.group.all_gather(own), strict=True)
        failures, failed = self._rewards.merged(rewards)
        metrics |= generation_metrics(generated) | failed
        if loads[0] is not None:
            metrics |= {"controller/load/max": max(loads), "controller/load/mean": sum(loads) / len(loads)}
        if ctx.rank == 0:
            await self._report(step, failures)
            await self._recorder.stepped(step, metrics, list(trained), merged(devices))
            await self._recorder.reached(step, list(states))
        self._rewards.check()

    async def _report(self, step: int, failures: list[Failure]) -> None:
        if failures:
            await self._recorder.rewards_failed(step, failures)

    async def _train(self, step: int, batch: Batch) -> dict[str, float]:
        """Every update of the step, on all controllers' shares together."""
        ctx, config, share = self._ctx, self._config, batch.share
        size = config.actor.ppo_mini_batch_size or batch.num_groups
        num_updates = -(-batch.num_groups // size)
        # By the weights that are to be trained.
        is_on_policy = num_updates * config.actor.ppo_epochs == 1 and config.trainer.schedule == "sync"
        with ctx.timer.stage("prepare"):
            tickets = sorted(t for part in await ctx.group.all_gather([g.ticket for g in share]) for t in part)
            update_of = {ticket: i % num_updates for i, ticket in enumerate(tickets)}
            scored = await self._scored(share, is_on_policy=is_on_policy)
            compared = await self._mismatch(step, share, scored, is_on_policy=is_on_policy)
            samples, metrics = await prepare(
                share,
                scored,
                config.algorithm,
                kl=self._kl,
                max_response_length=config.data.max_response_length,
                group=ctx.group,
            )
            metrics |= compared
            metrics[SIGNAL] = float(_has_signal(batch.metrics | metrics))
            prepared = list(zip(share, samples, strict=True))
            updates = [
                self._micro_batches([(g, s) for g, s in prepared if update_of[g.ticket] == u])
                for u in range(num_updates)
            ]
        with ctx.timer.stage("train"):
            for _ in range(config.actor.ppo_epochs):
                for update in updates:
                    metrics |= await self._update(step, update)
        with ctx.timer.stage("sync"):
            async with self._batches.changing_weights():
                await ctx.roles.learner.update_policy(ctx.roles.policy, version=step)
                if config.trainer.schedule == "one_step_off" and config.algorithm.max_rollout_kl:
                    metrics |= await self._probe(step, share)
        return metrics

    async def _update(self, step: int, micro_batches: list[MicroBatch]) -> dict[str, float]:
        learner, config = self._ctx.roles.learner, self._config
        metrics: dict[str, float] = {}
        if has_critic(config):
            metrics |= await learner.train_step("critic", micro_batches)
        if not has_critic(config) or step > config.critic.warmup_steps:
            own_flops = sum(sample_flops(self._job.workload, batch) for batch in micro_batches)
            flops = await self._ctx.group.all_reduce(own_flops)
            start_s = self._ctx.clock()
            metrics |= await learner.train_step("actor", micro_batches)
            metrics |= speed(
                flops,
                self._ctx.clock() - start_s,
                num_devices=config.trainer.num_processes,
                device=config.device,
            )
        return metrics

    def _micro_batches(self, groups: list[tuple[Group, list[Sample]]]) -> list[MicroBatch]:
        return [[groups[g][1][i] for g, i in batch] for batch in self._split([group for group, _ in groups])]

    def _split(self, groups: list[Group]) -> list[list[tuple[int, int]]]:
        """Micro-batches of (group index, response index)."""
        return split_in_micro_batches(
            groups,
            workload=self._job.workload,
            max_tokens=self._config.actor.ppo_max_token_len,
            num_multiple=self._ctx.roles.learner.num_replicas,
        )

    async def _scored(self, groups: list[Group], *, is_on_policy: bool) -> list[list[Sample]]:
        """Each group's samples, with what the algorithm needs from the models as they are before the first update."""
        learner, config = self._ctx.roles.learner, self._config
        samples = [g.samples(config.algorithm) for g in groups]
        # One update alone, of samples by the same weights, has ratios of 1, whatever the log-probs are.
        needs_old = _needs_old(config, is_on_policy=is_on_policy)
        if not (needs_old or has_reference(config) or has_critic(config)):
            return samples
        pairs = self._split(groups)
        micro_batches = [[samples[g][i] for g, i in batch] for batch in pairs]
        found: dict[str, list[list[NDArray[Any]]]] = {}
        if needs_old and config.actor.router_replay == "R2":
            routed = await learner.score_and_route(micro_batches)
            found["old_log_probs"] = [[log_probs for log_probs, _ in batch] for batch in routed]
            found["routed_experts"] = [[experts for _, experts in batch] for batch in routed]
        elif needs_old:
            found["old_log_probs"] = await learner.score("actor", micro_batches)
        if has_reference(config):
            found["ref_log_probs"] = await learner.score("reference", micro_batches)
        if has_critic(config):
            found["values"] = await learner.score("critic", micro_batches)
        for b, batch in enumerate(pairs):
            for n, (g, i) in enumerate(batch):
                samples[g][i] = dataclasses.replace(samples[g][i], **{f: values[b][n] for f, values in found.items()})
        return samples

    async def _mismatch(
        self, step: int, groups: list[Group], scored: list[list[Sample]], *, is_on_policy: bool
    ) -> dict[str, float]:
        """Metrics of the engine's log-probs against those of the trainer before its update, which has scored them all
        already, or now scores some.
        """
        ctx, config = self._ctx, self._config
        if not config.algorithm.max_rollout_kl:
            return {}
        version, keeps_cache = ctx.roles.policy.weight_version, config.trainer.schedule == "async"
        if _needs_old(config, is_on_policy=is_on_policy):
            places = [(g, i) for g, samples in enumerate(scored) for i in range(len(samples))]
            known = {(g, i): old for g, i in places if (old := scored[g][i].old_log_probs) is not None}
        else:
            chosen = choose(groups, version, keeps_cache=keeps_cache, seed=self._seed(step))
            found = await self._log_probs(alone(groups, chosen))
            known = dict(zip(chosen, found, strict=True))
        return await mismatch(groups, known, version, keeps_cache=keeps_cache, group=ctx.group)

    async def _probe(self, step: int, groups: list[Group]) -> dict[str, float]:
        """The same of a response that the engine makes for it, with the weights that it and the trainer have now."""
        ctx, data = self._ctx, self._config.data
        sampling = SamplingParams(max_tokens=data.max_response_length, temperature=self._config.rollout.temperature)
        probed = await probe(ctx.roles.policy, groups, sampling, seed=self._seed(step))
        known = {(g, 0): values for g, values in enumerate(await self._log_probs(probed))}
        return await mismatch(probed, known, ctx.roles.policy.weight_version, keeps_cache=False, group=ctx.group)

    async def _log_probs(self, groups: list[Group]) -> list[NDArray[np.float32]]:
        """The trainer's, [R] of each group's first response."""
        pairs = self._split(groups)
        samples = [group.samples(self._config.algorithm)[0] for group in groups]
        found = await self._ctx.roles.learner.score("actor", [[samples[g] for g, _ in batch] for batch in pairs])
        of_group = {
            g: values
            for batch, of_batch in zip(pairs, found, strict=True)
            for (g, _), values in zip(batch, of_batch, strict=True)
        }
        return [of_group[g] for g in range(len(groups))]

    def _seed(self, step: int) -> int:
        """Of what this controller draws for a comparison."""
        return hash((self._config.seed, step, self._ctx.rank)) % 2**63

    def _load(self, step_s: float) -> float | None:
        """The share of a step that this controller's process computed; None if others compute in it."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        return (self._cpu_s - before_s) / step_s if self._ctx.roles.owns_process else None


def _needs_old(config: TrainConfig, *, is_on_policy: bool) -> bool:
    """Whether the trainer scores every response before its first update of a step."""
    return config.algorithm.old_log_probs == "trainer" and (not is_on_policy or needs_old_log_probs(config))


def _has_signal(metrics: dict[str, float]) -> bool:
    """Whether a batch's scores differ, and lead to advantages other than 0 beyond rounding errors."""
    advantages = [abs(metrics.get(f"critic/advantages/{name}", 0.0)) for name in ("min", "max")]
    low, high = metrics.get("critic/score/min", 0.0), metrics.get("critic/score/max", 1.0)
    return low < high and max(advantages) > 1e-6


def _timings(step_s: float, spans: list[Span], metrics: dict[str, float]) -> dict[str, float]:
    return {
        **{f"timing_s/{stage}": value for stage, value in seconds_by_stage(spans).items()},
        "timing_s/step": step_s,
        "perf/throughput": metrics.get("perf/total_num_tokens", 0.0) / step_s,
    }


def _share(states: Sequence[State], rank: int, world_size: int) -> State:
    """A controller's state from those of a run with any number of controllers: each group has one owner again."""
    if len(states) == world_size:
        return states[rank]

    def mine(groups: Iterable[State]) -> list[State]:
        return sorted(groups, key=lambda g: g["ticket"])[rank::world_size]

    first = states[0]
    surplus = mine(group for state in states for group in state["sampler"]["surplus"])
    unfinished = mine(group for state in states for group in state.get("unfinished", []))
    return {**first, "sampler": {**first["sampler"], "surplus": surplus}, "unfinished": unfinished}
