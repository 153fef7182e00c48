"""reasoning-gym tasks as prompts with worked examples."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gcore_llm.config import DataConfig, TaskConfig
from gcore_llm.prompts import PromptSets, tokenize
from gcore_rollout.rewards import import_reasoning_gym
from gcore_runs.errors import UserError

_VAL_SEED = 1_000_003


def load_task(task: TaskConfig, data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Generate a task's problems; no held-out problem is trained on.

    Raises:
        UserError: reasoning-gym does not know the task or its settings.
    """
    held_out = dict(_problems(task, size=task.num_val, seed=_VAL_SEED))
    training = ((t, r) for t, r in _problems(task, size=task.num_train, seed=seed) if t not in held_out)
    train, val = tokenize(training, tokenizer), tokenize(held_out.items(), tokenizer)
    kept_train, kept_val = ([p for p in ps if len(p.token_ids) <= data.max_prompt_length] for ps in (train, val))
    num_too_long = len(train) + len(val) - len(kept_train) - len(kept_val)
    if not kept_train or not kept_val:
        raise UserError(f"data.max_prompt_length is {data.max_prompt_length}: the problems of {task.name} are longer")
    return PromptSets(train=kept_train, val=kept_val, num_too_long=num_too_long)


def _problems(task: TaskConfig, *, size: int, seed: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    gym = import_reasoning_gym()
    try:
        dataset = gym.create_dataset(task.name, size=size, seed=seed, **task.params)
    except (ValueError, TypeError, AssertionError) as error:
        raise UserError(f"task.name is {task.name!r} with task.params {task.params}: {error}") from None
    phrase = _PHRASES.get(task.name, _question)
    for index in range(size):
        entry = dataset[index]
        yield phrase(entry), {"entry": entry, "answer": entry["answer"]}


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
