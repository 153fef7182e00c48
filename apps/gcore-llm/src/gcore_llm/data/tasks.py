"""Problems of reasoning-gym tasks, as prompts, with worked examples for some."""

import difflib
import re
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from itertools import accumulate
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gcore_llm.prompts import Problem, PromptSets, load_val_files, make_prompts, val_prompts
from gcore_llm.sections import DataConfig, TaskConfig
from gcore_rollout import import_reasoning_gym
from gcore_runs import UserError, one_line
from gcore_runs.settings.checks import convert_value

_VAL_SEED = 1_000_003

_SET_BY_GCORE = {"size": "task.num_train and task.num_val", "seed": "seed"}
"""Settings of every task that gcore gives itself, and ours that say what."""


def load_task(task: TaskConfig, data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Generate a task's problems and make prompts of them; raises as `make_problems`, or if all are too long."""
    train_problems, val_problems = make_problems(task, seed=seed)
    train = make_prompts(train_problems, tokenizer, data)
    val = make_prompts(val_problems, tokenizer, data)
    sets = PromptSets.of_length(data.max_prompt_length, train, val)
    if data.val_files:
        further = val_prompts(load_val_files(data, tokenizer, fits=data.max_prompt_length), data)
        sets = replace(
            further,
            train=sets.train,
            val=sets.val,
            longest=max(sets.longest, further.longest),
            num_too_long=sets.num_too_long + further.num_too_long,
        )
    if not sets.train or not sets.val:
        lengths = [len(p.token_ids) for p in train + val]
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: the problems of {task.name} are longer, they have "
            f"{min(lengths)} to {max(lengths)} tokens"
        )
    return sets


def make_problems(task: TaskConfig, *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Generate a task's training and held-out problems, none among both; raises as `make_settings`."""
    held_out = {p.value: p for p in _problems(task, size=task.num_val, seed=_VAL_SEED)}
    training = [
        p for p in _problems(task, size=task.num_train, seed=seed) if p.value not in held_out
    ]
    if not training:
        raise UserError(
            f"task.name is {task.name!r}: all of its training problems are held out, too; expected task.params that "
            "give more different problems, or a lower task.num_val"
        )
    return training, list(held_out.values())


def _problems(task: TaskConfig, *, size: int, seed: int) -> Iterator[Problem]:
    dataset = make_dataset(task, size=size, seed=seed)
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:
            # A generator raises whatever its settings lead it to.
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(
                f"task.name is {task.name!r}: its problem {index} cannot be made: {reason}"
            ) from error
        # Without the sentence around a sum, which a tiny model would spend its time reading: 7+8-3=
        question = entry["question"]
        if task.name == "chain_sum":
            question = f"{_terms(entry)}="
        row = {"prompt": question, "entry": entry, "answer": entry["answer"]}
        yield Problem(value=question, row=row, where=f"task {task.name}")


def _terms(entry: Mapping[str, Any]) -> str:
    return entry["metadata"]["expression"].replace(" ", "")


def worked_sum(row: Mapping[str, Any]) -> str:
    """``7+8-3`` worked out from the left: ``15-3=12``."""
    terms: list[str] = re.findall(r"[+-]?\d+", _terms(row["entry"]))
    sums = accumulate(map(int, terms))
    next(sums)
    return "=".join(str(total) + "".join(terms[i:]) for i, total in enumerate(sums, 2))


WORKED_EXAMPLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"chain_sum": worked_sum}
"""How a row's answer is worked out, for tasks that a model can be warmed up on."""


def require_worked_examples(task: str, *, instead: str) -> None:
    """Raise a `UserError` if a task has no worked examples; it says what to do with such a task ``instead``."""
    if task not in WORKED_EXAMPLES:
        names = ", ".join(WORKED_EXAMPLES)
        raise UserError(
            f"task.name is {task!r}; expected a task with worked examples ({names}), {instead}"
        )


def make_dataset(task: TaskConfig, *, size: int, seed: int) -> Any:
    """Make ``size`` problems of the task, to be indexed; raises as `make_settings`."""
    settings = make_settings(task, size=size, seed=seed)
    with _refusals(task):
        return import_reasoning_gym().factory.DATASETS[task.name][0](config=settings)


def make_settings(task: TaskConfig, *, size: int, seed: int) -> Any:
    """Make the task's own settings, of reasoning-gym's class for it; `UserError` if it refuses one of them."""
    gym = import_reasoning_gym()
    params = _params(task.name, task.params, "task.params", gym)
    with _refusals(task):
        settings = gym.factory.DATASETS[task.name][1](size=size, seed=seed, **params)
        if hasattr(settings, "validate"):
            settings.validate()
        return settings


@contextmanager
def _refusals(task: TaskConfig) -> Generator[None]:
    """Raise `UserError` instead of the assertions of a task, and of anything else that its settings lead it to."""
    try:
        yield
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        raise UserError(
            f"task.name is {task.name!r} with task.params {task.params}: {reason}"
        ) from error


def _params(name: str, params: Mapping[str, Any], where: str, gym: Any) -> dict[str, Any]:
    """``params`` with the types that the task declares: tuples for lists, enumerations for text, and so on."""
    tasks = gym.factory.DATASETS
    if name not in tasks:
        raise UserError(
            f"task.name is {name!r}; expected a task of reasoning-gym, {_name_nearest(name, tasks)}"
        )
    settings_class = tasks[name][1]
    hints = get_type_hints(settings_class)
    declared = {f.name: f for f in fields(settings_class) if f.name not in _SET_BY_GCORE}
    converted_params: dict[str, Any] = {}
    for key, value in params.items():
        if key in _SET_BY_GCORE:
            raise UserError(f"{where}.{key} is {value!r}: {_SET_BY_GCORE[key]} set it")
        if key not in declared:
            raise UserError(
                f"{where}.{key} is not a setting of {name!r}; expected {_name_nearest(key, declared)}"
            )
        make = declared[key].default_factory
        default = declared[key].default if make is MISSING else make()
        converted_params[key] = _convert(f"{where}.{key}", value, hints[key], default=default)
    if name == "composite":
        for i, spec in enumerate(converted_params.get("datasets", [])):
            spec.config = _params(spec.name, spec.config, f"{where}.datasets[{i}].config", gym)
    return converted_params


def _convert(field: str, value: Any, declared: Any, *, default: Any) -> Any:
    """Return a value as the type that a task has ``declared``, or as that of its default, as some declare another."""
    args = get_args(declared)
    if value == "None" and type(None) in args:
        return None
    if get_origin(declared) is tuple and len(args) == 1:
        declared = tuple[args[0], ...]  # tuple[str] is written for any number of them
    accepted = args if type(None) in args else (declared,)
    is_sequence = any((get_origin(t) or t) in (list, tuple) for t in accepted)
    if declared is str:
        value = str(value)
    elif isinstance(value, list) and args[:1] == (str,):
        value = list(map(str, value))
    elif isinstance(value, bool) and declared is not bool and bool not in args:
        raise UserError(f"{field} is {value}; expected {getattr(declared, '__name__', declared)}")
    elif is_sequence and not isinstance(value, list | tuple | type(default)):
        value = [value]  # one value on the command line
    try:
        return convert_value(field, value, declared)
    except UserError:
        if type(value) is type(default) and get_origin(declared) is not Literal:
            return value
        raise


def _name_nearest(name: str, accepted: Collection[str]) -> str:
    similar = difflib.get_close_matches(name, accepted, n=3)
    similar = similar or [key for key in accepted if name in key or key in name][:3]
    if similar:
        return f"such as {', '.join(similar)}"
    return f"one of {', '.join(sorted(accepted))}"
