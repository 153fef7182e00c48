"""From a config to a finished run's folder: the loop that `sft`, `reward-model` and `dpo` share."""

import logging
import math
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gcore_ckpt import Checkpointer
from gcore_controller import PromptLoader
from gcore_llm.config import MAY_CHANGE
from gcore_llm.finetune.config import DPORunConfig, FineTuneConfig
from gcore_llm.finetune.data import Example, ExampleSets, in_micro_batches, load_examples
from gcore_llm.finetune.demo import make_model, task_rows
from gcore_llm.finetune.reference import with_reference_log_probs
from gcore_llm.finetune.tokens import Encoder
from gcore_llm.finetune.trainee import Trainee
from gcore_llm.micro_batches import workload_of
from gcore_llm.model_limits import longest_sequence
from gcore_llm.report import write_report
from gcore_llm.roles import build_tokenizer, check_model, eos_token_ids
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_placement import TransformerWorkload
from gcore_runs.display import Display
from gcore_runs.errors import UserError
from gcore_runs.interrupt import Stop
from gcore_runs.logs import log_to
from gcore_runs.metrics import MetricsWriter, metrics_server
from gcore_runs.run_folder import Result, RunFolder, finish_report, open_run, read_jsonl, write_atomically
from gcore_runs.settings import resolve

if TYPE_CHECKING:
    from gcore_runs.prometheus import PrometheusExporter

_logger = logging.getLogger(__name__)


def fine_tune(config: FineTuneConfig, display: Display) -> Result:
    """Run, or go on with, the job that ``config`` describes.

    Raises:
        UserError: wrong settings or rows, found before anything is written.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    config = resolve(config)
    torch.set_num_threads(config.threads)
    if not config.task.name and not config.data.train_files:
        raise UserError("data.train_files is not set: one or more .jsonl or .parquet files are needed with model")
    if not config.model and not config.task.name:
        raise UserError("model is not set: a local Hugging Face folder is needed with data.train_files")
    if config.model:
        check_model(Path(config.model))
        tokenizer = build_tokenizer(Path(config.model))
    else:
        tokenizer = tiny_tokenizer()
    ends = eos_token_ids(tokenizer, Path(config.model) if config.model else None)
    encoder = Encoder(tokenizer, eos_token_ids=ends, apply_chat_template=config.data.apply_chat_template == "auto")
    rows = task_rows(config) if config.task.name else None
    sets = load_examples(config, encoder, rows)
    _check_fits(sets, Path(config.model) if config.model else None)
    host, port = config.trainer.prometheus_host, config.trainer.prometheus_port
    with metrics_server(run=config.name, port=port, host=host, app="gcore-llm") as prometheus:
        run = open_run(config, may_change=MAY_CHANGE)
        display.say(f"run folder: {run.path}")
        for notice in sets.notices:
            display.say(notice)
        display.say(f"{len(sets.train):,} training rows, {len(sets.val):,} held out")
        with log_to(run.logs, "main"):
            if rows and not config.model and not run.model.is_dir():
                make_model(config, run, tokenizer, rows[0], display)
            model = Path(config.model) if config.model else run.model
            _Run(config, run, model, tokenizer, sets, display, prometheus).go()
    finish_report(write_report, run)
    evaluations = [r for r in read_jsonl(run.metrics) if _is_evaluation(r)]
    return Result(
        run=run.path,
        before=evaluations[0] if evaluations else {},
        after=evaluations[-1] if evaluations else {},
    )


def _check_fits(sets: ExampleSets, model: Path | None) -> None:
    limit = longest_sequence(model)
    longest = max(s.prompt_ids.size + s.response_ids.size for e in (*sets.train, *sets.val) for s in e)
    if limit and longest > limit:
        raise UserError(
            f"the longest row has {longest} tokens: the model takes at most {limit}; a lower data.max_length leaves "
            "longer rows out"
        )


def _is_evaluation(row: dict[str, Any]) -> bool:
    return any(name.startswith("val/") for name in row)


class _Run:
    """One run, from its last checkpoint or from nothing to its export."""

    def __init__(
        self,
        config: FineTuneConfig,
        run: RunFolder,
        model: Path,
        tokenizer: Any,
        sets: ExampleSets,
        display: Display,
        prometheus: "PrometheusExporter | None",
    ) -> None:
        self._config = config
        self._run = run
        self._model = model
        self._tokenizer = tokenizer
        self._sets = sets
        self._display = display
        self._prometheus = prometheus
        self._workload: TransformerWorkload = workload_of(model)
        batch_size = config.data.train_batch_size
        num_rows = math.ceil(config.trainer.total_epochs * len(sets.train))
        self._total = config.trainer.total_training_steps or math.ceil(num_rows / batch_size)
        self._stop = Stop()
        self._held_out = "-"

    def go(self) -> None:
        """
        Raises:
            KeyboardInterrupt: after a checkpoint of the last finished step.
        """
        run, total = self._run, self._total
        with Checkpointer(run.checkpoints, keep=self._config.trainer.max_ckpt_to_keep) as checkpointer:
            saved = checkpointer.load() if checkpointer.steps() else None
            first_step: int = saved["step"] if saved else 0
            if saved and saved["digest"] != self._sets.digest:
                raise UserError(
                    f"the training rows are not those that {run.path} was begun with: the data of a run cannot "
                    "change; give the same, or --resume never, or another --name"
                )
            if first_step >= total and run.export.is_dir():
                self._display.say(f"complete: {first_step} of {total} steps are done, more need a higher total")
                return
            if saved:
                self._display.say(f"resuming after step {first_step} of {total}")
            shutil.rmtree(run.export, ignore_errors=True)
            trainee = Trainee(self._config, self._model, self._tokenizer, total_training_steps=total)
            with self._stop.noted():
                train, val = self._sets.train, self._sets.val
                if isinstance(self._config, DPORunConfig):
                    train, val = self._with_reference(trainee, is_resumed=saved is not None)
                loader: PromptLoader[Example] = PromptLoader(train, seed=self._config.data.shuffle_seed)
                if saved:
                    trainee.trainer.load_state(saved["trainer"])
                    loader.load_state(saved["loader"])
                with MetricsWriter(
                    run,
                    last_step=first_step,
                    tensorboard=self._config.trainer.tensorboard,
                    prometheus=self._prometheus,
                ) as writer:
                    self._train(trainee, loader, self._micro_batches(val), first_step, checkpointer, writer)
            checkpointer.wait()
        write_atomically(run.export, trainee.export)

    def _with_reference(self, trainee: Trainee, *, is_resumed: bool) -> tuple[list[Example], list[Example]]:
        sets = self._sets
        examples = [*sets.train, *sets.val]
        if not is_resumed:
            self._display.phase("reference log-probs", total=len(examples))

        def progressed(num_done: int) -> None:
            self._display.progressed(num_done)
            self._stop.check()

        examples = with_reference_log_probs(
            examples,
            self._run.path / "reference_log_probs.npz",
            trainee.trainer,
            reuse=is_resumed,
            workload=self._workload,
            max_tokens=self._config.max_token_len,
            progressed=progressed,
        )
        return examples[: len(sets.train)], examples[len(sets.train) :]

    def _train(
        self,
        trainee: Trainee,
        loader: PromptLoader[Example],
        val: Sequence[list[Any]],
        first_step: int,
        checkpointer: Checkpointer,
        writer: MetricsWriter,
    ) -> None:
        config = self._config
        self._display.phase("training", total=self._total, done=first_step)
        step = saved_step = first_step

        def save() -> None:
            state = {
                "step": step,
                "trainer": trainee.trainer.state(),
                "loader": loader.state(),
                "digest": self._sets.digest,
            }
            checkpointer.save(step, state)

        try:
            if not self._is_evaluated(step):
                self._evaluate(trainee, val, step, writer)
            while step < self._total:
                self._stop.check()
                start_s = time.perf_counter()
                batch = [example for _, example in loader.take(config.data.train_batch_size)]
                micro_batches = self._micro_batches(batch)
                metrics = trainee.trainer.train_step(micro_batches)
                step += 1
                self._record(step, metrics, batch, time.perf_counter() - start_s, loader.epoch, writer)
                if step % config.trainer.save_freq == 0 or step == self._total:
                    save()
                    saved_step = step
                if self._is_evaluation_due(step):
                    self._evaluate(trainee, val, step, writer)
        except KeyboardInterrupt:
            # Asked for between two steps; anywhere else it may have hit half an update.
            if self._stop.is_orderly and saved_step < step:
                save()
            raise

    def _micro_batches(self, examples: Sequence[Example]) -> list[list[Any]]:
        return in_micro_batches(examples, workload=self._workload, max_tokens=self._config.max_token_len)

    def _record(
        self,
        step: int,
        metrics: dict[str, float],
        batch: Sequence[Example],
        step_s: float,
        epoch: float,
        writer: MetricsWriter,
    ) -> None:
        num_tokens = sum(s.prompt_ids.size + s.response_ids.size for e in batch for s in e)
        metrics = {
            **metrics,
            "data/epoch": epoch,
            "perf/total_num_tokens": float(num_tokens),
            "timing_s/step": step_s,
            "perf/throughput": num_tokens / step_s,
        }
        writer.write(step, metrics)
        _logger.info("step %d: %.2f s", step, step_s)
        own = {name: value for name, value in metrics.items() if name.startswith(("sft/", "rm/", "dpo/"))}
        self._display.progressed(
            step,
            [
                *((name.partition("/")[2].replace("_", " "), f"{value:.3f}") for name, value in own.items()),
                ("held-out", self._held_out),
                ("lr", f"{metrics['actor/lr']:.2g}"),
                ("epoch", f"{epoch:.2f}"),
                ("tokens/s", f"{metrics['perf/throughput']:,.0f}"),
            ],
        )
        if not math.isfinite(metrics["actor/grad_norm"]):
            self._display.say(f"step {step}: the gradient is not finite, the update was skipped")

    def _is_evaluation_due(self, step: int) -> bool:
        return step % self._config.trainer.test_freq == 0 or step == self._total

    def _is_evaluated(self, step: int) -> bool:
        if step and not self._is_evaluation_due(step):
            return True
        return step > 0 and any(r["step"] == step and _is_evaluation(r) for r in read_jsonl(self._run.metrics))

    def _evaluate(self, trainee: Trainee, val: Sequence[list[Any]], step: int, writer: MetricsWriter) -> None:
        if not val:
            return
        metrics = trainee.evaluate(val, self._stop.check)
        writer.write(step, metrics)
        shown = {name.rpartition("/")[2].replace("_", " "): f"{value:.3f}" for name, value in metrics.items()}
        self._held_out = shown["loss"]
        self._display.say(f"step {step}: held-out " + ", ".join(f"{name} {value}" for name, value in shown.items()))
