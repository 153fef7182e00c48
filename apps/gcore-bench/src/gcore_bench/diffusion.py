"""`gcore-bench diffusion`: Flow-GRPO-Fast under gcore-diffusion and in plain loops on diffusers, in turn.

The plain loop (arXiv 2505.05470) is written directly on diffusers, in one process. It has the model, prompts, reward,
window of noisy steps, loss and optimizer of gcore-diffusion's embedded run, and no evaluation, checkpoints or recovery.
"""

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from gcore_bench.harness.processes import Spec, run_child, run_training, timed
from gcore_bench.harness.report import BenchOptions, BenchSession, Figures, Row, verdict
from gcore_diffusion.config import DemoConfig, embedded
from gcore_diffusion.demo.digits import PROMPTS
from gcore_runs import Bound, Count, NonNegative, at_least
from gcore_runs.loop.recorder import STAGES
from gcore_runs.settings.checks import multiple_of

if TYPE_CHECKING:
    import torch

PLAIN = ("plain loop, 1 thread", "plain loop, 2 threads")
LIMIT = "two plain loops at once"
"""Two independent loops of one thread each: the most that two cores can do."""
GCORE = {
    "gcore, 1 controller": "--threads 1",
    "gcore, 2 controllers, 2 engines, 2 ranks": (
        "--threads 2 --controllers 2 --rollout.num-processes 2 --trainer.num-processes 2"
    ),
    "gcore on Ray, 2 controllers, 2 engines, 2 ranks": (
        "--runtime ray --threads 2 --controllers 2 --trainer.num-processes 2"
    ),
}
"""Options in addition to those of the embedded run."""
_RECIPE = embedded()
NUM_INFERENCE_STEPS = _RECIPE.rollout.num_inference_steps
WINDOW_SIZE = _RECIPE.rollout.window_size
NOISE_LEVEL = _RECIPE.rollout.noise_level
_AVAILABLE = Bound(
    lambda count: count <= len(PROMPTS), f"at most {len(PROMPTS)}, the number of prompts"
)
_COLUMNS: dict[str, str] = {"images/s": "images_per_s .1f", "step s": "step .3f"}
for _stage in STAGES:
    _COLUMNS[f"{_stage} s"] = f"{_stage} .3f"


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions(BenchOptions):
    """Measure steps of Flow-GRPO-Fast of the embedded model, by gcore-diffusion and by a plain loop on diffusers."""

    steps: Count = 8
    """Measured steps of each run."""
    warmup: NonNegative = 2
    """Steps before those, which no figure includes."""
    # Dynamic sampling draws by eights; with other batches, some steps would have nothing to generate.
    prompts: Annotated[int, at_least(8), multiple_of(8), _AVAILABLE] = 16
    """Prompts of a step."""
    n: Annotated[int, at_least(2), multiple_of(2)] = 16
    """Images of each prompt."""
    seed: NonNegative = 0
    """Seed of the model and of the order of the prompts."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "steps": 1,
        "warmup": 1,
        "rounds": 1,
        "prompts": 8,
        "n": 2,
    }


def run(options: DiffusionOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for.

    Raises:
        BenchError: a run failed; the message names its log.
    """
    from rich.console import Console

    from gcore_diffusion.demo.pretraining import pretrained_pipeline
    from gcore_runs import Display

    # The folder is kept, because error messages name logs in it.
    folder = Path(tempfile.mkdtemp(prefix="gcore-bench-diffusion-"))
    # The result of pretraining does not affect times.
    config = DemoConfig(num_steps=1, cache_dir=str(folder))
    with Display(Console(quiet=True)) as display:
        model = pretrained_pipeline(config, seed=0, display=display)
    rounds = session.start_rounds("loop")
    for turn in rounds.turns((*PLAIN, LIMIT, *GCORE)):
        name = turn.contender
        num_loops = 1
        if name == LIMIT:
            num_loops = 2
            with ThreadPoolExecutor() as pool:
                run_plain = partial(_run_plain, PLAIN[0], model, options)
                steps = list(chain.from_iterable(pool.map(run_plain, ("first", "second"))))
        elif name in PLAIN:
            steps = _run_plain(name, model, options, "only")
        else:
            steps = _run_gcore(name, model, options, turn.round)
        figures = {stage: median(step[stage] for step in steps) for stage in steps[0]}
        figures["images_per_s"] = num_loops * options.prompts * options.n / figures["step"]
        turn.done(figures, "{step:.3f} s")
    rows = rounds.summarise()
    title = "Flow-GRPO-Fast, seconds of a step"
    session.report(title, _COLUMNS, rows, rounds.runs, lines=_compare(rows))


def _compare(rows: Mapping[str, Row]) -> list[str]:
    """Return the limit of the machine, and whether gcore's aim is met."""
    images = {name: row["images_per_s"] for name, row in rows.items()}
    plain = max(images[name] for name in PLAIN)
    gcore = max(images[name] for name in list(GCORE)[1:])
    limit = images[LIMIT]
    is_met = gcore >= 1.5 * plain or gcore >= 0.85 * limit
    return [
        f"two plain loops at once make {limit / plain:.2f} times the images of one: the most that the cores can do",
        "aim: with 2 controllers at least 1.5 times the images of a plain loop, or 0.85 of that limit: "
        f"{gcore / plain:.2f} times, {gcore / limit:.2f} of it ({verdict(is_met)})",
    ]


def _run_plain(name: str, model: Path, options: DiffusionOptions, label: str) -> list[Figures]:
    """Run a plain loop in a process; return the seconds of each measured step by stage."""
    spec = Spec(
        work="gcore_bench.diffusion:run_loop",
        contender=f"{name}, {label}",
        folder=model.parent,
        options=(model, options),
        threads=PLAIN.index(name) + 1,
    )
    steps, _ = run_child(spec)
    return steps[options.warmup :]


def _run_gcore(name: str, model: Path, options: DiffusionOptions, number: int) -> list[Figures]:
    """Run `gcore-diffusion train`; return the seconds of each measured step by stage."""
    folder = model.parent
    words = (
        f"--device cpu --seed {options.seed} --demo.num-steps 1 --demo.cache-dir {folder} "
        f"--data.val-size 0 --data.train-batch-size {options.prompts} --rollout.n {options.n} "
        f"--trainer.total-training-steps {options.warmup + options.steps} --trainer.save-freq 1000 "
        f"--trainer.tensorboard False --algorithm.filter-groups False --actor.loss.kl-loss-coef 0 {GCORE[name]}"
    )
    rows = run_training(
        "gcore_diffusion",
        [*words.split(), "--reward.held-out", ""],
        name=f"run-{number}-{list(GCORE).index(name)}",
        folder=folder,
        environment={"OMP_NUM_THREADS": "1"},
    )
    steps: list[Figures] = []
    for row in rows[options.warmup :]:
        seconds = {stage: row.get(f"timing_s/{stage}", 0.0) for stage in ("step", *STAGES)}
        steps.append(seconds)
    return steps


def run_loop(spec: Spec) -> list[Figures]:
    """Make all steps of a plain loop; return the seconds of each by stage."""
    import torch

    from gcore_rollout import load_pipeline
    from gcore_runs import keep_free_memory

    model, options = spec.options
    # As gcore's processes do, to compare what else differs.
    keep_free_memory()
    torch.manual_seed(options.seed)
    pipeline = load_pipeline(model, dtype=torch.float32)
    loop = Loop(
        pipeline,
        prompts=options.prompts,
        n=options.n,
        seed=options.seed,
    )
    return [loop.step() for _ in range(options.warmup + options.steps)]


@dataclass
class NoisyStep:
    """A step with noise: its index, latents before and after it, and log-probabilities, [B]."""

    index: int
    before: "torch.Tensor"
    after: "torch.Tensor"
    log_probs: "torch.Tensor"


class Loop:
    """Model, optimizer and reward; the pipeline is a Stable Diffusion 3 of diffusers."""

    def __init__(self, pipeline: Any, *, prompts: int, n: int, seed: int) -> None:
        import torch

        from gcore_diffusion.demo.rewards import DigitReward

        self._num_prompts = prompts
        self._n = n
        self._pipeline = pipeline
        self.model = pipeline.transformer
        pipeline.scheduler.set_timesteps(NUM_INFERENCE_STEPS)
        self._timesteps: torch.Tensor = pipeline.scheduler.timesteps
        self.sigmas: torch.Tensor = pipeline.scheduler.sigmas
        self._reward = DigitReward()
        optim = _RECIPE.actor.optim
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optim.lr, weight_decay=optim.weight_decay
        )
        self._rng = np.random.default_rng(seed)
        self._text = torch.empty(0)
        self._pooled = torch.empty(0)

    def step(self) -> Figures:
        """Make one step; return seconds by stage."""
        import torch

        with timed() as gen, torch.no_grad():
            indices = self._rng.permutation(len(PROMPTS))[: self._num_prompts]
            prompts = [PROMPTS[index] for index in np.repeat(indices, self._n)]
            pixels, steps = self._sample(prompts)
        with timed() as reward:
            scores = torch.from_numpy(self._reward(pixels, prompts, [{}] * len(prompts))).float()
        with timed() as train:
            groups = scores.view(self._num_prompts, self._n)
            advantages = (groups - groups.mean(1, keepdim=True)) / (scores.std() + 1e-4)
            limit = _RECIPE.algorithm.adv_clip_max
            self._update(steps, advantages.flatten().clamp(-limit, limit))
        seconds = {
            "gen": gen["wall_s"],
            "reward": reward["wall_s"],
            "train": train["wall_s"],
        }
        return {"step": sum(seconds.values()), **seconds}

    def _sample(self, prompts: list[str]) -> tuple[Any, list[NoisyStep]]:
        """Return pixels as uint8, [B, height, width, 3], and the steps with noise that made them."""
        import torch

        # All images of a prompt have its embedding.
        text, _, pooled, _ = self._pipeline.encode_prompt(
            prompt=prompts[:: self._n],
            prompt_2=None,
            prompt_3=None,
            do_classifier_free_guidance=False,
            max_sequence_length=1,
        )
        self._text = text.repeat_interleave(self._n, 0)
        self._pooled = pooled.repeat_interleave(self._n, 0)
        sizes = self.model.config
        latents = torch.randn(len(prompts), sizes.in_channels, sizes.sample_size, sizes.sample_size)
        everything = torch.arange(len(prompts))
        # A window for each prompt would need a batch for each.
        first = int(self._rng.integers(NUM_INFERENCE_STEPS // 2 - WINDOW_SIZE + 1))
        steps: list[NoisyStep] = []
        for i in range(NUM_INFERENCE_STEPS):
            velocity = self._predict_velocity(latents, i, everything)
            if first <= i < first + WINDOW_SIZE:
                mean, std = self.gaussian(velocity, latents, i)
                noisy = mean + std * torch.randn_like(mean)
                steps.append(NoisyStep(i, latents, noisy, _log_prob(noisy, mean, std)))
                latents = noisy
            else:
                latents = latents + velocity * (self.sigmas[i + 1] - self.sigmas[i])
        pixels = (latents / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).numpy(), steps

    def _update(self, steps: Sequence[NoisyStep], advantages: "torch.Tensor") -> None:
        import torch

        actor = _RECIPE.actor
        clip = actor.loss.clip_ratio
        for indices in torch.randperm(len(advantages)).chunk(actor.num_updates):
            self._optimizer.zero_grad()
            for rows in indices.split(actor.micro_batch_size):
                for step in steps:
                    latents = step.before[rows]
                    mean, std = self.gaussian(
                        self._predict_velocity(latents, step.index, rows), latents, step.index
                    )
                    ratio = torch.exp(_log_prob(step.after[rows], mean, std) - step.log_probs[rows])
                    clipped = ratio.clamp(1 - clip, 1 + clip)
                    losses = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * clipped)
                    torch.autograd.backward(losses.sum() / (len(indices) * WINDOW_SIZE))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()

    def _predict_velocity(
        self, latents: "torch.Tensor", i: int, rows: "torch.Tensor"
    ) -> "torch.Tensor":
        """Return the velocity of latents at a step, [B, ...]; ``rows`` are the images' indices."""
        return self.model(
            hidden_states=latents,
            timestep=self._timesteps[i].expand(len(latents)),
            encoder_hidden_states=self._text[rows],
            pooled_projections=self._pooled[rows],
            return_dict=False,
        )[0]

    def gaussian(
        self, velocity: "torch.Tensor", latents: "torch.Tensor", i: int
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return mean, [B, ...], and standard deviation of the latents after a step (Flow-GRPO, eq. 9)."""
        import torch

        sigma = self.sigmas[i]
        after = self.sigmas[i + 1]
        dt = after - sigma
        spread = NOISE_LEVEL * torch.sqrt(sigma / (1 - torch.where(sigma == 1, after, sigma)))
        mean = latents * (1 + spread**2 / (2 * sigma) * dt)
        mean = mean + velocity * (1 + spread**2 * (1 - sigma) / (2 * sigma)) * dt
        return mean, spread * torch.sqrt(-dt)


def _log_prob(noisy: "torch.Tensor", mean: "torch.Tensor", std: "torch.Tensor") -> "torch.Tensor":
    """Return the mean log-density of each image, [B]."""
    density = -((noisy - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * np.log(2 * np.pi)
    return density.flatten(1).mean(1)
