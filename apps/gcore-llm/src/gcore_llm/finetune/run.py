"""The training loop of `gcore-llm sft`, `reward-model` and `dpo`, from settings to a finished run."""

import json
import logging
import math
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gcore_ckpt import Checkpointer
from gcore_controller import PromptLoader
from gcore_llm.finetune.config import DPORunConfig, FineTuneConfig
from gcore_llm.finetune.data import Example, ExampleSets, in_micro_batches, load_examples, task_rows
from gcore_llm.finetune.tokens import Encoder
from gcore_llm.finetune.warmup import make_model
from gcore_llm.finetune.worker import FineTuneWorker, objective_of
from gcore_llm.prompts import longest_sequence
from gcore_llm.report import KINDS
from gcore_llm.sections import drop_other_export
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import RolloutError, VisionProcessor
from gcore_runs import (
    RunResult,
    Supervisor,
    mix_sets,
    model_folder,
    with_adapter,
)
from gcore_runs.errors import UserError
from gcore_runs.loop.recorder import Stop
from gcore_runs.run_folder import MetricsWriter, write_atomically
from gcore_runs.settings.resources import resolve
from gcore_trainer import MicroBatch, Sample, TokenScores, check_extras

if TYPE_CHECKING:
    from gcore_runs.loop.recorder import Display

_logger = logging.getLogger(__name__)


def fine_tune(config: FineTuneConfig, display: "Display | None" = None) -> RunResult:
    """Train a model on given answers, or resume the run of this name.

    Args:
        config: the settings of sft, reward-model or dpo.
        display: where progress is shown; None: nowhere, and `logging` gets the same lines.

    Returns:
        the run's folder, and its first and last evaluation.

    Raises:
        UserError: wrong settings or rows, found before anything is written.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    config = with_adapter(resolve(config))
    if config.optim.name != "adamw":
        check_extras(optimizer_names=[config.optim.name])
    with Supervisor(config, app="gcore-llm", display=display) as supervisor:
        tokenizer, encoder = _tokenizer(config)
        rows = task_rows(config) if config.task.name else None
        sets = load_examples(config, encoder, rows)
        model = model_folder(config.model) if config.model else None
        _check_fits(sets, model)
        sizes = f"{len(sets.train):,} training rows, {len(sets.val):,} held out"
        run = supervisor.open_run(*sets.notices, sizes)
        if rows and model is None and not run.model.is_dir():
            supervisor.run_async(make_model(config, run, tokenizer, rows[0], supervisor.display))
        drop_other_export(run.export, config)
        _Loop(config, sets, supervisor, tokenizer).train(model or run.model)
        return supervisor.finish(KINDS)


def _tokenizer(config: FineTuneConfig) -> tuple[Any, Encoder]:
    """Check that the config names a model and data, and return the model's tokenizer and the encoder of rows."""
    from gcore_runs import build_tokenizer, check_model
    from gcore_runs.inputs import eos_token_ids

    if not config.task.name and not config.data.train_files:
        raise UserError(
            "data.train_files is not set; expected one or more files, or data sets on the Hub, with model"
        )
    if not config.model and not config.task.name:
        raise UserError(
            "model is not set; expected a Hugging Face folder, or a model's name on its Hub, with data.train_files"
        )
    if config.model:
        model = model_folder(config.model)
        check_model(model)
        tokenizer = build_tokenizer(model)
    else:
        model = None
        tokenizer = tiny_tokenizer()
    vision = None
    if model is not None and config.data.image_key:
        try:
            vision = VisionProcessor.from_pretrained(model)
        except RolloutError as error:
            raise UserError(f"data.image_key is {config.data.image_key!r}: {error}") from None
    encoder = Encoder(
        tokenizer,
        eos_token_ids=eos_token_ids(tokenizer, model),
        apply_chat_template=config.data.apply_chat_template == "auto",
        chat_template_kwargs=config.data.chat_template_kwargs,
        vision=vision,
    )
    return tokenizer, encoder


def _check_fits(sets: ExampleSets, model: Path | None) -> None:
    limit = longest_sequence(model)
    longest = max(map(_num_tokens, chain(*sets.train, *sets.val)))
    if limit and longest > limit:
        raise UserError(
            f"the longest row has {longest} tokens; expected at most {limit}, which the model takes; a lower "
            "data.max_length leaves longer rows out"
        )


def _num_tokens(sample: Sample) -> int:
    return sample.prompt_ids.size + sample.response_ids.size


def _padding_token(tokenizer: Any, model: Path) -> str:
    """Return a padding token that ends no response of a model folder, as the tokenizer's own may do.

    transformers scores the last token that is no padding, and refuses batches without a padding token.
    """
    from gcore_runs.inputs import eos_token_ids

    ends = eos_token_ids(tokenizer, model)
    special = [tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids]
    # Without a special token to spare any other one will do: the attention mask hides it.
    candidates = chain(special, range(len(ends) + 1))
    usable = next(token for token in candidates if token is not None and token not in ends)
    return tokenizer.convert_ids_to_tokens(usable)


class _Loop:
    """The steps of one run, with its model, checkpoints and evaluations."""

    def __init__(
        self, config: FineTuneConfig, sets: ExampleSets, supervisor: Supervisor, tokenizer: Any
    ) -> None:
        self._config = config
        self._sets = sets
        self._supervisor = supervisor
        self._tokenizer = tokenizer
        self._display = supervisor.display
        self._run_async = supervisor.run_async
        self._objective = objective_of(config)
        num_rows = math.ceil(config.trainer.total_epochs * len(sets.train))
        self._total = config.trainer.total_training_steps or math.ceil(
            num_rows / config.data.train_batch_size
        )
        self._stop = Stop()
        self._held_out = "-"

    def train(self, model: Path) -> None:
        """Train from the last checkpoint, or from the initial model, to the export."""
        from gcore_llm.learning.preparation import workload_of
        from gcore_llm.learning.trainer_worker import start_ranks

        config = self._config
        run = self._supervisor.run
        is_resumed = bool(Checkpointer(run.checkpoints).steps())
        first_step = self._supervisor.resume(self._total)
        if first_step is None:
            return
        self._workload = workload_of(model)
        trainer = replace(config.trainer, total_training_steps=self._total)
        config_with_length = replace(config, trainer=trainer)
        self._learner = start_ranks(
            FineTuneWorker, config_with_length, trainer, model, run.checkpoints
        )
        try:
            with self._stop.catch_interrupts():
                if isinstance(config, DPORunConfig):
                    self._add_reference(is_resumed=is_resumed)
                self._val = self._micro_batches(self._sets.val)
                train = self._mix(self._sets.train)
                self._loader: PromptLoader[Example] = PromptLoader(
                    train, seed=config.data.shuffle_seed
                )
                if is_resumed:
                    self._loader.load_state(self._learner.load()["loader"])
                with self._supervisor.metrics_writer(last_step=first_step) as writer:
                    self._steps(first_step, writer)
            self._supervisor.export(self._export)
        finally:
            self._learner.close()

    def _mix(self, train: list[Example]) -> Sequence[Example]:
        """Return the training examples, by data.weights if there are any."""
        if not self._config.data.weights:
            return train
        rest = iter(train)
        return mix_sets([list(islice(rest, size)) for size in self._sets.sizes], self._config.data)

    def _export(self, path: Path) -> None:
        """Write a Hugging Face folder."""
        self._learner.save_pretrained(path)
        if self._objective.scores == "values" and not self._config.exports_adapters:
            self._tokenizer.pad_token = _padding_token(self._tokenizer, path)
            file = path / "config.json"
            settings = json.loads(file.read_text())
            settings["pad_token_id"] = self._tokenizer.pad_token_id
            file.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        self._tokenizer.save_pretrained(path)

    def _add_reference(self, *, is_resumed: bool) -> None:
        """Set the log-probs of the training and held-out pairs under the initial model.

        They are computed once, and kept in the run's folder: a frozen copy of the model would take memory during the
        whole run and a forward pass whenever a pair is used again.
        """
        examples = self._sets.train + self._sets.val
        path = self._supervisor.run.path / "reference_log_probs.npz"
        samples = list(chain(*examples))
        sizes = [sample.response_ids.size for sample in samples]
        if not is_resumed:
            self._display.phase("reference log-probs", total=len(examples))
            log_probs_of: dict[int, Any] = {}
            for batch, scores in self._score(self._micro_batches(examples)):
                log_probs_of.update(zip(map(id, batch), scores, strict=True))
                self._display.show_progress(len(log_probs_of) // 2)
            log_probs = np.concatenate([log_probs_of[id(sample)] for sample in samples])

            def write(partial: Path) -> None:
                with partial.open("wb") as file:
                    np.savez(file, log_probs=log_probs)

            write_atomically(path, write)
        elif not path.is_file():
            raise UserError(
                f"{path} is missing; expected the initial model's log-probs; --resume never starts a new run"
            )
        else:
            with np.load(path) as file:
                log_probs = file["log_probs"]
            if log_probs.size != sum(sizes):
                raise UserError(
                    f"{path} holds log-probs of {log_probs.size} tokens; expected {sum(sizes)}, as the data has: the "
                    "data of a run cannot change; --resume never starts a new run"
                )
        parts = np.split(log_probs, np.cumsum(sizes)[:-1])
        for sample, ref_log_probs in zip(samples, parts, strict=True):
            sample.ref_log_probs = ref_log_probs

    def _score(
        self, micro_batches: Sequence[MicroBatch]
    ) -> Generator[tuple[MicroBatch, list[Any]]]:
        """Yield micro-batches and the scores [R] of their samples, by the present model."""
        count = self._learner.num_replicas
        for first in range(0, len(micro_batches), count):
            batches = micro_batches[first : first + count]
            scores = self._run_async(self._learner.score("actor", self._read_images(batches)))
            yield from zip(batches, scores, strict=True)
            self._stop.check()

    def _steps(self, first_step: int, writer: MetricsWriter) -> None:
        config = self._config
        total = self._total
        loader = self._loader
        self._display.phase("training", total=total, done=first_step)
        step = saved_step = first_step

        def save() -> None:
            self._learner.save(step, {"step": step, "loader": loader.state()})

        try:
            if not self._supervisor.is_evaluated(step, total):
                self._evaluate(step, writer)
            while step < total:
                self._stop.check()
                start_s = time.perf_counter()
                batch = [example for _, example in loader.take(config.data.train_batch_size)]
                micro_batches = self._read_images(self._micro_batches(batch))
                metrics = self._run_async(self._learner.train_step("actor", micro_batches))
                step += 1
                num_tokens = sum(map(_num_tokens, chain(*batch)))
                step_s = time.perf_counter() - start_s
                metrics |= {
                    "data/epoch": loader.epoch,
                    "perf/total_num_tokens": float(num_tokens),
                    "timing_s/step": step_s,
                    "perf/throughput": num_tokens / step_s,
                }
                self._record(step, metrics, writer)
                if step % config.trainer.save_freq == 0 or step == total:
                    save()
                    saved_step = step
                if self._supervisor.is_evaluation_due(step, total):
                    self._evaluate(step, writer)
        except KeyboardInterrupt:
            # Noted between two steps; raised anywhere else, it may have hit half an update.
            if self._stop.is_orderly and saved_step < step:
                save()
            raise

    def _micro_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        return in_micro_batches(
            examples,
            workload=self._workload,
            max_tokens=self._config.max_token_len,
            num_multiple=self._learner.num_replicas,
        )

    def _read_images(self, micro_batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        """Return micro-batches with the pixels of their images, which only they keep in memory."""
        from gcore_llm.learning.preparation import read_images

        images = self._sets.images
        if not images:
            return micro_batches
        return [
            [replace(sample, images=read_images(images.get(sample))) for sample in batch]
            for batch in micro_batches
        ]

    def _record(self, step: int, metrics: dict[str, float], writer: MetricsWriter) -> None:
        writer.write(step, metrics)
        _logger.info("step %d: %.2f s", step, metrics["timing_s/step"])
        cells: list[tuple[str, str]] = []
        for name, value in metrics.items():
            prefix, _, label = name.partition("/")
            if prefix in ("sft", "rm", "dpo"):
                cells.append((label.replace("_", " "), f"{value:.3f}"))
        cells.append(("held-out", self._held_out))
        cells.append(("lr", f"{metrics['actor/lr']:.2g}"))
        cells.append(("epoch", f"{metrics['data/epoch']:.2f}"))
        cells.append(("tokens/s", f"{metrics['perf/throughput']:,.0f}"))
        self._display.show_progress(step, cells)
        if not math.isfinite(metrics["actor/grad_norm"]):
            self._display.say(f"step {step}: the gradient is not finite, the update was skipped")

    def _evaluate(self, step: int, writer: MetricsWriter) -> None:
        """Record the objective's metrics of the held-out samples, under ``val/``."""
        if not self._val:
            return
        totals = self._objective.totals(list(chain(*self._val)))
        sums: dict[str, float] = {}
        for batch, sample_scores in self._score(self._val):
            scores: Any = torch.from_numpy(np.concatenate(sample_scores))
            if self._objective.scores == "tokens":
                # Predictions come without entropies.
                scores = TokenScores(log_probs=scores, entropies=torch.zeros_like(scores))
            _, partial_metrics = self._objective.partial_loss(scores, batch, totals)
            for name, value in partial_metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        metrics = dict(self._objective.metrics(sums))
        metrics.pop("sft/entropy", None)
        writer.write(step, {f"val/{name}": value for name, value in metrics.items()})
        cells: list[str] = []
        for name, value in metrics.items():
            label = name.rpartition("/")[2].replace("_", " ")
            cells.append(f"{label} {value:.3f}")
            if label == "loss":
                self._held_out = f"{value:.3f}"
        self._display.say(f"step {step}: held-out {', '.join(cells)}")
