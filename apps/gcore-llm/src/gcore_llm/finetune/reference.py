"""Reference log-probs of DPO: those of every answer under the initial model."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gcore_llm.finetune.data import Example, in_micro_batches
from gcore_placement import TransformerWorkload
from gcore_runs.errors import UserError
from gcore_runs.run_folder import write_atomically
from gcore_trainer import TorchTrainer


def with_reference_log_probs(
    examples: list[Example],
    path: Path,
    trainer: TorchTrainer,
    *,
    reuse: bool,
    workload: TransformerWorkload,
    max_tokens: int,
    progressed: Callable[[int], None],
) -> list[Example]:
    """Return the examples with their log-probs under ``trainer``'s model, before its first step.

    They are computed once for the whole data set, and kept in the run's folder: a frozen copy of the model would take
    memory during the whole run and a forward pass whenever a pair is used again.

    Args:
        path: the ``.npz`` file.
        reuse: read the file, because the model is no longer the initial one.
        progressed: called with the number of pairs done.

    Raises:
        UserError: the file is missing, or has other examples.
    """
    sizes = [s.response_ids.size for e in examples for s in e]
    if reuse:
        log_probs = _read(path, num_tokens=sum(sizes))
    else:
        log_probs = _computed(examples, trainer, workload, max_tokens, progressed)

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.savez(file, log_probs=log_probs)

        write_atomically(path, write)
    parts = iter(np.split(log_probs, np.cumsum(sizes)[:-1]))
    return [[dataclasses.replace(s, ref_log_probs=next(parts)) for s in example] for example in examples]


def _read(path: Path, *, num_tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    if not path.is_file():
        raise UserError(f"{path} is missing; expected the initial model's log-probs; --resume never starts a new run")
    with np.load(path) as file:
        log_probs = file["log_probs"]
    if log_probs.size != num_tokens:
        raise UserError(
            f"{path} holds log-probs of {log_probs.size} tokens; expected {num_tokens}, as the data has: the data of a "
            "run cannot change; --resume never starts a new run"
        )
    return log_probs


def _computed(
    examples: list[Example],
    trainer: TorchTrainer,
    workload: TransformerWorkload,
    max_tokens: int,
    progressed: Callable[[int], None],
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return log-probs [all tokens], in the examples' order."""
    found: dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]] = {}
    num_done = 0
    for batch in in_micro_batches(examples, workload=workload, max_tokens=max_tokens):
        for sample, log_probs in zip(batch, trainer.log_probs([batch])[0], strict=True):
            found[id(sample)] = log_probs
        num_done += len(batch) // 2
        progressed(num_done)
    return np.concatenate([found[id(s)] for e in examples for s in e])
