"""reasoning-gym tasks as prompts with worked examples."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gcore_llm.config import DataConfig, TaskConfig
from gcore_llm.data.prompts import Problem, PromptSets, make_prompts
from gcore_llm.data.task_params import make_dataset
from gcore_runs.errors import UserError, one_line

_VAL_SEED = 1_000_003


def load_task(task: TaskConfig, data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Generate a task's problems and make prompts of them; no held-out problem is trained on.

    Raises:
        UserError: see `make_problems`; or all problems are longer than data.max_prompt_length.
    """
    train, val = (make_prompts(problems, tokenizer, data) for problems in make_problems(task, seed=seed))
    kept_train, kept_val = ([p for p in ps if len(p.token_ids) <= data.max_prompt_length] for ps in (train, val))
    num_too_long = len(train) + len(val) - len(kept_train) - len(kept_val)
    if not kept_train or not kept_val:
        lengths = [len(p.token_ids) for p in (*train, *val)]
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: the problems of {task.name} are longer, they have "
            f"{min(lengths)} to {max(lengths)} tokens"
        )
    return PromptSets(train=kept_train, val=kept_val, num_too_long=num_too_long)


def make_problems(task: TaskConfig, *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Generate a task's training and held-out problems; none is among both.

    Raises:
        UserError: see `make_dataset`; or no problem is left to train on.
    """
    held_out = {p.value: p for p in _problems(task, size=task.num_val, seed=_VAL_SEED)}
    training = [p for p in _problems(task, size=task.num_train, seed=seed) if p.value not in held_out]
    if not training:
        raise UserError(
            f"task.name is {task.name!r}: all of its training problems are held out, too; expected task.params that "
            "give more different problems, or a lower task.num_val"
        )
    return training, list(held_out.values())


def _problems(task: TaskConfig, *, size: int, seed: int) -> Iterator[Problem]:
    dataset = make_dataset(task, size=size, seed=seed)
    phrase = _PHRASES.get(task.name, _question)
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:
            # A generator raises whatever its settings lead it to.
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"task.name is {task.name!r}: its problem {index} cannot be made: {reason}") from error
        row = {"entry": entry, "answer": entry["answer"]}
        yield Problem(value=phrase(entry), row=row, where=f"task {task.name}")


def _question(entry: Mapping[str, Any]) -> str:
    return entry["question"]


def _bare_sum(entry: Mapping[str, Any]) -> str:
    """``7+8-3=``: without the sentence around it, which a tiny model would spend its time reading."""
    return entry["metadata"]["expression"].replace(" ", "") + "="


_PHRASES: dict[str, Callable[[Mapping[str, Any]], str]] = {"chain_sum": _bare_sum}


def worked_sum(row: Mapping[str, Any]) -> str:
    """``7+8-3`` worked out from the left: ``15-3=12``."""
    terms: list[str] = re.findall(r"[+-]?\d+", row["entry"]["metadata"]["expression"].replace(" ", ""))
    lines: list[str] = []
    while len(terms) > 1:
        terms = [str(int(terms[0]) + int(terms[1])), *terms[2:]]
        lines.append("".join(terms))
    return "=".join(lines)


WORKED_EXAMPLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"chain_sum": worked_sum}
"""How a row's answer is worked out, for tasks that a model can be warmed up on."""
