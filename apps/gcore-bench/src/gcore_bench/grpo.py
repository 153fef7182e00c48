"""`gcore-bench grpo`: whole GRPO steps under gcore and TRL on the same workload, in turn, in new processes.

Every contender makes the steps that `train_config` describes.
"""

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rich.console import Console

from gcore_bench.harness.processes import Footprint, Spec, child_program, run_program
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    Count,
    Figures,
    NonNegative,
    Rounds,
    Row,
    Session,
    paired_ratio,
    verdict,
)
from gcore_rollout import RewardFunction, Scored

if TYPE_CHECKING:
    from gcore_llm import TrainConfig
    from gcore_llm.prompts import PromptSets

ContenderName = Literal["gcore", "gcore-vllm", "trl"]

PROMPT_LENGTH = 4
"""Length of every prompt, in tokens, which are characters: ``7+8=``."""
MODEL = "model"
"""The process that makes the model of a workload."""
MEAN_LENGTH = 50
"""Mean length of the long-tailed model's answers without a limit."""

_NUM_JUDGED = 256
_MODEL_SEED = 0
_AIM_OVER_TRL = {"short": 3.3}
"""Least speed of gcore over TRL's, by workload."""
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_COLUMNS: dict[str, str] = {
    "samples/s": "samples_per_s ,.0f",
    "step s": "step_s .3f",
    "gen s": "gen_s .3f",
    "reward s": "reward_s .3f",
    "train s": "train_s .3f",
    "CPU s": "cpu_s .3f",
    "peak MB": "peak_bytes MB",
    "mean length": "mean_length .1f",
    "score": "score .3f",
}
_NOTE = (
    "gen includes tokenizing, detokenizing and the transfer of weights to the engine; peak MB is of all processes, "
    "shared pages counted once."
)


@dataclass(frozen=True, kw_only=True)
class GrpoOptions(BenchOptions):
    """Measure GRPO steps under gcore and under TRL's GRPOTrainer, in turn, each in processes of its own."""

    workload: Literal["short", "long", "all"] = "all"
    """short: answers of about 3 tokens; long: long-tailed answers of up to 256 tokens."""
    contenders: tuple[ContenderName, ...] = get_args(ContenderName)
    """Contenders in the order in which they run in every round."""
    rounds: Count = 2
    """Number of rounds, in each of which every contender runs once."""
    steps: NonNegative = 0
    """Measured steps of a run; 0: the workload's own number."""
    warmup_steps: Count = 3
    """Steps before those, which no figure includes."""
    threads: Count = 1
    """Threads of matrix products, the same for every contender."""
    seed: NonNegative = 0
    """Seed of prompts and samples."""
    work_dir: Path = Path("runs/bench")
    """Folder of models and logs; a model that is in it is used again."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One task at one size."""

    name: str
    description: str
    reward: str
    """Reward as in `gcore_llm`'s `TrainConfig.reward`; empty: the task's verifier."""
    max_response_length: int
    steps: int
    """Measured steps of a run."""
    train_batch_size: int = 32
    """Prompts a step."""
    n: int = 8
    """Responses a prompt."""
    trl_micro_batches: int = 1
    """Micro-batches into which TRL divides a step: the number that was fastest for it. gcore packs by tokens."""

    @property
    def samples_per_step(self) -> int:
        """Completions of a step."""
        return self.train_batch_size * self.n


WORKLOADS = {
    "short": Workload(
        name="short",
        description="sums of two digits, answers of about 3 tokens",
        reward="",
        max_response_length=6,
        steps=30,
    ),
    "long": Workload(
        name="long",
        description="long-tailed answers of up to 256 tokens",
        reward=f"{__file__}:count_even_digits",
        max_response_length=256,
        steps=6,
        trl_micro_batches=8,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """The steps that a contender makes in one run."""

    contender: str
    workload: Workload
    model: Path
    steps: int
    threads: int
    seed: int
    warmup_steps: int = 0
    """The first of the steps, which are not measured."""

    @property
    def uses_vllm(self) -> bool:
        """True if the contender generates by vLLM in its own process."""
        return self.contender == "gcore-vllm"


Step = dict[str, Any]
"""Figures of one step, from the end of the previous one to its own end.

- ``step_s``; ``cpu_s`` of all threads.
- ``gen_s``: generation, including tokenizing, detokenizing and the transfer of new weights to the engine.
- ``reward_s``: time inside the reward function; ``train_s``: forward, backward and optimizer.
- ``score``: mean over all completions; ``mean_length`` and ``max_length`` of completions, in tokens.
"""


def count_even_digits(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the fraction of even digits: a reward that takes no time and differs between almost any two answers."""
    del prompt, row
    num_even = sum(completion.count(digit) for digit in "02468")
    return num_even / max(len(completion), 1)


def run(options: GrpoOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for; `BenchError` if a process fails."""
    names = [options.workload] if options.workload != "all" else list(WORKLOADS)
    with Session(options, console, notes=[_NOTE]) as session:
        for name in names:
            workload = WORKLOADS[name]
            rounds = Rounds(name, options.rounds, say=session.say)
            _run_rounds(workload, options, rounds)
            rows = rounds.summarise()
            title = (
                f"{name}: {workload.description}, {workload.samples_per_step} completions a step"
            )
            session.report(title, _COLUMNS, rows, rounds.runs, lines=compare(name, rows, rounds))


def _run_rounds(workload: Workload, options: GrpoOptions, rounds: Rounds) -> None:
    """Run every contender in turn."""
    model = options.work_dir / f"{workload.name}-model"
    task = Task(
        contender=MODEL,
        workload=workload,
        model=model,
        steps=0,
        threads=options.threads,
        seed=options.seed,
    )
    if not model.is_dir():
        rounds.say(f"{workload.name}: making the model")
        _run_task(task, options)
    measured_steps = options.steps or workload.steps
    for turn in rounds.turns(options.contenders):
        contender_task = replace(
            task,
            contender=turn.contender,
            steps=options.warmup_steps + measured_steps,
            warmup_steps=options.warmup_steps,
        )
        steps, footprint = _run_task(contender_task, options)
        if len(steps) != measured_steps:
            raise BenchError(
                f"{turn.contender} made {len(steps)} steps of {measured_steps} on workload {rounds.part}"
            )
        figures = summarise_steps(steps, workload.samples_per_step)
        figures["peak_bytes"] = float(footprint.pss_bytes)
        turn.done({turn.contender: figures}, f"{figures['step_s']:.3f} s a step")


def summarise_steps(steps: Sequence[Step], samples_per_step: int) -> Figures:
    """Return medians of seconds, and means of lengths and scores."""
    figures: Figures = {}
    for metric in ("step_s", "cpu_s", "gen_s", "reward_s", "train_s"):
        figures[metric] = median(step[metric] for step in steps)
    figures["samples_per_s"] = samples_per_step / figures["step_s"]
    figures["mean_length"] = fmean(step["mean_length"] for step in steps)
    figures["max_length"] = float(max(step["max_length"] for step in steps))
    figures["score"] = fmean(step["score"] for step in steps)
    return figures


def compare(workload: str, rows: Mapping[str, Row], rounds: Rounds) -> list[str]:
    """Return gcore's ratios to each peer, with the aims."""
    lines: list[str] = []
    ours = [name for name in rows if name.startswith("gcore")]
    peers = [name for name in rows if name not in ours]
    for contender in ours:
        for peer in peers:
            speed = paired_ratio(rounds.runs, peer, contender, "step_s") or 0.0
            line = f"{contender} / {peer}: {speed:.2f}x the speed"
            cpu = paired_ratio(rounds.runs, peer, contender, "cpu_s")
            if cpu is not None:
                line += f", {cpu:.2f}x by CPU seconds"
            if (contender, peer) == ("gcore", "trl") and workload in _AIM_OVER_TRL:
                least = _AIM_OVER_TRL[workload]
                line += f" (aim: at least {least:g}x, {verdict(speed >= least)})"
            lines.append(line)
    return lines


def _run_task(task: Task, options: GrpoOptions) -> tuple[list[Step], Footprint]:
    """Run the process of a task; return the figures of its measured steps, and its size."""
    logs = options.work_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    name = f"{task.workload.name}-{task.contender}"
    values = {"model": str(task.model), "steps": task.steps, "seed": task.seed}
    spec = Spec(
        work="gcore_bench.grpo:run_steps",
        part=task.workload.name,
        contender=task.contender,
        folder=str(logs),
        options=values,
        threads=task.threads,
    )
    variables = {"OMP_NUM_THREADS": str(task.threads)}
    if task.uses_vllm:
        variables |= _VLLM_ENVIRONMENT
    program = child_program(spec, logs / f"{name}.json", variables)
    label = f"{task.contender} on workload {task.workload.name}"
    footprint = run_program(program, name=label, log=logs / f"{name}.log")
    return program.read()[task.warmup_steps :], footprint


def run_steps(spec: Spec) -> list[Step]:
    """Make the steps of a contender, or the model that the workload trains; return the figures of every step."""
    values: dict[str, Any] = spec.options | {"model": Path(spec.options["model"])}
    task = Task(
        workload=WORKLOADS[spec.part], contender=spec.contender, threads=spec.threads, **values
    )
    if spec.contender == MODEL:
        make_model(task)
        return []
    if spec.contender == "trl":
        return run_trl(task)
    return run_gcore(task)


def train_config(task: Task) -> "TrainConfig":
    """Return gcore-llm's settings for a task: plain GRPO, no dynamic sampling, one update a step."""
    from gcore_llm import (
        ActorConfig,
        AlgorithmConfig,
        DataConfig,
        RolloutConfig,
        TaskConfig,
        TrainConfig,
        TrainerConfig,
    )
    from gcore_trainer import OptimizerConfig, PolicyLossConfig

    workload = task.workload
    steps = max(1, task.steps)
    engine = "vllm" if task.uses_vllm else "hf"
    return TrainConfig(
        reward=workload.reward,
        seed=task.seed,
        threads=task.threads,
        device="cpu",
        task=TaskConfig(
            name="chain_sum",
            params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            num_train=4096,
            # There are about two hundred such sums; those held out are not trained on.
            num_val=8,
        ),
        data=DataConfig(
            train_batch_size=workload.train_batch_size,
            max_prompt_length=PROMPT_LENGTH,
            max_response_length=workload.max_response_length,
        ),
        rollout=RolloutConfig(engine=engine, n=workload.n, max_num_seqs=workload.samples_per_step),
        algorithm=AlgorithmConfig(filter_groups=False),
        # The rate is so low that response lengths stay the same throughout a run.
        actor=ActorConfig(optim=OptimizerConfig(lr=1e-5, grad_clip=1.0), loss=PolicyLossConfig()),
        trainer=TrainerConfig(
            total_training_steps=steps, save_freq=steps, test_freq=steps, tensorboard=False
        ),
    )


def load_train_prompts(config: "TrainConfig", tokenizer: Any) -> "PromptSets":
    """Return the workload's prompts without validation prompts, so that no step evaluates."""
    from gcore_llm.data.tasks import load_task

    return replace(load_task(config.task, config.data, tokenizer, seed=config.seed), val=[])


def make_model(task: Task) -> None:
    """Make the model that the workload trains."""
    from gcore_runs.run_folder import write_atomically

    task.model.parent.mkdir(parents=True, exist_ok=True)
    if task.workload.name == "short":
        _make_warmed_up(replace(task, seed=_MODEL_SEED))
    else:
        write_atomically(task.model, _write_long_tailed)


def _make_warmed_up(task: Task) -> None:
    """Fine-tune gcore-llm's tiny model until about four of ten sampled sums are correct."""
    from gcore_llm.finetune.warmup import make_warm_model
    from gcore_llm.sampling import reward_function
    from gcore_llm.sections import WarmupConfig
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_rollout import RewardRunner
    from gcore_runs import resolve
    from gcore_runs.loop.recorder import Display
    from gcore_runs.run_folder import RunFolder

    warmup = WarmupConfig(max_steps=400, target_accuracy=0.4, test_freq=10)
    config = resolve(train_config(task))
    folder = RunFolder(task.model.with_name(f"{task.model.name}-run"))
    tokenizer = tiny_tokenizer()
    prompts = load_train_prompts(config, tokenizer)
    judged = replace(prompts, val=prompts.train[:_NUM_JUDGED])
    with Display() as display:
        reward = RewardRunner(reward_function(config), config.reward_calls.runner)
        making = make_warm_model(config, folder, judged, tokenizer, reward, display, warmup=warmup)
        asyncio.run(making)
    folder.model.rename(task.model)
    shutil.rmtree(folder.path)


def _write_long_tailed(folder: Path) -> None:
    """Make gcore-llm's tiny model, untrained, end after every token with the same probability.

    Channel 0 of the embedding, which is tied to the head, is a constant: for any text it dominates that channel of the
    last hidden state, so that a token's value in it acts as a bias of its logit. The end of the sequence has the bias
    that makes its probability 1 / MEAN_LENGTH; tokens that are not printable characters are excluded.
    """

    import torch
    from transformers import AutoModelForCausalLM

    from gcore_llm.tiny_model import make_tiny_model
    from gcore_runs import build_tokenizer

    make_tiny_model(folder, seed=_MODEL_SEED)
    tokenizer = build_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    special = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}
    printable = [i for i in range(len(tokenizer)) if i not in special]
    with torch.no_grad():
        channel_V = model.get_input_embeddings().weight[:, 0]
        channel_V.fill_(-1.0)
        channel_V[printable] = 1.0
        hidden_PC = model.model(torch.tensor(printable)[:, None]).last_hidden_state[:, 0]
        odds = len(printable) / (MEAN_LENGTH - 1)
        channel_V[tokenizer.eos_token_id] = 1.0 + math.log(odds) / hidden_PC[:, 0].mean()
    model.save_pretrained(folder)


class StepRecorder:
    """Collects the figures of every step of a contender that runs in one process, and calls its reward function."""

    def __init__(self, reward: RewardFunction) -> None:
        self.steps: list[Step] = []
        self._reward = reward
        self._reward_s = 0.0
        self._scores: list[float] = []
        self._start_s = time.perf_counter()
        self._start_cpu_s = time.process_time()

    def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Call the reward function, and note the seconds inside it and its score."""
        start_s = time.perf_counter()
        value = cast("Any", self._reward(prompt, completion, row))
        self._reward_s += time.perf_counter() - start_s
        if isinstance(value, Scored):
            value = value.score
        self._scores.append(float(value))
        return float(value)

    def end_step(self, lengths: Sequence[int], *, gen_s: float, train_s: float) -> None:
        """Record a step, from the end of the previous one until now."""
        end_s = time.perf_counter()
        end_cpu_s = time.process_time()
        step: Step = {
            "step_s": end_s - self._start_s,
            "cpu_s": end_cpu_s - self._start_cpu_s,
            "gen_s": gen_s,
            "reward_s": self._reward_s,
            "train_s": train_s,
            "score": sum(self._scores) / max(len(self._scores), 1),
            "mean_length": fmean(lengths),
            "max_length": max(lengths),
        }
        self.steps.append(step)
        self._start_s = end_s
        self._start_cpu_s = end_cpu_s
        self._reward_s = 0.0
        self._scores = []


def run_gcore(task: Task) -> list[Step]:
    """Run the program of gcore-llm in one process; return the figures of every step."""
    import torch

    from gcore_controller import Event, Stepped, run_inline, share_trainer
    from gcore_llm.learning.preparation import workload_of
    from gcore_llm.learning.trainer_worker import start_trainer
    from gcore_llm.modality import LLMJob, Roles, SamplingRoles
    from gcore_llm.sampling import reward_function, start_policy
    from gcore_rollout import Completion, InstrumentedEngine, Request, RewardRunner
    from gcore_runs import build_tokenizer, eos_token_ids, resolve

    lengths: list[int] = []

    class WatchedEngine(InstrumentedEngine[Request, Completion]):
        """Records the lengths of its completions."""

        async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
            async for completion in super().generate(requests):
                lengths.append(completion.token_ids.size)
                yield completion

    async def record(event: Event) -> None:
        if isinstance(event, Stepped):
            seconds = event.metrics
            # gcore-llm scores completions while others are being generated: those seconds are inside its gen stage.
            gen_s = sum(
                seconds.get(f"timing_s/{stage}", 0.0) for stage in ("gen", "reward", "sync")
            )
            recorder.end_step(lengths, gen_s=gen_s, train_s=seconds["timing_s/train"])
            recorder.steps[-1]["gen_s"] -= recorder.steps[-1]["reward_s"]
            lengths.clear()

    config = resolve(train_config(task))
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer(task.model)
    policy = asyncio.run(
        start_policy(config, task.model, eos_token_ids=eos_token_ids(tokenizer, task.model))
    )
    # No checkpoint is saved in this run.
    learner = start_trainer(config, task.model, task.model.parent / "checkpoints")
    recorder = StepRecorder(reward_function(config))
    engine = WatchedEngine(policy, name="engine")
    job = LLMJob(
        config=config,
        prompts=load_train_prompts(config, tokenizer),
        workload=workload_of(task.model),
        first_step=0,
        is_evaluated=True,
        controllers=None,
        is_policy_behind=False,
    )

    async def make_steps() -> None:
        reward = RewardRunner(recorder.score, config.reward_calls.runner)
        roles = SamplingRoles(policy=engine, reward=reward, tokenizer=tokenizer)
        try:
            await run_inline(share_trainer(learner, job.program(record), roles=Roles), roles=roles)
        finally:
            await engine.close()

    asyncio.run(make_steps())
    return recorder.steps


def run_trl(task: Task) -> list[Step]:
    """Run TRL's GRPOTrainer as published, timed by overriding its methods; return the figures of every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    from gcore_llm.sampling import reward_function
    from gcore_runs import build_tokenizer

    class TimedTrainer(GRPOTrainer):
        gen_s = 0.0
        prepare_s = 0.0
        """Seconds of all that precedes the forward passes: generation, rewards, advantages."""
        lengths: Sequence[int] = ()

        def _generate(self, prompts: list[Any]) -> Any:
            start_s = time.perf_counter()
            output: Any = super()._generate(prompts)
            self.gen_s = time.perf_counter() - start_s
            self.lengths = [len(ids) for ids in output[1]]
            return output

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            start_s = time.perf_counter()
            inputs: Any = super()._prepare_inputs(generation_batch)
            self.prepare_s += time.perf_counter() - start_s
            return inputs

    class Callback(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            trainer.prepare_s = 0.0
            self._start_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Called when the optimizer has stepped."""
            train_s = time.perf_counter() - self._start_s - trainer.prepare_s
            recorder.end_step(trainer.lengths, gen_s=trainer.gen_s, train_s=train_s)

    config = train_config(task)
    tokenizer = build_tokenizer(task.model)
    prompts = load_train_prompts(config, tokenizer).train
    recorder = StepRecorder(reward_function(config))

    def score_all(completions: list[str], prompt_index: list[int], **_: Any) -> list[float | None]:
        scores: list[float | None] = []
        for index, completion in zip(prompt_index, completions, strict=True):
            prompt = prompts[index]
            scores.append(recorder.score(prompt.text, completion, prompt.row))
        return scores

    policy: Any = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    rows = [{"prompt": prompt.text, "prompt_index": index} for index, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=policy,
            reward_funcs=score_all,
            args=_trl_config(task, config, scratch),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.add_callback(Callback())
        trainer.train()
    return recorder.steps


def _trl_config(task: Task, config: "TrainConfig", scratch: str) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

    workload = task.workload
    return GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        fp16=False,
        per_device_train_batch_size=workload.samples_per_step // workload.trl_micro_batches,
        steps_per_generation=workload.trl_micro_batches,
        gradient_accumulation_steps=workload.trl_micro_batches,
        num_generations=workload.n,
        max_completion_length=workload.max_response_length,
        temperature=1.0,
        learning_rate=config.actor.optim.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        max_grad_norm=config.actor.optim.grad_clip,
        max_steps=task.steps,
        beta=0.0,
        seed=task.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
