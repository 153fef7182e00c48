"""Write an RL loop of your own from the packages: an engine, a trainer, and two controllers.

``uv run python examples/my_loop.py`` trains a tiny random model by GRPO to prefer even tokens, in seconds. Both
controllers run `program`: each samples its own prompts, the first one trains on everything, and both wait for the
engine's new weights. The same program runs on a Ray cluster with `gcore_controller.run_ray`.
"""

import asyncio
import tempfile
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_controller import Context, run_inline
from gcore_rollout import Completion, HFEngine, Request, SamplingParams
from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    grpo_advantages,
)

NUM_STEPS, PROMPTS_PER_CONTROLLER = 20, 8
SAMPLING = SamplingParams(max_tokens=8)


@dataclass(frozen=True)
class Roles:
    engine: HFEngine
    trainer: TorchTrainer


async def sample(engine: HFEngine, step: int, rank: int) -> tuple[list[Sample], list[float]]:
    """Return a controller's samples with their advantages, and the score of each: its share of even tokens."""
    prompts = np.random.default_rng([step, rank]).integers(1, 64, (PROMPTS_PER_CONTROLLER, 4))
    requests = [
        Request(request_id=f"{i}", prompt_token_ids=tuple(prompt.tolist()), sampling=SAMPLING, n=16, seed=step)
        for i, prompt in enumerate(prompts)
    ]
    groups: defaultdict[int, list[Completion]] = defaultdict(list)
    async for completion in engine.generate(requests):
        groups[int(completion.request_id)].append(completion)
    samples, scores = [], []
    for i, group in groups.items():
        rewards = [float(np.mean(c.token_ids % 2 == 0)) for c in group]
        scores += rewards
        for c, advantage in zip(group, grpo_advantages(rewards), strict=True):
            advantages = np.full(c.token_ids.size, advantage)
            samples.append(Sample(prompt_ids=prompts[i], response_ids=c.token_ids, advantages=advantages))
    return samples, scores


async def program(ctx: Context[Roles]) -> list[float]:
    """Make every step, on every controller; return the mean scores."""
    means: list[float] = []
    for step in range(1, NUM_STEPS + 1):
        samples, scores = await sample(ctx.roles.engine, step, ctx.rank)
        micro_batches = await ctx.group.all_gather(samples)
        means.append(await ctx.group.all_reduce(float(np.mean(scores))) / ctx.world_size)
        if ctx.rank == 0:
            metrics = ctx.roles.trainer.train_step(micro_batches)
            await ctx.roles.engine.update_weights(ctx.roles.trainer.export_weights(), version=step)
            print(f"step {step:2d}  even tokens {means[-1]:.2f}  gradient norm {metrics['actor/grad_norm']:.2f}")
        await ctx.group.barrier()
    return means


def main() -> list[float]:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
        engine = HFEngine.from_pretrained(folder, eos_token_ids=[1])
        packed = PackedModel.from_pretrained(folder)
    objective = PolicyObjective(PolicyLossConfig())
    trainer = TorchTrainer(packed, optimizer=OptimizerConfig(lr=1e-2), objective=objective)
    return asyncio.run(run_inline(program, roles=Roles(engine, trainer), world_size=2))[0]


if __name__ == "__main__":
    main()
