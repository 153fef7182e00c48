"""DPO's reference: log-probs of every answer under the initial model."""

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
    """The examples with the log-probs that ``trainer``'s model gives them now, before its first step.

    Computed once for the whole data set, and kept in the run's folder: a frozen copy of the model would take its memory
    all along and a forward pass every time a pair comes up again, and a run that goes on would have to load it anew.

    Args:
        path: of the ``.npz`` file.
        reuse: read the file: the model is no longer the initial one.
        progressed: called with the number of pairs done.

    Raises:
        UserError: the file is not there any more, or not of these examples.
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
        raise UserError(f"{path} is gone: it held the initial model's log-probs, --resume never begins anew")
    with np.load(path) as file:
        log_probs = file["log_probs"]
    if log_probs.size != num_tokens:
        raise UserError(
            f"{path} holds log-probs of {log_probs.size} tokens, the data has {num_tokens}: the data of a run cannot "
            "change, --resume never begins anew"
        )
    return log_probs


def _computed(
    examples: list[Example],
    trainer: TorchTrainer,
    workload: TransformerWorkload,
    max_tokens: int,
    progressed: Callable[[int], None],
) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """[all tokens], in the examples' order."""
    found: dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]] = {}
    num_done = 0
    for batch in in_micro_batches(examples, workload=workload, max_tokens=max_tokens):
        for sample, log_probs in zip(batch, trainer.log_probs([batch])[0], strict=True):
            found[id(sample)] = log_probs
        num_done += len(batch) // 2
        progressed(num_done)
    return np.concatenate([found[id(s)] for e in examples for s in e])
