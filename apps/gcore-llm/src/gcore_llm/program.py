"""The controllers' program: LLM RLHF from generation to training, the same function under every runtime."""

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Context, DynamicSampler, Harvest, Program, Span, seconds_by_stage
from gcore_controller.prompts import PromptLoader
from gcore_llm.config import TrainConfig
from gcore_llm.evaluate import Evaluation, evaluate
from gcore_llm.exchange import exchange, sample_flops, split_in_micro_batches
from gcore_llm.generate import Generation
from gcore_llm.groups import Group, UnfinishedGroup
from gcore_llm.learner import has_critic, has_reference, needs_old_log_probs
from gcore_llm.performance import speed
from gcore_llm.preparation import kl_controller, prepare
from gcore_llm.prompts import Prompt, PromptSets
from gcore_llm.roles import Roles
from gcore_llm.spans import on_wall_clock
from gcore_placement import TransformerWorkload
from gcore_rollout import SamplingParams
from gcore_rollout.rewards import part_means
from gcore_trainer import MicroBatch, Sample

State = dict[str, Any]


class Recorder(Protocol):
    """Where rank 0 leaves what happened."""

    async def evaluated(self, step: int, evaluation: Evaluation) -> None: ...

    async def updating(self) -> None:
        """From here to `reached`, the models are between two steps."""
        ...

    async def stepped(self, step: int, metrics: dict[str, float], spans: list[list[Span]]) -> None:
        """A step's metrics, and where its time went on each controller, by rank."""
        ...

    async def reached(self, step: int, controllers: list[State]) -> None:
        """All controllers are at the end of ``step`` with these states; the place to take a checkpoint."""
        ...


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the program needs to know beyond its roles."""

    config: TrainConfig
    prompts: PromptSets
    workload: TransformerWorkload
    first_step: int
    """Steps already made."""
    is_evaluated: bool
    """Whether the evaluation after them, if one is due, is recorded already."""
    controllers: list[State] | None
    """The controllers' states to resume from, by rank."""
    is_policy_behind: bool
    """Whether the engines lack the models' present weights."""


def is_evaluation_due(config: TrainConfig, step: int) -> bool:
    """Whether the policy is evaluated after this step."""
    return step % config.trainer.test_freq == 0 or step == config.trainer.total_training_steps


def rlhf_program(job: Job, recorder: Recorder) -> Program[Roles, None]:
    """The program of one job, to be run by a runtime on every controller."""

    async def program(ctx: Context[Roles]) -> None:
        controller = _Controller(ctx, job, recorder)
        if job.is_policy_behind:
            await ctx.roles.learner.update_policy(ctx.roles.policy, version=job.first_step)
        if not job.is_evaluated:
            await controller.evaluate(job.first_step)
        for step in range(job.first_step + 1, job.config.trainer.total_training_steps + 1):
            await controller.step(step)
            if is_evaluation_due(job.config, step):
                await controller.evaluate(step)

    return program


class _Controller:
    """One controller's slice of the run."""

    def __init__(self, ctx: Context[Roles], job: Job, recorder: Recorder) -> None:
        config = job.config
        self._recorder = recorder
        self._ctx = ctx
        self._job = job
        self._config = config
        self._loader: PromptLoader[Prompt] = PromptLoader(
            job.prompts.train,
            seed=config.data.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.data.num_workers,
        )
        waves = config.algorithm.max_num_gen_batches if config.algorithm.filter_groups else 1
        self._sampler: DynamicSampler[Group] = DynamicSampler(group=ctx.group, max_waves=waves)
        self._kl = kl_controller(config.algorithm.kl_ctrl)
        self._generation = Generation(
            sampler=ctx.roles,
            sampling=SamplingParams(max_tokens=config.data.max_response_length, temperature=config.rollout.temperature),
            n=config.rollout.n,
            seed=config.seed,
            timer=ctx.timer,
            with_greedy=config.algorithm.adv_estimator == "remax",
        )
        self._unfinished: list[UnfinishedGroup] = []
        self._wave_groups: list[Group] = []
        self._num_dropped = 0
        self._cpu_s = time.process_time()
        if job.controllers is not None:
            own = _share(job.controllers, ctx.rank, ctx.world_size)
            self._unfinished = [UnfinishedGroup.from_state(g) for g in own.get("unfinished", [])]
            self._loader.load_state(own["loader"])
            self._kl.load_state(own["kl"])
            self._sampler.load_state(own["sampler"], Group.from_state)

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
        if self._ctx.rank == 0:
            await self._recorder.evaluated(step, result)
        self._ctx.timer.drain()

    async def step(self, step: int) -> None:
        """Generation, rewarding, preparation, training, and the new weights back to the engine."""
        ctx, config = self._ctx, self._config
        start_s = ctx.clock()
        self._wave_groups = []
        self._num_dropped = 0
        self._sampler.surplus = [g for g in self._sampler.surplus if self._is_fresh(g.oldest_version)]
        harvest = await self._sampler.harvest(config.data.train_batch_size, self._sample_wave)
        metrics = await self._sampling_metrics(harvest)
        with ctx.timer.stage("prepare"):
            share = await exchange(harvest.groups, workload=self._job.workload, group=ctx.group)
        if ctx.rank == 0:
            await self._recorder.updating()
        if harvest.num_groups:
            metrics |= await self._train(step, share, harvest.num_groups)
        step_s = ctx.clock() - start_s
        spans = ctx.timer.drain()
        metrics |= _timings(step_s, spans, metrics)
        own = (self._state(), on_wall_clock(spans, ctx.clock()), self._load(step_s))
        states, everyones_spans, loads = zip(*await ctx.group.all_gather(own), strict=True)
        if loads[0] is not None:
            metrics |= {"controller/load/max": max(loads), "controller/load/mean": sum(loads) / len(loads)}
        if ctx.rank == 0:
            await self._recorder.stepped(step, metrics, list(everyones_spans))
            await self._recorder.reached(step, list(states))

    async def _sample_wave(self, count: int) -> list[Group]:
        rollout = self._config.rollout
        if rollout.partial_rollout:
            begun = [(self._fresh(group), self._loader.row(group.ticket)) for group in self._unfinished]
            wanted = math.ceil(count * (1 + rollout.over_sample_rate))
            prompts = self._loader.take(max(0, wanted - len(begun)))
            generated = await self._generation.run(prompts, begun=begun, quota=count)
            self._num_dropped += len(begun)
        else:
            prompts = self._loader.take(count)
            generated = await self._generation.run(prompts)
        groups, self._unfinished = await self._compared(generated.groups), generated.unfinished
        self._wave_groups += groups
        self._num_dropped += len(prompts) - len(groups) - len(self._unfinished)
        return [g for g in groups if g.has_signal] if self._config.algorithm.filter_groups else groups

    async def _compared(self, groups: list[Group]) -> list[Group]:
        """The groups, their responses scored against each other if that is asked for."""
        roles = self._ctx.roles
        if roles.comparison is None:
            return groups
        with self._ctx.timer.stage("reward"):
            return await roles.comparison.run([(g, self._loader.row(g.ticket)) for g in groups], roles.tokenizer)

    def _fresh(self, group: UnfinishedGroup) -> UnfinishedGroup:
        """The group, or nothing but its ticket if it is too old."""
        if group.oldest_version is None or self._is_fresh(group.oldest_version):
            return group
        return UnfinishedGroup(ticket=group.ticket, responses={}, begun=[])

    def _is_fresh(self, version: int) -> bool:
        return self._ctx.roles.policy.weight_version - version <= self._config.rollout.max_staleness

    async def _train(self, step: int, share: list[Group], num_groups: int) -> dict[str, float]:
        """Every update of the step, on all controllers' shares together."""
        ctx, config = self._ctx, self._config
        size = config.actor.ppo_mini_batch_size or num_groups
        num_updates = -(-num_groups // size)
        with ctx.timer.stage("prepare"):
            tickets = sorted(t for part in await ctx.group.all_gather([g.ticket for g in share]) for t in part)
            update_of = {ticket: i % num_updates for i, ticket in enumerate(tickets)}
            samples, metrics = await prepare(
                share,
                await self._scored(share, is_one_update=num_updates * config.actor.ppo_epochs == 1),
                config.algorithm,
                kl=self._kl,
                max_response_length=config.data.max_response_length,
                group=ctx.group,
            )
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
            await ctx.roles.learner.update_policy(ctx.roles.policy, version=step)
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

    async def _scored(self, groups: list[Group], *, is_one_update: bool) -> list[list[Sample]]:
        """Each group's samples, with what the algorithm needs from the models as they are before the first update."""
        learner, config = self._ctx.roles.learner, self._config
        samples = [g.samples(config.algorithm) for g in groups]
        # One update alone has ratios of 1, whatever the log-probs are.
        needs_old = config.algorithm.old_log_probs == "trainer" and (not is_one_update or needs_old_log_probs(config))
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

    async def _sampling_metrics(self, harvest: Harvest[Group]) -> dict[str, float]:
        """What was sampled in this step, over all controllers, kept or not."""
        own = np.array(
            [
                (r.score, r.token_ids.size, r.truncated, g.prompt_ids.size)
                for g in self._wave_groups
                for r in g.responses
            ],
            np.float64,
        ).reshape(-1, 4)
        versions = [g.oldest_version for g in harvest.groups]
        parts = [r.parts for g in self._wave_groups for r in g.responses if r.parts]
        everyones = await self._ctx.group.all_gather((own, versions, parts, self._num_dropped, len(self._unfinished)))
        rows = np.concatenate([mine for mine, *_ in everyones])
        oldest = min((v for _, mine, *_ in everyones for v in mine), default=0)
        metrics = {
            "sampling/waves": float(harvest.num_waves),
            "sampling/acceptance": harvest.num_kept / max(harvest.num_sampled, 1),
            "sampling/groups": float(harvest.num_groups),
            "sampling/oldest_version": float(oldest),
            "sampling/dropped_groups": float(sum(dropped for *_, dropped, _ in everyones)),
            "sampling/unfinished_groups": float(sum(unfinished for *_, unfinished in everyones)),
            "sampling/epoch": self._loader.epoch,
        }
        if len(rows):
            scores, lengths, truncated, prompts = rows.T
            metrics |= {
                "critic/score/mean": scores.mean(),
                "critic/score/max": scores.max(),
                "critic/score/min": scores.min(),
                "response_length/mean": lengths.mean(),
                "response_length/max": lengths.max(),
                "response_length/clip_ratio": truncated.mean(),
                "prompt_length/mean": prompts.mean(),
                "perf/total_num_tokens": lengths.sum() + prompts.sum(),
            }
        metrics |= part_means(p for _, _, mine, *_ in everyones for p in mine)
        return {name: float(value) for name, value in metrics.items()}

    def _load(self, step_s: float) -> float | None:
        """The share of a step that this controller's process computed; None if others compute in it."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        return (self._cpu_s - before_s) / step_s if self._ctx.roles.owns_process else None

    def _state(self) -> State:
        return {
            "loader": self._loader.state(),
            "sampler": self._sampler.state(Group.state),
            "kl": self._kl.state(),
            "unfinished": [group.state() for group in self._unfinished],
        }


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
