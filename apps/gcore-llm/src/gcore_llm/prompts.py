"""The prompts of a run, tokenized, filtered and split: of the user's files, or of a reasoning-gym task."""

import difflib
import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from itertools import accumulate, chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

from gcore_llm.config import DataConfig, TaskConfig, TrainConfig
from gcore_llm.evaluation.sets import val_sources
from gcore_llm.tiny_model import MAX_POSITION_EMBEDDINGS
from gcore_rollout import Prompt, PromptImages, RolloutError, import_reasoning_gym, vision_processor
from gcore_runs import UserError, columns, converted, hold_out, image_sources, max_sequence_length, one_line, read_rows

_VAL_SEED = 1_000_003

_OURS = {"size": "task.num_train and task.num_val", "seed": "seed"}
"""Settings of every task that gcore gives itself, and ours that say what."""
_IMAGE_MARK = "<image>"
"""Marks the place of an image in a prompt that is plain text."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt before it is rendered and tokenized."""

    value: object
    """Text, or a list of chat messages."""
    row: Mapping[str, Any]
    where: str
    """Name of the prompt in errors."""


@dataclass(frozen=True, kw_only=True)
class PromptSets:
    """The prompts that a run trains on, and the held-out ones that evaluate it."""

    train: list[Prompt]
    val: list[Prompt]
    num_too_long: int
    """Number of prompts left out because they exceed data.max_prompt_length."""
    named: Mapping[str, list[Prompt]] = field(default_factory=dict[str, list[Prompt]])
    """Held-out sets with names, in addition to ``val``."""

    @classmethod
    def within(
        cls,
        max_length: int,
        train: Sequence[Prompt],
        val: Sequence[Prompt],
        named: Mapping[str, Sequence[Prompt]] = MappingProxyType({}),
    ) -> "PromptSets":
        """Return the prompts of at most so many tokens; `UserError` if a set with a name has none."""
        given = (train, val, *named.values())
        kept_train, kept_val, *others = ([p for p in prompts if len(p.token_ids) <= max_length] for prompts in given)
        if empty := [name for name, own in zip(named, others, strict=True) if not own]:
            raise UserError(f"data.max_prompt_length is {max_length}: all prompts of {empty[0]} are longer")
        num_too_long = sum(map(len, given)) - sum(map(len, (kept_train, kept_val, *others)))
        return cls(
            train=kept_train, val=kept_val, num_too_long=num_too_long, named=dict(zip(named, others, strict=True))
        )

    @property
    def held_out(self) -> list[Prompt]:
        """All held-out prompts."""
        return [*self.val, *chain(*self.named.values())]


def uses_plain_text(value: object, tokenizer: Any, data: DataConfig) -> bool:
    """Return whether a prompt is given to the model without a chat template."""
    return isinstance(value, str) and (data.apply_chat_template == "never" or tokenizer.chat_template is None)


def render(value: object, tokenizer: Any, data: DataConfig, where: str) -> str:
    """Return the text that the model continues, for a prompt given as text or, with a chat template, as messages."""
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where} is empty")
        if uses_plain_text(value, tokenizer, data):
            return value
        value = [{"role": "user", "content": value}]
    if not are_messages(value):
        raise UserError(f"{where} is {value!r:.80}; expected text, or a list of messages with role and content")
    if tokenizer.chat_template is None:
        raise UserError(f"{where} is a list of chat messages: the model's tokenizer has no chat template to render it")
    if data.image_key:
        value = [{**message, "content": _with_image_parts(message["content"])} for message in value]
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(value, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise UserError(f"{where}: the model's chat template refuses it: {error}") from None


def are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether ``value`` is a list of at least one chat message."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in value)
    )


def _with_image_parts(content: Any) -> Any:
    """Return a message's content with each mark of an image as a part of its own, as chat templates expect."""
    if not isinstance(content, str):
        # Parquet gives every part the keys of all parts, and templates test which keys exist.
        return [{k: v for k, v in part.items() if v is not None} for part in content]
    if _IMAGE_MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(_IMAGE_MARK)):
        parts += [{"type": "image"}] if i else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def takes_special_tokens(text: str, tokenizer: Any) -> bool:
    """Return whether the tokenizer adds special tokens to plain text, which it does unless the text starts with BOS."""
    return not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def make_prompts(problems: Iterable[Problem], tokenizer: Any, data: DataConfig) -> list[Prompt]:
    """Render and tokenize prompts; text rendered by a chat template has only the template's special tokens."""
    given = list(problems)
    texts = [render(p.value, tokenizer, data, p.where) for p in given]
    adds = [
        uses_plain_text(p.value, tokenizer, data) and takes_special_tokens(text, tokenizer)
        for p, text in zip(given, texts, strict=True)
    ]
    token_ids: dict[int, list[int]] = {}
    for flag in set(adds):
        places = [place for place, own in enumerate(adds) if own == flag]
        encoded = tokenizer([texts[place] for place in places], add_special_tokens=flag)
        token_ids |= zip(places, encoded["input_ids"], strict=True)
    return [Prompt(text=texts[i], token_ids=tuple(token_ids[i]), row=p.row) for i, p in enumerate(given)]


def load_files(data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Load the prompts of data.train-files and data.val-files; `UserError` if a row is wrong, or no prompt is left."""
    train = [prompt for path in data.train_files for prompt in _load_file(path, data, tokenizer)]
    sets = PromptSets.within(data.max_prompt_length, train, *load_val_files(data, tokenizer))
    if not data.val_files:
        kept_train, kept_val = hold_out(sets.train, size=data.val_size, seed=seed)
        sets = replace(sets, train=kept_train, val=kept_val)
    if not sets.train:
        shortest = min((len(p.token_ids) for p in train), default=0)
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: all {len(train)} prompts are longer, "
            f"the shortest has {shortest} tokens"
        )
    return sets


def load_val_files(
    data: DataConfig, tokenizer: Any, *, setting: str = "data.val_files"
) -> tuple[list[Prompt], dict[str, list[Prompt]]]:
    """Load the prompts of data.val-files: those of files without a name, and the sets with names."""
    val, named = list[Prompt](), dict[str, list[Prompt]]()
    for name, path, published in val_sources(data.val_files, setting=setting):
        if published is None:
            prompts = _load_file(path, data, tokenizer)
        else:
            rows = [published.problem(row, f"{path}: row {n}") for n, row in enumerate(read_rows(path), 1)]
            problems = (Problem(value=text, row=row, where=f"{path}: row {n}") for n, (text, row) in enumerate(rows, 1))
            prompts = make_prompts(problems, tokenizer, data)
        if name:
            named[name] = prompts
        else:
            val += prompts
    return val, named


def _load_file(path: str, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    rows, key = read_rows(path), data.prompt_key
    for n, row in enumerate(rows, 1):
        if key not in row:
            raise UserError(f"{path}: row {n} has no column {key!r} (data.prompt_key); it has {columns(row)}")
    problems = (Problem(value=row[key], row=row, where=f"{path}: {key} of row {n}") for n, row in enumerate(rows, 1))
    prompts = make_prompts(problems, tokenizer, data)
    if not data.image_key:
        return prompts
    if not any(data.image_key in row for row in rows):
        raise UserError(f"{path} has no column {data.image_key!r} (data.image_key); it has {columns(rows[0])}")
    return [
        _with_images(prompt, data.image_key, tokenizer, Path(path).parent, f"{path}: {data.image_key} of row {n}")
        for n, prompt in enumerate(prompts, 1)
    ]


def _with_images(prompt: Prompt, image_key: str, tokenizer: Any, folder: Path, where: str) -> Prompt:
    """Return the prompt with the images of its row."""
    model, sources = tokenizer.name_or_path, image_sources(prompt.row, image_key, folder, where)
    images = PromptImages(model=model, sources=sources) if sources else None
    try:
        token_ids = vision_processor(model).expand(prompt.token_ids, images.encoded() if images else ())
    except RolloutError as error:
        raise UserError(f"{where}: {error}") from None
    return replace(prompt, token_ids=token_ids, images=images)


def longest_sequence(model: Path | None) -> int | None:
    """Return how many tokens a model folder's model takes, or the embedded one; None: any number."""
    return MAX_POSITION_EMBEDDINGS if model is None else max_sequence_length(model)


def check_lengths(config: TrainConfig, prompts: PromptSets) -> None:
    """Raise `UserError` if the longest prompt and response together are more than the policy or the critic takes."""
    longest = max(len(prompt.token_ids) for prompt in (*prompts.train, *prompts.held_out))
    models = {"model": config.model}
    if config.algorithm.estimator.needs_critic and config.critic.model:
        models["critic.model"] = config.critic.model
    for setting, model in models.items():
        limit = longest_sequence(Path(model) if model else None)
        if limit is not None and longest + config.data.max_response_length > limit:
            raise UserError(
                f"data.max_response_length is {config.data.max_response_length}; expected at most {limit - longest}: "
                f"the longest prompt has {longest} tokens and the model takes at most {limit} together ({setting} is "
                f"{model!r}, max_position_embeddings); a lower data.max_prompt_length leaves longer prompts out"
            )


def load_task(task: TaskConfig, data: DataConfig, tokenizer: Any, *, seed: int) -> PromptSets:
    """Generate a task's problems and make prompts of them; raises as `make_problems`, or if all are too long."""
    train, val = (make_prompts(problems, tokenizer, data) for problems in make_problems(task, seed=seed))
    further, named = load_val_files(data, tokenizer)
    sets = PromptSets.within(data.max_prompt_length, train, [*val, *further], named)
    if not sets.train or not sets.val:
        lengths = [len(p.token_ids) for p in (*train, *val)]
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: the problems of {task.name} are longer, they have "
            f"{min(lengths)} to {max(lengths)} tokens"
        )
    return sets


def make_problems(task: TaskConfig, *, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Generate a task's training and held-out problems, none among both; raises as `make_settings`."""
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
    for index in range(size):
        try:
            entry = dataset[index]
        except Exception as error:
            # A generator raises whatever its settings lead it to.
            reason = f"{type(error).__name__}: {one_line(error)}"
            raise UserError(f"task.name is {task.name!r}: its problem {index} cannot be made: {reason}") from error
        # Without the sentence around a sum, which a tiny model would spend its time reading: 7+8-3=
        question = f"{_terms(entry)}=" if task.name == "chain_sum" else entry["question"]
        yield Problem(value=question, row={"entry": entry, "answer": entry["answer"]}, where=f"task {task.name}")


def _terms(entry: Mapping[str, Any]) -> str:
    return entry["metadata"]["expression"].replace(" ", "")


def worked_sum(row: Mapping[str, Any]) -> str:
    """``7+8-3`` worked out from the left: ``15-3=12``."""
    terms: list[str] = re.findall(r"[+-]?\d+", _terms(row["entry"]))
    sums = accumulate(map(int, terms))
    next(sums)
    return "=".join("".join([str(total), *terms[place:]]) for place, total in enumerate(sums, 2))


WORKED_EXAMPLES: dict[str, Callable[[Mapping[str, Any]], str]] = {"chain_sum": worked_sum}
"""How a row's answer is worked out, for tasks that a model can be warmed up on."""


def require_worked_examples(task: str, *, instead: str) -> None:
    """Raise a `UserError` if a task has no worked examples; it says what to do with such a task ``instead``."""
    if task not in WORKED_EXAMPLES:
        known = ", ".join(WORKED_EXAMPLES)
        raise UserError(f"task.name is {task!r}; expected a task with worked examples ({known}), {instead}")


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
        raise UserError(f"task.name is {task.name!r} with task.params {task.params}: {reason}") from error


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
        make = known[key].default_factory
        default = known[key].default if make is MISSING else make()
        found[key] = _value(f"{where}.{key}", value, hints[key], default=default)
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
    kinds = get_args(kind) if type(None) in get_args(kind) else (kind,)
    is_sequence = any((get_origin(k) or k) in (list, tuple) for k in kinds)
    if kind is str:
        value = str(value)
    elif isinstance(value, list) and get_args(kind)[:1] == (str,):
        value = [str(v) for v in value]
    elif isinstance(value, bool) and bool not in (kind, *get_args(kind)):
        raise UserError(f"{field} is {value}; expected {getattr(kind, '__name__', kind)}")
    elif is_sequence and not isinstance(value, list | tuple | type(default)):
        value = [value]  # one value on the command line
    try:
        return converted(field, value, kind)
    except UserError:
        if type(value) is type(default) and get_origin(kind) is not Literal:
            return value
        raise


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3) or [k for k in known if name in k or k in name][:3]
    return f"such as {', '.join(near)}" if near else f"one of {', '.join(sorted(known))}"
