"""gcore: the program of gcore-llm in one process, with an engine, a reward and a recorder that take the figures."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import torch

from gcore_bench.grpo.measure import Step, StepRecorder
from gcore_bench.grpo.setup import load_train_prompts, train_config
from gcore_bench.grpo.workload import Task
from gcore_controller import Event, Reached, Stepped, Updating, run_inline, share_trainer
from gcore_llm.learning.preparation import workload_of
from gcore_llm.learning.trainer_worker import start_trainer
from gcore_llm.modality import Job, Roles, SamplingRoles
from gcore_llm.sampling import reward_function, start_policy
from gcore_rollout import Completion, Engine, InstrumentedEngine, Request, RewardFunction, RewardRunner
from gcore_runs import build_tokenizer, eos_token_ids, resolve


def run(task: Task) -> list[Step]:
    """Make the steps of ``task`` and return the figures of each."""
    model, config = task.model, resolve(train_config(task))
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(model)
    policy = asyncio.run(start_policy(config, model, eos_token_ids=eos_token_ids(tokenizer, model)))
    # No checkpoint is saved in this run.
    learner = start_trainer(config, model, model.parent / "checkpoints")
    recorder = _Recorder(reward_function(config))
    watched = _WatchedEngine(policy, recorder.lengths)
    runner = RewardRunner(recorder.score, config.reward_calls.runner)
    job = Job(
        config=config,
        prompts=load_train_prompts(config, tokenizer),
        workload=workload_of(model),
        first_step=0,
        is_evaluated=True,
        controllers=None,
        is_policy_behind=False,
    )

    async def make_steps() -> None:
        roles = SamplingRoles(policy=watched, reward=runner, tokenizer=tokenizer)
        try:
            await run_inline(share_trainer(learner, job.program(recorder), roles=Roles), roles=roles)
        finally:
            await watched.close()

    asyncio.run(make_steps())
    return recorder.steps


class _WatchedEngine(InstrumentedEngine):
    """An engine that records the lengths of its completions."""

    def __init__(self, engine: Engine, lengths: list[int]) -> None:
        super().__init__(engine, name="engine")
        self._lengths = lengths

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        async for completion in super().generate(requests):
            self._lengths.append(completion.token_ids.size)
            yield completion


class _Recorder(StepRecorder):
    """Collects the figures of every step from the loop's own metrics."""

    def __init__(self, reward: RewardFunction) -> None:
        super().__init__(reward)
        self.lengths: list[int] = []

    async def __call__(self, event: Event) -> None:
        match event:
            case Stepped(metrics=metrics):
                # gcore-llm scores completions while others are being generated: those seconds are inside its gen stage.
                gen_s = sum(metrics.get(f"timing_s/{stage}", 0.0) for stage in ("gen", "reward", "sync"))
                train_s = metrics["timing_s/train"]
                self.ended(self.lengths.copy(), gen_s=gen_s, train_s=train_s, has_reward_in_gen=True)
                self.lengths.clear()
            case Updating() | Reached():
                pass
            case _:
                raise AssertionError(f"the run reported {event}")
