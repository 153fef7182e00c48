"""The RLHF program that every controller runs: sample, score, prepare, train, sync, record."""

from typing import Generic

from gcore_controller.context import Context
from gcore_controller.rlhf.batch_producer import BatchProducer, reshard_controller_states
from gcore_controller.rlhf.config import RLHFConfig, RunStart
from gcore_controller.rlhf.modality import EvaluationT, GroupT, Modality, PromptT, RolesT, UpdateT
from gcore_controller.rlhf.prefetcher import Prefetcher, sampling_context
from gcore_controller.rlhf.recorder import Recorder, Reporter
from gcore_controller.rlhf.reward_failures import RewardFailures


class RLHFLoop(Generic[RolesT, PromptT, GroupT, UpdateT, EvaluationT]):
    """One controller's part of a run (G-Core, arXiv 2507.22789, figure 2).

    Args:
        ctx: the controller's place in the run.
        modality: what is sampled, scored and trained.
        config: of the loop.
        start: where the run starts or resumes.
        recorder: takes in what happens.
    """

    def __init__(
        self,
        ctx: Context[RolesT],
        modality: Modality[RolesT, PromptT, GroupT, UpdateT, EvaluationT],
        config: RLHFConfig,
        start: RunStart,
        recorder: Recorder[EvaluationT],
    ) -> None:
        self._ctx = ctx
        self._modality = modality
        self._config = config
        self._start = start
        state = None
        if start.controllers is not None:
            state = reshard_controller_states(start.controllers, ctx.rank, ctx.world_size)
            modality.load_state(state)
        failures = RewardFailures(modality.failure_logs(ctx), max_share=config.max_failed_share)
        self._reporter = Reporter(ctx, recorder, failures, throughput_of=modality.throughput_of)
        self._batches = Prefetcher(
            BatchProducer(
                sampling_context(ctx, config.schedule), modality, config, first_step=start.first_step, state=state
            ),
            schedule=config.schedule,
            max_staleness=config.max_staleness,
            num_batches=config.total_steps - start.first_step,
        )

    async def run(self) -> None:
        """Run from the first step to the last."""
        ctx, config, start = self._ctx, self._config, self._start
        if start.is_policy_behind:
            await self._modality.update_policy(ctx, start.first_step)
        else:
            await ctx.roles.learner.check_policy(ctx.roles.policy)
        if not start.is_evaluated:
            await self.evaluate(start.first_step)
        self._reporter.discard()
        async with self._batches.running():
            for step in range(start.first_step + 1, config.total_steps + 1):
                await self.step(step)
                if config.is_evaluation_due(step):
                    await self.evaluate(step)

    async def step(self, step: int) -> None:
        """Make one step, on all controllers together."""
        ctx, modality = self._ctx, self._modality
        start_s = ctx.clock()
        # Sample and score, now or ahead of time.
        batch = await self._batches.next()
        metrics = {**batch.metrics, modality.HAS_SIGNAL: 0.0}
        await self._reporter.updating()
        if batch.num_groups:
            with ctx.timer.stage("prepare"):
                prepared = await modality.prepare(ctx, step, batch)
            with ctx.timer.stage("train"):
                trained = [await modality.update(ctx, step, update) for update in prepared.updates]
            with ctx.timer.stage("sync"):
                async with self._batches.weights_changing():
                    await modality.update_policy(ctx, step)
                    synced = await modality.synced_metrics(ctx, step, batch)
            metrics |= prepared.metrics | modality.update_metrics(trained) | synced
        state = {**batch.state, **modality.state()}
        await self._reporter.stepped(step, metrics, batch, state, step_s=ctx.clock() - start_s)

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy on held-out prompts, if there are any."""
        evaluation = await self._modality.evaluate(self._ctx, step)
        if evaluation is not None:
            await self._reporter.evaluated(step, evaluation)
