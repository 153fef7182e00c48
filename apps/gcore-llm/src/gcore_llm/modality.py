"""Language models as a modality of the RLHF loop: responses and their rewards, and updates of policy and critic."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import (
    Context,
    DeviceTimers,
    Generated,
    Modality,
    Prepared,
    State,
    TrainerClient,
    TrainingBatch,
    Wave,
)
from gcore_llm.config import TrainConfig
from gcore_llm.evaluation.evaluate import TextEvaluation, evaluate, val_sets
from gcore_llm.learning.comparison import (
    ScoredResponse,
    choose,
    comparable,
    is_probed,
    mismatch,
    probe,
    warning,
)
from gcore_llm.learning.preparation import (
    GAME_COLUMN,
    group_costs,
    has_signal,
    prepare,
    sample_flops,
    samples_to_show,
    speed,
    split_in_micro_batches,
    unscored_samples,
)
from gcore_llm.learning.teacher_prompts import count_teacher_tokens, show_to_teachers
from gcore_llm.learning.trainer_worker import (
    SHARP_ACTOR,
    has_critic,
    has_reference,
    needs_old_log_probs,
)
from gcore_llm.prompts import PromptSets
from gcore_llm.sampling import sampling_params
from gcore_placement import PlacementError, TransformerWorkload, balance
from gcore_rollout import (
    FailureLog,
    Generation,
    Group,
    LengthHistory,
    Prompt,
    RewardRunner,
    RolloutRoles,
    RunningEpisodes,
    SampledPart,
    sampled_metrics,
    sampled_part,
)
from gcore_runs import STAGE_CELLS, BaseRunRecorder, Cell, RunJob, model_folder, write_jsonl
from gcore_trainer import KLController, MicroBatch, Sample, add_distillation

_logger = logging.getLogger(__name__)

_PROBE_TOKENS = 32
_MANY = 0.5
"""Fraction of a step's episodes that is reported if they were cut off."""

_CUT_OFF = {
    "truncated_turn": "a turn was cut off before its end, so the environment could not answer it; a higher "
    "rollout.multi_turn.max_tokens_per_turn, or 0, lets turns end",
    "length": "the tokens of all turns were used up; a higher data.max_response_length gives them more",
}
"""The cause, and what helps, for each kind of end of an episode."""


@dataclass(frozen=True, kw_only=True)
class SamplingRoles(RolloutRoles):
    """The roles that sample and score."""

    devices: DeviceTimers = field(default_factory=DeviceTimers)
    """Times the work of the policy's engines and of the training ranks."""
    graders: Mapping[str, RewardRunner] = field(default_factory=dict[str, RewardRunner])
    """The rewards that held-out sets have in place of the run's, by the set's name."""

    def failure_logs(self) -> list[FailureLog]:
        return super().failure_logs() + [runner.failures for runner in self.graders.values()]


@dataclass(frozen=True, kw_only=True)
class Roles(SamplingRoles):
    """The roles that a controller holds."""

    learner: TrainerClient[MicroBatch]
    owns_process: bool = False
    """Whether only the controller computes in its process."""


@dataclass(frozen=True, kw_only=True)
class LLMJob(RunJob[TrainConfig]):
    """A run of the RLHF program: where it starts, its prompts, and the cost model of its policy."""

    prompts: PromptSets
    workload: TransformerWorkload

    def modality(self) -> "LLM":
        return LLM(self)


class LLM(Modality[Roles, Prompt, Group, list[MicroBatch], TextEvaluation]):
    """Groups of responses to a prompt; an update is a list of micro-batches of packed samples."""

    throughput_of = "perf/total_num_tokens"

    def __init__(self, job: LLMJob) -> None:
        config = job.config
        self._job = job
        self._config = config
        self._workload = job.workload
        self._kl = KLController(config.algorithm.kl_ctrl)
        self._baselines: dict[str, float] = {}
        self._columns = config.distillation.columns
        if config.algorithm.estimator.moves_baselines:
            self._columns.append(GAME_COLUMN)
        self._sampling = sampling_params(config)
        self._with_greedy = config.algorithm.estimator.needs_greedy
        self._has_critic = has_critic(config)
        self._has_reference = has_reference(config)
        self._distillation = config.distillation
        self._teacher_tokens = count_teacher_tokens(config) if config.distillation.prompt else 0
        self._keeps_cache = config.trainer.schedule == "async"
        self._probed_schedule = config.trainer.schedule if config.algorithm.max_rollout_kl else None
        self._history = LengthHistory()
        self._running: RunningEpisodes | None = None
        self._probed: list[Group] = []
        """Positions of the step's responses at which the engine's distribution is compared with the trainer's."""
        self.saves_evaluated = config.trainer.export == "best"

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._job.prompts.train

    def drain_failures(self, ctx: Context[Roles]) -> tuple[int, list[Any]]:
        num_calls = 0
        all_failures: list[Any] = []
        for log in ctx.roles.failure_logs():
            calls, failures = log.drain()
            num_calls += calls
            all_failures.extend(failures)
        return num_calls, all_failures

    def takes_prompts(self, ctx: Context[Roles]) -> bool:
        """Return whether the engine is the controller's own; a shared one needs no prompts from other controllers."""
        return ctx.roles.policy_slots is not None

    def expected_work(self, prompt: Prompt) -> float:
        return float(self._history.expected(prompt) or self._sampling.max_tokens)

    async def generate(self, ctx: Context[Roles], wave: Wave[Prompt]) -> Generated[Group]:
        limit = self._sampling.max_tokens
        max_tokens = min(limit, wave.max_length or limit)
        if wave.quota is not None and self._running is None:
            self._running = RunningEpisodes(ctx.roles.policy)
        generation = Generation(
            roles=ctx.roles,
            sampling=replace(self._sampling, max_tokens=max_tokens),
            n=self._config.rollout.n,
            seed=self._config.seed,
            time_stage=ctx.timer.stage,
            with_greedy=self._with_greedy,
            compares=True,
            quota=wave.quota,
            may_stop=wave.may_stop,
            slots=None if wave.quota is None else self._count_slots(ctx),
            running=self._running,
            columns=self._columns,
            credits_steps=self._config.algorithm.estimator.reads_steps,
            history=self._history,
            defers=max_tokens < limit,
        )
        groups, unfinished = await generation.run(
            wave.prompts, unfinished=wave.unfinished, take=wave.take
        )
        probes = self._probed_schedule == "sync" and is_probed(wave.step)
        if probes and not self._probed:
            seed = self._seed(ctx, wave.step)
            with ctx.timer.stage("gen"):
                self._probed = await probe(ctx.roles.policy, groups, self._sampling, seed=seed)
        measured = await ctx.group.all_gather(generation.measured)
        self._history.add(list(chain.from_iterable(measured)))
        return Generated(groups=groups, unfinished=unfinished, deferred=generation.deferred)

    def _count_slots(self, ctx: Context[Roles]) -> int:
        """Return how many responses the engine has keys and values for, or this controller's share of them."""
        num_slots = ctx.roles.policy.stats().num_slots or self._config.rollout.planned_num_seqs
        if ctx.roles.policy_slots is None:
            num_slots //= ctx.group.world_size
        return max(num_slots, 1)

    def longest(self, group: Group) -> int:
        return int(group.lengths.max())

    def group_from_state(self, state: State) -> Group:
        return Group.from_state(state)

    def drop(self, group: Group) -> None:
        if self._running is not None:
            self._running.cancel(f"{group.prompt_index}/")

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()

    async def sampled_part(self, ctx: Context[Roles], groups: Sequence[Group]) -> SampledPart:
        del ctx
        return sampled_part(groups)

    def sampled_metrics(self, parts: Sequence[SampledPart]) -> dict[str, float]:
        return sampled_metrics(parts)

    def costs(self, groups: Sequence[Group]) -> list[float]:
        """Return the simulated FLOPs of training on each group."""
        return group_costs(self._workload, groups)

    def balance(self, costs: list[float], num_parts: int) -> Sequence[Sequence[int]]:
        """Divide groups so that every controller has about the same simulated work."""
        return [part.tolist() for part in balance(costs, num_parts)]

    async def prepare(
        self, ctx: Context[Roles], step: int, batch: TrainingBatch[Group]
    ) -> Prepared[list[MicroBatch]]:
        config = self._config
        groups = batch.groups
        num_updates = -(-batch.num_groups // (config.actor.ppo_mini_batch_size or batch.num_groups))
        # A batch is on-policy if the weights that generated it are those that its one update changes. A single update
        # of on-policy samples has ratios of 1, whatever the log-probs are.
        is_on_policy = (
            num_updates * config.actor.ppo_epochs == 1 and config.trainer.schedule == "sync"
        )
        needs_old = config.algorithm.old_log_probs == "trainer" and (
            not is_on_policy or needs_old_log_probs(config)
        )
        indices = sorted(
            chain.from_iterable(await ctx.group.all_gather([g.prompt_index for g in groups]))
        )
        update_of = {index: i % num_updates for i, index in enumerate(indices)}
        samples = [unscored_samples(group, config.algorithm) for group in groups]
        await self._score(ctx, groups, samples, needs_old=needs_old)
        mismatch_metrics = await self._mismatch(ctx, step, groups, samples if needs_old else None)
        metrics = await prepare(
            groups,
            samples,
            config.algorithm,
            kl=self._kl,
            baselines=self._baselines,
            max_response_length=config.data.max_response_length,
            group=ctx.group,
        )
        metrics |= mismatch_metrics
        is_taught = self._distillation.is_used
        if is_taught:
            teacher_log_probs = await self._score_by_teachers(ctx, groups, samples)
            metrics |= await add_distillation(
                samples, teacher_log_probs, ctx.group.all_gather, coef=self._distillation.coef
            )
        scores_steps = config.algorithm.estimator.reads_steps
        needs_scores = not (is_taught or scores_steps) and config.rollout.agent.credit == "session"
        signal = has_signal(batch.metrics | metrics, needs_scores=needs_scores)
        metrics[self.HAS_SIGNAL] = float(signal or config.algorithm.learns_environment)
        updates: list[list[MicroBatch]] = []
        for update in range(num_updates):
            update_groups: list[Group] = []
            update_samples: list[list[Sample]] = []
            for group, group_samples in zip(groups, samples, strict=True):
                if update_of[group.prompt_index] == update:
                    update_groups.append(group)
                    update_samples.append(group_samples)
            updates.append(self._micro_batches(ctx, update_groups, update_samples))
        return Prepared(
            updates=updates * config.actor.ppo_epochs, metrics=metrics, of_groups=samples
        )

    async def update(
        self, ctx: Context[Roles], step: int, update: list[MicroBatch]
    ) -> dict[str, float]:
        learner = ctx.roles.learner
        config = self._config
        metrics: dict[str, float] = {}
        if self._has_critic:
            metrics |= await learner.train_step("critic", update)
            if step <= config.critic.warmup_steps:
                return metrics
        flops = await ctx.group.all_reduce(
            sum(sample_flops(self._workload, batch) for batch in update)
        )
        start_s = ctx.clock()
        metrics |= await learner.train_step("actor", update)
        train_s = ctx.clock() - start_s
        return metrics | speed(
            flops, train_s, num_devices=config.trainer.num_processes, device=config.device
        )

    def update_metrics(self, updates: Sequence[dict[str, float]]) -> dict[str, float]:
        """Return each metric's last value."""
        last: dict[str, float] = {}
        for metrics in updates:
            last |= metrics
        return last

    async def update_weights(self, ctx: Context[Roles], step: int) -> None:
        policy = ctx.roles.policy
        await ctx.roles.learner.update_weights(policy, version=step)
        episodes = ctx.roles.episodes
        if episodes is not None and episodes.record_weights is not None:
            episodes.record_weights(step, policy.weight_version)

    async def synced_metrics(
        self, ctx: Context[Roles], step: int, batch: TrainingBatch[Group]
    ) -> dict[str, float]:
        """Compare engine and trainer on responses generated now, where batches are never by the present weights."""
        if self._probed_schedule != "one_step_off":
            return {}
        policy = ctx.roles.policy
        probed = await probe(
            policy,
            batch.groups,
            self._sampling,
            seed=self._seed(ctx, step),
            num_tokens=_PROBE_TOKENS,
        )
        scored = await self._score_responses(ctx, probed)
        return await mismatch(
            chain.from_iterable(scored),
            policy.weight_version,
            keeps_cache=False,
            probed=scored,
            group=ctx.group,
        )

    def samples(
        self,
        ctx: Context[Roles],
        step: int,
        batch: TrainingBatch[Group],
        prepared: Prepared[list[MicroBatch]] | None,
    ) -> Sequence[tuple[int, dict[str, Any]]]:
        trained: list[tuple[Group, list[Sample]]] = []
        if prepared:
            trained.extend(zip(batch.groups, prepared.of_groups, strict=True))
        return samples_to_show(
            trained, batch.filtered, step, ctx.roles.tokenizer, self._config.trainer.log_samples
        )

    async def evaluate(self, ctx: Context[Roles], step: int) -> TextEvaluation | None:
        del step
        if not self._job.prompts.num_held_out:
            return None
        sets = val_sets(self._job.prompts, self._config, ctx.roles.graders)
        return await evaluate(ctx.roles, sets, group=ctx.group, timer=ctx.timer, clock=ctx.clock)

    def sampling_state(self) -> State:
        """Return the lengths of earlier responses."""
        return {"lengths": self._history.state()}

    def state(self) -> State:
        """Return the state of the KL penalty, and the baselines of roles."""
        return {"kl": self._kl.state(), "baselines": dict(self._baselines)}

    def load_state(self, state: State) -> None:
        self._kl.load_state(state["kl"])
        self._baselines = dict(state.get("baselines", {}))
        if "lengths" in state:
            self._history.load_state(state["lengths"])

    async def _score(
        self,
        ctx: Context[Roles],
        groups: list[Group],
        samples: list[list[Sample]],
        *,
        needs_old: bool,
    ) -> None:
        """Set the scores that the algorithm needs, by the models before their first update."""
        if not (needs_old or self._has_reference or self._has_critic):
            return
        micro_batches = self._micro_batches(ctx, groups, samples)
        field_of_role: dict[str, str] = {}
        if needs_old and self._config.actor.router_replay != "disabled":
            for sample, (log_probs, experts) in await self._scores(
                ctx, "actor", micro_batches, with_routing=True
            ):
                sample.old_log_probs = log_probs
                sample.routed_experts = experts
        elif needs_old:
            field_of_role["actor"] = "old_log_probs"
        if self._config.algorithm.estimator.needs_squared_norms:
            field_of_role[SHARP_ACTOR] = "sharp_log_probs"
        if self._has_reference:
            field_of_role["reference"] = "ref_log_probs"
        if self._has_critic:
            field_of_role["critic"] = "values"
        for role, name in field_of_role.items():
            for sample, scores in await self._scores(ctx, role, micro_batches):
                setattr(sample, name, scores)

    async def _scores(
        self,
        ctx: Context[Roles],
        role: str,
        micro_batches: list[MicroBatch],
        *,
        with_routing: bool = False,
    ) -> list[tuple[Sample, Any]]:
        """Return the samples with a model's scores."""
        scores = await ctx.roles.learner.score(role, micro_batches, with_routing=with_routing)
        return list(
            zip(chain.from_iterable(micro_batches), chain.from_iterable(scores), strict=True)
        )

    async def _score_by_teachers(
        self, ctx: Context[Roles], groups: list[Group], samples: list[list[Sample]]
    ) -> list[list[NDArray[np.floating] | None]]:
        """Return the mean of the teachers' log-probs, [R] of each sample; None where a prompt has no teacher."""
        taught = show_to_teachers(
            groups, samples, ctx.roles.tokenizer, self._config, max_tokens=self._teacher_tokens
        )
        means: dict[int, NDArray[np.floating]] = {}
        for role in self._distillation.roles or ("actor",):
            targets: dict[int, tuple[int, float]] = {}
            role_groups: list[Group] = []
            role_samples: list[list[Sample]] = []
            for group, seen, written in taught:
                source = str(group.columns.get(self._distillation.source_key, ""))
                share = self._distillation.shares(source).get(role)
                if share:
                    for sample, own in zip(seen, written, strict=True):
                        targets[id(sample)] = id(own), share
                    role_groups.append(group)
                    role_samples.append(seen)
            micro_batches = self._micro_batches(ctx, role_groups, role_samples)
            for sample, log_probs in await self._scores(ctx, role, micro_batches):
                key, share = targets[id(sample)]
                weighted = share * log_probs
                means[key] = means[key] + weighted if key in means else weighted
        return [[means.get(id(sample)) for sample in group_samples] for group_samples in samples]

    async def _mismatch(
        self, ctx: Context[Roles], step: int, groups: list[Group], scored: list[list[Sample]] | None
    ) -> dict[str, float]:
        """Return metrics of the engine's log-probs against the trainer's, which scores some responses if none is."""
        if not self._config.algorithm.max_rollout_kl:
            return {}
        version = ctx.roles.policy.weight_version
        responses: list[ScoredResponse] = []
        chosen: list[Group] = []
        if scored is None:
            chosen = choose(
                groups,
                lambda _, r: comparable(r, version, keeps_cache=self._keeps_cache).any().item(),
                seed=self._seed(ctx, step),
            )
        else:
            for group, group_samples in zip(groups, scored, strict=True):
                for response, sample in zip(group.responses, group_samples, strict=True):
                    if sample.old_log_probs is not None:
                        responses.append((response, sample.old_log_probs))
        scored_groups = await self._score_responses(ctx, [*chosen, *self._probed])
        self._probed = []
        responses.extend(chain.from_iterable(scored_groups[: len(chosen)]))
        return await mismatch(
            responses,
            version,
            keeps_cache=self._keeps_cache,
            probed=scored_groups[len(chosen) :],
            group=ctx.group,
        )

    async def _score_responses(
        self, ctx: Context[Roles], groups: list[Group]
    ) -> list[list[ScoredResponse]]:
        """Return the responses of each group with the trainer's log-probs."""
        samples = [unscored_samples(group, self._config.algorithm) for group in groups]
        micro_batches = self._micro_batches(ctx, groups, samples)
        log_probs: dict[int, NDArray[np.float32]] = {}
        for sample, values in await self._scores(ctx, "actor", micro_batches):
            log_probs[id(sample)] = values
        scored: list[list[ScoredResponse]] = []
        for group, group_samples in zip(groups, samples, strict=True):
            group_values = [log_probs[id(sample)] for sample in group_samples]
            scored.append(list(zip(group.responses, group_values, strict=True)))
        return scored

    def _micro_batches(
        self, ctx: Context[Roles], groups: list[Group], samples: list[list[Sample]]
    ) -> list[MicroBatch]:
        """Divide the samples of some groups into micro-batches."""
        batches = split_in_micro_batches(
            groups,
            workload=self._workload,
            max_tokens=self._config.actor.ppo_max_token_len,
            num_multiple=ctx.roles.learner.num_replicas,
        )
        return [[samples[g][i] for g, i in batch] for batch in batches]

    def _seed(self, ctx: Context[Roles], step: int) -> int:
        """Return the seed of this controller's choices for a comparison."""
        return hash((self._config.seed, step, ctx.rank)) % 2**63


class RunRecorder(BaseRunRecorder[LLMJob, TextEvaluation]):
    """Recording of a run: its predicted steps, its mismatch, and the samples of evaluations."""

    cells = (
        Cell("reward", "critic/score/mean", "{:.3f}", "none"),
        Cell("held-out", "val/greedy/score/mean", "{:.3f}", "-"),
        Cell("accepted", "sampling/acceptance", "{:.0%}", "0%"),
        Cell("length", "response_length/mean", "{:.1f}", "0.0"),
        Cell("tokens/s", "perf/throughput", "{:,.0f}", "0"),
        *STAGE_CELLS,
        Cell("busiest controller", "controller/load/max", "{:.1%}"),
    )
    _has_warned = False

    def show_evaluation(self, step: int, evaluation: TextEvaluation) -> dict[str, float]:
        for line in evaluation.lines():
            self.display.say(f"step {step}: {line}")
        name = "before" if step == 0 else "after"
        write_jsonl(self.run.samples / f"{name}.jsonl", evaluation.samples)
        return evaluation.metrics()

    def score(self, metrics: Mapping[str, float]) -> float | None:
        return metrics.get("val/greedy/score/mean")

    def step_metrics(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Warn about a mismatch and cut-off episodes; return how long the step was predicted to take."""
        bound = self.job.config.algorithm.max_rollout_kl
        line = warning(step, metrics, bound)
        if line and bound and not self._has_warned:
            self._has_warned = True
            self.display.say(line)
        for end, cause in _CUT_OFF.items():
            fraction = metrics.get(f"multi_turn/end/{end}", 0.0)
            if fraction > _MANY:
                message = f"{fraction:.0%} of the episodes ended because {cause}"
                self.warnings.warn(step, message, key=f"episodes ended by {end}")
        if self._forecast is None:
            return {}
        return self._forecast(metrics)

    @cached_property
    def _forecast(self) -> Callable[[Mapping[str, float]], dict[str, float]] | None:
        """The predictions; None in simulated time, or where the planner does not know the model's architecture."""
        from gcore_llm.forecast import run_forecast

        config = self.job.config
        if config.is_simulated:
            return None
        try:
            model = model_folder(config.model) if config.model else self.run.model
            return run_forecast(config, model, self.run.placement)
        except PlacementError as error:
            _logger.info("steps are not predicted: %s", error)
            return None
