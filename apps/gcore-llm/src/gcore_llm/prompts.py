"""The prompts of a run, tokenized, filtered and split."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from gcore_llm.config import DataConfig, TrainConfig
from gcore_llm.data.loaded import LoadedPrompts, Progress, no_progress
from gcore_llm.evaluation.sets import val_sources
from gcore_llm.tiny_model import MAX_POSITION_EMBEDDINGS
from gcore_rollout import (
    Prompt,
    PromptImages,
    RequestError,
    RolloutError,
    check_text,
    load_vision_processor,
    normalize_messages,
    render_chat,
)
from gcore_runs import (
    RowSource,
    UserError,
    columns,
    held_out_places,
    image_sources,
    max_sequence_length,
    mixed,
    model_folder,
    open_rows,
)

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

    train: Sequence[Prompt]
    val: Sequence[Prompt]
    num_too_long: int
    """Number of prompts left out because they exceed data.max_prompt_length."""
    longest: int
    """Most tokens of a prompt; of a large data set, whose prompts are not all tokenized, at most so many."""
    named: Mapping[str, Sequence[Prompt]] = field(default_factory=dict[str, Sequence[Prompt]])
    """Held-out sets with names, in addition to ``val``."""

    @property
    def num_held_out(self) -> int:
        """Number of held-out prompts in all sets."""
        return sum(map(len, (self.val, *self.named.values())))

    @classmethod
    def within(cls, max_length: int, train: Sequence[Prompt], val: Sequence[Prompt]) -> "PromptSets":
        """Return the prompts of at most so many tokens."""
        kept_train, kept_val = ([p for p in prompts if len(p.token_ids) <= max_length] for prompts in (train, val))
        num_kept = len(kept_train) + len(kept_val)
        longest = max((len(p.token_ids) for p in (*kept_train, *kept_val)), default=0)
        return cls(train=kept_train, val=kept_val, num_too_long=len(train) + len(val) - num_kept, longest=longest)


def uses_plain_text(value: object, tokenizer: Any, data: DataConfig) -> bool:
    """Return whether a prompt is given to the model without a chat template."""
    return isinstance(value, str) and (data.apply_chat_template == "never" or tokenizer.chat_template is None)


def render(value: object, tokenizer: Any, data: DataConfig, where: str) -> str:
    """Return the text that the model continues, for a prompt given as text or, with a chat template, as messages."""
    try:
        if isinstance(value, str):
            if not value:
                raise UserError(f"{where} is empty")
            check_text(value, "it")
            if uses_plain_text(value, tokenizer, data):
                return value
            value = [{"role": "user", "content": value}]
        if not are_messages(value):
            raise UserError(f"{where} is {value!r:.80}; expected text, or a list of messages with role and content")
        messages = normalize_messages(value, keeps_parts=bool(data.image_key))
        if tokenizer.chat_template is None:
            raise UserError(
                f"{where} is a list of chat messages: the model's tokenizer has no chat template to render it"
            )
        if data.image_key:
            messages = [{**message, "content": _with_image_parts(message["content"])} for message in messages]
        kwargs = {**data.chat_template_kwargs, "add_generation_prompt": True, "tokenize": False}
        return render_chat(tokenizer, messages, **kwargs)
    except RequestError as error:
        raise UserError(f"{where}: {error}") from None


def are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether ``value`` is a list of at least one chat message; `normalize_messages` checks what is in them."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _with_image_parts(content: Any) -> Any:
    """Return a message's content with each mark of an image as a part of its own, as chat templates expect."""
    if not isinstance(content, str) or _IMAGE_MARK not in content:
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


def load_files(
    data: DataConfig,
    tokenizer: Any,
    *,
    seed: int,
    fits: int | None = None,
    progress: Progress = no_progress,
) -> PromptSets:
    """Load the prompts of data.train-files and data.val-files.

    Args:
        seed: of the prompts that are held out where no files of them are given.
        fits: tokens that a prompt may have as far as the models are concerned; None: any number. `PromptSets.longest`
            is exact where it is above.
        progress: called while rows that are not in memory are tokenized.

    Raises:
        UserError: a row is wrong, or no prompt is left.
    """
    if not data.train_files:
        raise UserError("data.train_files is not set; expected one or more files, or data sets on the Hub")
    fits = min(data.max_prompt_length, fits or data.max_prompt_length)
    load = partial(_load_rows, data=data, tokenizer=tokenizer, fits=fits, progress=progress)
    train = [[load(rows) for rows in open_rows(source, data.columns)] for source in data.train_files]
    val = load_val_files(data, tokenizer, fits=fits, progress=progress) if data.val_files else {}
    files = [file for source in train for file in source]
    num_prompts = sum(len(file.prompts) for file in files)
    if not num_prompts:
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: all {sum(file.num_too_long for file in files)} "
            f"prompts are longer, the shortest has {min(file.shortest for file in files)} tokens"
        )
    size = 0 if data.val_files else data.val_size
    places = iter(held_out_places([len(file.prompts) for file in files], size=size, seed=seed))
    held_out: list[Prompt] = []
    kept: list[Sequence[Prompt]] = []
    for source in train:
        parts: list[Sequence[Prompt]] = []
        for file in source:
            own = next(places)
            held_out += [file.prompts[place] for place in own]
            parts.append(_without(file.prompts, set(own)))
        kept.append(_joined(parts))
    sets = val_prompts(val, data)
    return replace(
        sets,
        train=mixed(kept, data) if data.weights else _joined(kept),
        val=sets.val if val else held_out,
        num_too_long=sets.num_too_long + sum(file.num_too_long for file in files),
        longest=max(sets.longest, *(file.longest for file in files)),
    )


def load_val_files(
    data: DataConfig,
    tokenizer: Any,
    *,
    fits: int,
    setting: str = "data.val_files",
    progress: Progress = no_progress,
) -> dict[str, list[LoadedPrompts]]:
    """Load the files of data.val-files by the names of their sets; see `load_files`."""
    found: dict[str, list[LoadedPrompts]] = {}
    for name, source, published in val_sources(data.val_files, setting=setting):
        for rows in open_rows(source, {} if published else data.columns, setting=setting):
            if published is None:
                loaded = _load_rows(rows, data=data, tokenizer=tokenizer, fits=fits, progress=progress)
            else:
                places = [f"{rows.name}: row {n}" for n in range(1, len(rows.rows) + 1)]
                pairs = [published.problem(row, where) for row, where in zip(rows.rows, places, strict=True)]
                problems = (Problem(value=text, row=row, where=w) for (text, row), w in zip(pairs, places, strict=True))
                loaded = _loaded(make_prompts(problems, tokenizer, data), data)
            found.setdefault(name, []).append(loaded)
    return found


def val_prompts(files: Mapping[str, Sequence[LoadedPrompts]], data: DataConfig) -> PromptSets:
    """Return held-out prompts alone, of files by the names of their sets; `UserError` if a set with a name has none."""
    named = {name: _joined([file.prompts for file in own]) for name, own in files.items()}
    if empty := [name for name, own in named.items() if name and not own]:
        raise UserError(f"data.max_prompt_length is {data.max_prompt_length}: all prompts of {empty[0]} are longer")
    everything = [file for own in files.values() for file in own]
    return PromptSets(
        train=[],
        val=named.pop("", []),
        num_too_long=sum(file.num_too_long for file in everything),
        longest=max((file.longest for file in everything), default=0),
        named=named,
    )


def _joined(parts: Sequence[Sequence[Prompt]]) -> Sequence[Prompt]:
    """Return the prompts of all parts, one part after the other."""
    if all(isinstance(part, list) for part in parts):
        return [prompt for part in parts for prompt in part]
    if len(parts) == 1:
        return parts[0]
    from gcore_controller import Joined

    return Joined(parts)


def _without(prompts: Sequence[Prompt], places: set[int]) -> Sequence[Prompt]:
    """Return the prompts without those at some places."""
    if isinstance(prompts, list):
        return [prompt for place, prompt in enumerate(prompts) if place not in places]
    from gcore_llm.data.large_prompts import LargePrompts

    assert isinstance(prompts, LargePrompts)
    return prompts.without(sorted(places))


def _load_rows(rows: RowSource, *, data: DataConfig, tokenizer: Any, fits: int, progress: Progress) -> LoadedPrompts:
    if data.image_key and not any(data.image_key in row for row in islice(rows.rows, 1000)):
        first = columns(rows.rows[0])
        raise UserError(f"{rows.name} has no column {data.image_key!r} (data.image_key); it has {first}")
    make = partial(file_prompts, data=data, tokenizer=tokenizer)
    if rows.identity:
        from gcore_llm.data.large_prompts import load_large

        return load_large(rows, data, tokenizer, make=make, fits=fits, progress=progress)
    return _loaded(make(rows, range(len(rows.rows))), data)


def _loaded(prompts: Sequence[Prompt], data: DataConfig) -> LoadedPrompts:
    """Return those of some prompts in memory that are short enough."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= data.max_prompt_length]
    longest = max((len(prompt.token_ids) for prompt in kept), default=0)
    num_too_long = len(prompts) - len(kept)
    return LoadedPrompts(prompts=kept, num_too_long=num_too_long, longest=longest, shortest=min(lengths))


def file_prompts(rows: RowSource, numbers: Sequence[int], *, data: DataConfig, tokenizer: Any) -> list[Prompt]:
    """Return the prompts of some rows of a file, by their numbers; `UserError` if one has none, or other images."""
    name, key = rows.name, data.prompt_key
    given = {number: rows.rows[number] for number in numbers}
    for n, row in given.items():
        if key not in row:
            raise UserError(f"{name}: row {n + 1} has no column {key!r} (data.prompt_key); it has {columns(row)}")
    problems = (Problem(value=row[key], row=row, where=f"{name}: {key} of row {n + 1}") for n, row in given.items())
    prompts = make_prompts(problems, tokenizer, data)
    if not data.image_key:
        return prompts
    return [
        _with_images(prompt, data.image_key, tokenizer, rows.folder, f"{name}: {data.image_key} of row {n + 1}")
        for n, prompt in zip(given, prompts, strict=True)
    ]


def _with_images(prompt: Prompt, image_key: str, tokenizer: Any, folder: Path, where: str) -> Prompt:
    """Return the prompt with the images of its row."""
    model, sources = tokenizer.name_or_path, image_sources(prompt.row, image_key, folder, where)
    images = PromptImages(model=model, sources=sources) if sources else None
    try:
        token_ids = load_vision_processor(model).expand(prompt.token_ids, images.encoded() if images else ())
    except (RolloutError, OSError, ImportError) as error:
        raise UserError(f"{where}: {error}") from None
    return replace(prompt, token_ids=token_ids, images=images)


def longest_sequence(model: Path | None) -> int | None:
    """Return how many tokens a model folder's model takes, or the embedded one; None: any number."""
    return MAX_POSITION_EMBEDDINGS if model is None else max_sequence_length(model)


def model_limits(config: TrainConfig) -> dict[str, int]:
    """Return how many tokens the policy and the critic take, by setting, where that is limited."""
    models = {"model": config.model}
    if config.algorithm.estimator.needs_critic and config.critic.model:
        models["critic.model"] = config.critic.model
    limits = {name: longest_sequence(model_folder(model) if model else None) for name, model in models.items()}
    return {name: limit for name, limit in limits.items() if limit is not None}


def check_lengths(config: TrainConfig, prompts: PromptSets) -> None:
    """Raise `UserError` if the longest prompt and response together are more than the policy or the critic takes."""
    longest = prompts.longest
    for setting, limit in model_limits(config).items():
        if longest + config.data.max_response_length > limit:
            model = attrgetter(setting)(config)
            raise UserError(
                f"data.max_response_length is {config.data.max_response_length}; expected at most {limit - longest}: "
                f"the longest prompt has {longest} tokens and the model takes at most {limit} together ({setting} is "
                f"{model!r}, max_position_embeddings); a lower data.max_prompt_length leaves longer prompts out"
            )
