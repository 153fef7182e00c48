"""Language models as a modality of the RLHF loop: responses and their rewards, and updates of policy and critic."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_controller import (
    Context,
    Generated,
    Modality,
    Prepared,
    State,
    TrainingBatch,
    Wave,
)
from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import Prompt, PromptSets
from gcore_llm.learning.micro_batches import group_costs, sample_flops, split_in_micro_batches
from gcore_llm.learning.mismatch import choose, mismatch, probe, single_responses
from gcore_llm.learning.performance import speed
from gcore_llm.learning.preparation import kl_controller, prepare
from gcore_llm.learning.trainer_worker import has_critic, has_reference, needs_old_log_probs
from gcore_llm.roles import Roles
from gcore_llm.sampling.evaluate import Evaluation, evaluate
from gcore_llm.sampling.generate import Generation
from gcore_llm.sampling.groups import Group, UnfinishedGroup
from gcore_placement import TransformerWorkload, balance
from gcore_rollout import EpisodeEnd, SamplingParams, part_means
from gcore_runs.loop.recorder import RunJob
from gcore_trainer import MicroBatch, Sample

_SampledPart = tuple[NDArray[np.float64], list[Mapping[str, float]], Counter[str]]
"""[N, 4] score, length, whether it was cut off, and prompt length of each response; parts of the scores; ends of
episodes."""


@dataclass(frozen=True, kw_only=True)
class Job(RunJob[TrainConfig]):
    """A run of the RLHF program: where it starts, its prompts, and the cost model of its policy."""

    prompts: PromptSets
    workload: TransformerWorkload

    def modality(self) -> "LLM":
        """See `RunJob.modality`."""
        return LLM(self)


class LLM(Modality[Roles, Prompt, Group, list[MicroBatch], Evaluation]):
    """Groups of responses to a prompt; an update is a list of micro-batches of packed samples."""

    throughput_of = "perf/total_num_tokens"

    def __init__(self, job: Job) -> None:
        self._job = job
        self._config = job.config
        self._workload = job.workload
        self._kl = kl_controller(job.config.algorithm.kl_ctrl)
        self._sampling = SamplingParams(
            max_tokens=job.config.data.max_response_length, temperature=job.config.rollout.temperature
        )

    @property
    def prompts(self) -> Sequence[Prompt]:
        """See `Modality.prompts`."""
        return self._job.prompts.train

    def failure_logs(self, ctx: Context[Roles]) -> Sequence[Any]:
        """See `Modality.failure_logs`."""
        roles = ctx.roles
        callers = (roles.reward, roles.comparison and roles.comparison.runner, roles.environment)
        return [caller.failures for caller in callers if caller is not None]

    def takes_prompts(self, ctx: Context[Roles]) -> bool:
        """Return whether the engine is the controller's own; a shared one needs no prompts from other controllers."""
        return ctx.roles.policy_slots is not None

    async def generate(self, ctx: Context[Roles], wave: Wave[Prompt]) -> Generated[Group]:
        """See `Modality.generate`."""
        generation = Generation(
            sampler=ctx.roles,
            sampling=self._sampling,
            n=self._config.rollout.n,
            seed=self._config.seed,
            timer=ctx.timer,
            with_greedy=self._config.algorithm.estimator.needs_greedy,
            comparison=ctx.roles.comparison,
        )
        return await generation.run(wave.prompts, unfinished=wave.unfinished, quota=wave.quota, take=wave.take)

    def group_from_state(self, state: State) -> Group:
        """See `Modality.group_from_state`."""
        return Group.from_state(state)

    def unfinished_from_state(self, state: State) -> UnfinishedGroup:
        """See `Modality.unfinished_from_state`."""
        return UnfinishedGroup.from_state(state)

    async def sampled_part(self, ctx: Context[Roles], groups: Sequence[Group]) -> _SampledPart:
        """See `Modality.sampled_part`."""
        del ctx
        rows = np.array(
            [(r.score, r.token_ids.size, r.truncated, g.prompt_ids.size) for g in groups for r in g.responses],
            np.float64,
        ).reshape(-1, 4)
        parts = [r.parts for g in groups for r in g.responses if r.parts]
        ends = Counter[str](r.end for g in groups for r in g.responses if r.end is not None)
        return rows, parts, ends

    def sampled_metrics(self, parts: Sequence[_SampledPart]) -> dict[str, float]:
        """See `Modality.sampled_metrics`; names are verl's."""
        rows = np.concatenate([own for own, *_ in parts])
        metrics: dict[str, float] = {}
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
        metrics |= part_means(part for _, own, _ in parts for part in own)
        metrics |= _episode_ends(sum((own for *_, own in parts), start=Counter[str]()))
        return {name: float(value) for name, value in metrics.items()}

    def costs(self, groups: Sequence[Group]) -> list[float]:
        """Return the simulated FLOPs of training on each group."""
        return group_costs(self._workload, groups)

    def balance(self, costs: list[float], num_parts: int) -> Sequence[Sequence[int]]:
        """Divide groups so that every controller has about the same simulated work."""
        return [part.tolist() for part in balance(costs, num_parts)]

    async def prepare(self, ctx: Context[Roles], step: int, batch: TrainingBatch[Group]) -> Prepared[list[MicroBatch]]:
        """See `Modality.prepare`: score by the models in training, compute advantages, split in micro-batches."""
        config, groups = self._config, batch.groups
        num_updates = -(-batch.num_groups // (config.actor.ppo_mini_batch_size or batch.num_groups))
        # A batch is on-policy if the weights that generated it are those that its one update changes.
        is_on_policy = num_updates * config.actor.ppo_epochs == 1 and config.trainer.schedule == "sync"
        indices = sorted(i for part in await ctx.group.all_gather([g.prompt_index for g in groups]) for i in part)
        update_of = {index: place % num_updates for place, index in enumerate(indices)}
        scored = await self._scored(ctx, groups, is_on_policy=is_on_policy)
        compared = await self._mismatch(ctx, step, groups, scored, is_on_policy=is_on_policy)
        samples, metrics = await prepare(
            groups,
            scored,
            config.algorithm,
            kl=self._kl,
            max_response_length=config.data.max_response_length,
            group=ctx.group,
        )
        metrics |= compared
        metrics[self.HAS_SIGNAL] = float(_has_signal(batch.metrics | metrics))
        prepared = list(zip(groups, samples, strict=True))
        updates = [
            self._micro_batches(ctx, [(g, s) for g, s in prepared if update_of[g.prompt_index] == update])
            for update in range(num_updates)
        ]
        return Prepared(updates=updates * config.actor.ppo_epochs, metrics=metrics)

    async def update(self, ctx: Context[Roles], step: int, update: list[MicroBatch]) -> dict[str, float]:
        """See `Modality.update`; the critic, if there is one, is updated first."""
        learner, config = ctx.roles.learner, self._config
        metrics: dict[str, float] = {}
        if has_critic(config):
            metrics |= await learner.train_step("critic", update)
        if not has_critic(config) or step > config.critic.warmup_steps:
            own_flops = sum(sample_flops(self._workload, batch) for batch in update)
            flops = await ctx.group.all_reduce(own_flops)
            start_s = ctx.clock()
            metrics |= await learner.train_step("actor", update)
            metrics |= speed(
                flops,
                ctx.clock() - start_s,
                num_devices=config.trainer.num_processes,
                device=config.device,
            )
        return metrics

    async def synced_metrics(self, ctx: Context[Roles], step: int, batch: TrainingBatch[Group]) -> dict[str, float]:
        """Compare engine and trainer on a response generated now, where batches are never by the present weights."""
        if self._config.trainer.schedule != "one_step_off" or not self._config.algorithm.max_rollout_kl:
            return {}
        policy = ctx.roles.policy
        probed = await probe(policy, batch.groups, self._sampling, seed=self._seed(ctx, step))
        known = {(g, 0): values for g, values in enumerate(await self._log_probs(ctx, probed))}
        return await mismatch(probed, known, policy.weight_version, keeps_cache=False, group=ctx.group)

    async def evaluate(self, ctx: Context[Roles], step: int) -> Evaluation | None:
        """See `Modality.evaluate`."""
        del step
        if not self._job.prompts.val:
            return None
        return await evaluate(
            ctx.roles,
            self._job.prompts.val,
            group=ctx.group,
            timer=ctx.timer,
            max_tokens=self._sampling.max_tokens,
            temperature=self._sampling.temperature,
        )

    def state(self) -> State:
        """Return the state of the KL penalty."""
        return {"kl": self._kl.state()}

    def load_state(self, state: State) -> None:
        """See `Modality.load_state`."""
        self._kl.load_state(state["kl"])

    async def _scored(self, ctx: Context[Roles], groups: list[Group], *, is_on_policy: bool) -> list[list[Sample]]:
        """Return each group's samples, scored as the algorithm needs by the models before their first update."""
        learner, config = ctx.roles.learner, self._config
        samples = [g.samples(config.algorithm) for g in groups]
        # A single update of on-policy samples has ratios of 1, whatever the log-probs are.
        needs_old = _needs_old(config, is_on_policy=is_on_policy)
        if not (needs_old or has_reference(config) or has_critic(config)):
            return samples
        pairs = self._split(ctx, groups)
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
        self,
        ctx: Context[Roles],
        step: int,
        groups: list[Group],
        scored: list[list[Sample]],
        *,
        is_on_policy: bool,
    ) -> dict[str, float]:
        """Return metrics of the engine's log-probs against the trainer's, which scores some responses if needed."""
        config = self._config
        if not config.algorithm.max_rollout_kl:
            return {}
        version, keeps_cache = ctx.roles.policy.weight_version, config.trainer.schedule == "async"
        if _needs_old(config, is_on_policy=is_on_policy):
            places = [(g, i) for g, samples in enumerate(scored) for i in range(len(samples))]
            known = {(g, i): old for g, i in places if (old := scored[g][i].old_log_probs) is not None}
        else:
            chosen = choose(groups, version, keeps_cache=keeps_cache, seed=self._seed(ctx, step))
            known = dict(zip(chosen, await self._log_probs(ctx, single_responses(groups, chosen)), strict=True))
        return await mismatch(groups, known, version, keeps_cache=keeps_cache, group=ctx.group)

    async def _log_probs(self, ctx: Context[Roles], groups: list[Group]) -> list[NDArray[np.float32]]:
        """Return the trainer's log-probs, [R], of each group's first response."""
        pairs = self._split(ctx, groups)
        samples = [group.samples(self._config.algorithm)[0] for group in groups]
        found = await ctx.roles.learner.score("actor", [[samples[g] for g, _ in batch] for batch in pairs])
        of_group = {
            g: values
            for batch, of_batch in zip(pairs, found, strict=True)
            for (g, _), values in zip(batch, of_batch, strict=True)
        }
        return [of_group[g] for g in range(len(groups))]

    def _micro_batches(self, ctx: Context[Roles], groups: list[tuple[Group, list[Sample]]]) -> list[MicroBatch]:
        return [[groups[g][1][i] for g, i in batch] for batch in self._split(ctx, [group for group, _ in groups])]

    def _split(self, ctx: Context[Roles], groups: list[Group]) -> list[list[tuple[int, int]]]:
        """Return micro-batches of (group index, response index)."""
        return split_in_micro_batches(
            groups,
            workload=self._workload,
            max_tokens=self._config.actor.ppo_max_token_len,
            num_multiple=ctx.roles.learner.num_replicas,
        )

    def _seed(self, ctx: Context[Roles], step: int) -> int:
        """Return the seed of this controller's choices for a comparison."""
        return hash((self._config.seed, step, ctx.rank)) % 2**63


def _needs_old(config: TrainConfig, *, is_on_policy: bool) -> bool:
    """Return whether the trainer scores every response before its first update of a step."""
    return config.algorithm.old_log_probs == "trainer" and (not is_on_policy or needs_old_log_probs(config))


def _has_signal(metrics: dict[str, float]) -> bool:
    """Return whether a batch's scores differ, and lead to advantages other than 0 beyond rounding errors."""
    advantages = [abs(metrics.get(f"critic/advantages/{name}", 0.0)) for name in ("min", "max")]
    low, high = metrics.get("critic/score/min", 0.0), metrics.get("critic/score/max", 1.0)
    return low < high and max(advantages) > 1e-6


def _episode_ends(ends: Counter[str]) -> dict[str, float]:
    """Return the fraction of episodes that ended in each way; nothing for responses of one turn."""
    total = ends.total()
    return {f"multi_turn/end/{end}": ends[end] / total for end in get_args(EpisodeEnd)} if total else {}
