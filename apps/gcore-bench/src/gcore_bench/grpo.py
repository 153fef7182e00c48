"""`gcore-bench grpo`: whole GRPO steps under gcore and TRL on the same workload, in turn, in new processes.

Every contender makes the steps that `list_options` describes.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import numpy as np

from gcore_bench.harness.processes import (
    Spec,
    highest_bytes,
    run_child,
    run_training,
    timed,
    train_here,
)
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    BenchSession,
    Figures,
    Rounds,
    Row,
    paired_ratio,
    verdict,
)
from gcore_runs import Count, NonNegative

if TYPE_CHECKING:
    from gcore_llm import TrainConfig

ContenderName = Literal["gcore", "gcore-vllm", "trl"]

MEAN_LENGTH = 50
"""Mean length of the long-tailed model's answers without a limit."""

_COLUMNS: dict[str, str] = {
    "samples/s": "samples_per_s ,.0f",
    "step s": "step_s .3f",
    "gen s": "gen_s .3f",
    "train s": "train_s .3f",
    "CPU s": "cpu_s .3f",
    "peak MB": "peak_bytes MB",
}
_NOTE = (
    "gen includes tokenizing, detokenizing, rewards and the transfer of weights to the engine; peak MB is of all "
    "processes, shared pages counted once."
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

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "workload": "short",
        "steps": 2,
        "warmup_steps": 1,
    }


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


def count_even_digits(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the fraction of even digits: a reward that takes no time and differs between almost any two answers."""
    del prompt, row
    num_even = sum(completion.count(digit) for digit in "02468")
    return num_even / max(len(completion), 1)


def run(options: GrpoOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for; `BenchError` if a process fails."""
    for name in [options.workload] if options.workload != "all" else list(WORKLOADS):
        workload = WORKLOADS[name]
        model = options.work_dir.absolute() / f"{name}-model"
        if not model.is_dir():
            session.say(f"{name}: making the model")
            make_model(workload, model)
        rounds = session.start_rounds(name)
        for turn in rounds.turns(options.contenders):
            figures = _measure(turn.contender, workload, model, options)
            turn.done(figures, "{step_s:.3f} s a step")
        rows = rounds.summarise()
        title = f"{name}: {workload.description}, {workload.samples_per_step} completions a step"
        lines = [*compare(name, rows, rounds), _NOTE]
        session.report(title, _COLUMNS, rows, rounds.runs, lines=lines)


def _measure(contender: str, workload: Workload, model: Path, options: GrpoOptions) -> Figures:
    """Return the figures of a contender's run, whose files are left next to the model."""
    name = f"{workload.name}-{contender}"
    num_steps = options.steps or workload.steps
    words = [f"--name={name}", f"--model={model}", f"--seed={options.seed}"]
    words += [f"--threads={options.threads}", f"--runs-dir={model.parent / 'runs'}"]
    words += list_options(workload, options.warmup_steps + num_steps)
    variables: dict[str, str] = {}
    if contender == "gcore-vllm":
        words.append("--rollout.engine=vllm")
        variables["VLLM_CPU_KVCACHE_SPACE"] = "1"
    spec = Spec(
        work=f"gcore_bench.grpo:{'run_trl' if contender == 'trl' else 'run_gcore'}",
        part=workload.name,
        contender=name,
        folder=model.parent,
        options=words,
        threads=options.threads,
    )
    steps, sizes = run_child(spec, environment=variables)
    measured = steps[options.warmup_steps :]
    if len(measured) != num_steps:
        raise BenchError(f"{name} made {len(measured)} steps of {num_steps}")
    figures = summarise_steps(measured, workload.samples_per_step)
    figures["peak_bytes"] = float(highest_bytes(sizes))
    return figures


def run_gcore(spec: Spec) -> list[Figures]:
    """Run `gcore-llm train` in this process, and return the figures of every step.

    They are ``step_s``; ``cpu_s`` of all threads; ``gen_s``: generation, including tokenizing, detokenizing, rewards
    and the transfer of new weights to the engine; ``train_s``: forward, backward and optimizer.
    """
    from rich.console import Console

    from gcore_runs import Display

    ends_s = [_read_clocks()]

    class TimedDisplay(Display):
        """Notes the clock's and the processor's seconds at the end of each step."""

        def show_progress(
            self, step: int, cells: Sequence[tuple[str, str]] = (), *, unit: str = "step"
        ) -> None:
            ends_s.append(_read_clocks())
            super().show_progress(step, cells, unit=unit)

    rows = train_here(spec.options, display=TimedDisplay(Console(quiet=True)))
    return add_seconds(list(map(read_step, rows)), ends_s)


def _read_clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def add_seconds(steps: list[Figures], ends_s: Sequence[tuple[float, float]]) -> list[Figures]:
    """Return the steps with their seconds, from the clocks' at the ends of steps; training is what is left of them."""
    for step, (step_s, cpu_s) in zip(steps, np.diff(ends_s, axis=0).tolist(), strict=False):
        step |= {"step_s": step_s, "cpu_s": cpu_s}
        step.setdefault("train_s", step_s - step["gen_s"])
    return steps


def read_step(row: Mapping[str, float]) -> Figures:
    """Return the figures of a step of gcore from its metrics."""
    return {
        "gen_s": row["timing_s/gen"] + row.get("timing_s/reward", 0.0) + row["timing_s/sync"],
        "train_s": row["timing_s/train"],
    }


def summarise_steps(steps: Sequence[Figures], samples_per_step: int) -> Figures:
    """Return medians of seconds."""
    figures = {metric: median(step[metric] for step in steps) for metric in steps[0]}
    figures["samples_per_s"] = samples_per_step / figures["step_s"]
    return figures


def compare(workload: str, rows: Mapping[str, Row], rounds: Rounds) -> list[str]:
    """Return the ratios of gcore's contenders to TRL, with the aim."""
    lines: list[str] = []
    for contender in rows:
        speed = paired_ratio(rounds.runs, "trl", contender, "step_s")
        cpu = paired_ratio(rounds.runs, "trl", contender, "cpu_s")
        if contender == "trl" or speed is None or cpu is None:
            continue
        line = f"{contender} / trl: {speed:.2f}x the speed, {cpu:.2f}x by CPU seconds"
        if contender == "gcore" and workload == "short":
            line += f" (aim: at least 3.3x, {verdict(speed >= 3.3)})"
        lines.append(line)
    return lines


_OPTIONS = """
--recipe=own_data --device=cpu --task.name=chain_sum --task.params.min_terms=2 --task.params.max_terms=2
--task.params.min_digits=1 --task.params.max_digits=1 --task.num-train=4096 --task.num-val=32
--data.train-batch-size={workload.train_batch_size} --data.max-prompt-length=4
--data.max-response-length={workload.max_response_length} --rollout.n={workload.n}
--rollout.max-num-seqs={workload.samples_per_step} --algorithm.filter-groups=False --actor.optim.lr=1e-5
--trainer.total-training-steps={num_steps} --trainer.save-freq={num_steps} --trainer.test-freq={num_steps}
--trainer.tensorboard=False
"""


def list_options(workload: Workload, num_steps: int) -> list[str]:
    """Return the options of `gcore-llm train` for a workload: plain GRPO, no dynamic sampling, one update a step.

    Of the about two hundred sums, those held out are not trained on. Tokens are characters: 7+8= has four. The rate is
    so low that response lengths stay the same throughout a run.
    """
    options = _OPTIONS.format(workload=workload, num_steps=num_steps).split()
    if workload.reward:
        options.append(f"--reward={workload.reward}")
    return options


def make_model(workload: Workload, model: Path) -> None:
    """Make the model that the workload trains."""
    from gcore_runs import write_atomically

    if workload.name == "long":
        model.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(model, _write_long_tailed)
        return
    # Until about four of ten sampled sums are correct.
    options = ["--warmup.max-steps=400", "--warmup.target-accuracy=0.4", "--warmup.test-freq=10"]
    warm_up(model, [*options, *list_options(workload, 1)])


def warm_up(model: Path, options: Sequence[str]) -> None:
    """Make the tiny model of `gcore-llm train`, fine-tuned as a run with these options does before its first step."""
    model.parent.mkdir(parents=True, exist_ok=True)
    name = "warm-up"
    words = [*options, "--trainer.total-training-steps=1"]
    run_training(
        "gcore_llm",
        words,
        name=name,
        folder=model.parent,
        environment={},
    )
    run = model.parent / "runs" / name
    (run / "model").rename(model)
    shutil.rmtree(run)


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

    make_tiny_model(folder, seed=0)
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


def run_trl(spec: Spec) -> list[Figures]:
    """Run TRL's GRPOTrainer as published, timed by overriding its methods; return the figures of every step."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl.trainer.grpo_trainer import GRPOTrainer

    from gcore_llm.cli import parse_train
    from gcore_llm.data.tasks import load_task
    from gcore_llm.sampling import reward_function
    from gcore_runs import build_tokenizer, resolve

    class TimedTrainer(GRPOTrainer):
        gen_s = 0.0
        """Seconds of all that precedes the forward passes: generation, rewards, advantages."""

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            with timed() as figures:
                inputs: Any = super()._prepare_inputs(generation_batch)
            self.gen_s += figures["wall_s"]
            return inputs

    class Callback(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends_s.append(_read_clocks())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """Called when the optimizer has stepped; the next step begins here."""
            ends_s.append(_read_clocks())
            steps.append({"gen_s": trainer.gen_s})
            trainer.gen_s = 0.0

    workload = WORKLOADS[spec.part]
    config = resolve(parse_train(spec.options))
    tokenizer = build_tokenizer(Path(config.model))
    prompts = load_task(config.task, config.data, tokenizer, seed=config.seed).train
    reward = reward_function(config)
    ends_s: list[tuple[float, float]] = []
    steps: list[Figures] = []

    def score_all(completions: list[str], prompt_index: list[int], **_: Any) -> list[float | None]:
        values: list[float | None] = []
        for index, completion in zip(prompt_index, completions, strict=True):
            prompt = prompts[index]
            value: Any = reward(prompt.text, completion, prompt.row)
            values.append(float(getattr(value, "score", value)))
        return values

    policy: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32)
    rows = [{"prompt": prompt.text, "prompt_index": index} for index, prompt in enumerate(prompts)]
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TimedTrainer(
            model=policy,
            reward_funcs=score_all,
            args=_trl_config(workload, config, scratch),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.add_callback(Callback())
        trainer.train()
    return add_seconds(steps, ends_s)


def _trl_config(workload: Workload, config: "TrainConfig", scratch: str) -> Any:
    from trl.trainer.grpo_config import GRPOConfig

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
        max_steps=config.trainer.total_training_steps,
        beta=0.0,
        seed=config.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )
