"""A reasoning-gym task from its settings in TOML or on the command line."""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gcore_llm.config import TaskConfig
from gcore_rollout import import_reasoning_gym
from gcore_runs.errors import UserError, one_line
from gcore_runs.settings.parsing import converted

_OURS = {"size": "task.num_train and task.num_val", "seed": "seed"}
"""Settings of every task that gcore gives itself, and ours that say what."""


def make_dataset(task: TaskConfig, *, size: int, seed: int) -> Any:
    """Make ``size`` problems of the task, to be indexed.

    Raises:
        UserError: see `make_settings`; or a file that the task reads is missing.
    """
    settings = make_settings(task, size=size, seed=seed)
    try:
        return import_reasoning_gym().factory.DATASETS[task.name][0](config=settings)
    except Exception as error:
        raise _refused(task, error) from error


def make_settings(task: TaskConfig, *, size: int, seed: int) -> Any:
    """Make the task's own settings, of the class that reasoning-gym has for it.

    Raises:
        UserError: reasoning-gym does not know the task or one of its settings, or refuses a value.
    """
    gym = import_reasoning_gym()
    params = _params(task.name, task.params, "task.params", gym)
    try:
        settings = gym.factory.DATASETS[task.name][1](size=size, seed=seed, **params)
        if hasattr(settings, "validate"):
            settings.validate()
    except Exception as error:
        raise _refused(task, error) from error
    return settings


def _refused(task: TaskConfig, error: Exception) -> UserError:
    """A task checks its settings by assertions, and raises anything else that they lead it to."""
    reason = one_line(error) or type(error).__name__
    return UserError(f"task.name is {task.name!r} with task.params {task.params}: {reason}")


def _params(name: str, params: Mapping[str, Any], where: str, gym: Any) -> dict[str, Any]:
    """``params`` with the types that the task declares: tuples for lists, enumerations for text, and so on."""
    tasks = gym.factory.DATASETS
    if name not in tasks:
        raise UserError(f"task.name is {name!r}; expected a task of reasoning-gym, {_nearest(name, tasks)}")
    kind = tasks[name][1]
    hints = get_type_hints(kind)
    known = {f.name: f for f in fields(kind) if f.name not in _OURS}
    found: dict[str, Any] = {}
    for key, value in params.items():
        if key in _OURS:
            raise UserError(f"{where}.{key} is {value!r}: {_OURS[key]} set it")
        if key not in known:
            raise UserError(f"{where}.{key} is not a setting of {name!r}; expected {_nearest(key, known)}")
        found[key] = _value(f"{where}.{key}", value, hints[key], default=_default(known[key]))
    if name == "composite":
        for i, spec in enumerate(found.get("datasets", [])):
            spec.config = _params(spec.name, spec.config, f"{where}.datasets[{i}].config", gym)
    return found


def _value(field: str, value: Any, kind: Any, *, default: Any) -> Any:
    """``value`` as the type ``kind`` that a task declares, or as that of its default, as some declare another."""
    if value == "None" and type(None) in get_args(kind):
        return None
    if get_origin(kind) is tuple and len(get_args(kind)) == 1:
        kind = tuple[get_args(kind)[0], ...]  # tuple[str] is written for any number of them
    if kind is str:
        value = str(value)
    elif isinstance(value, list) and get_args(kind)[:1] == (str,):
        value = [str(v) for v in value]
    elif isinstance(value, bool) and bool not in (kind, *get_args(kind)):
        raise UserError(f"{field} is {value}; expected {getattr(kind, '__name__', kind)}")
    elif _is_sequence(kind) and not isinstance(value, list | tuple | type(default)):
        value = [value]  # one value on the command line
    try:
        return converted(field, value, kind)
    except UserError:
        if type(value) is type(default) and get_origin(kind) is not Literal:
            return value
        raise


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _is_sequence(kind: Any) -> bool:
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    return any((get_origin(k) or k) in (list, tuple) for k in kinds)


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3) or [k for k in known if name in k or k in name][:3]
    return f"such as {', '.join(near)}" if near else f"one of {', '.join(sorted(known))}"
