"""The prompts of a run, tokenized, filtered and split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeGuard

from gcore_agents import MessageError, check_text, normalize_messages, render_chat
from gcore_llm.config import TrainConfig
from gcore_llm.data.large_prompts import (
    LargePrompts,
    LoadedPrompts,
    Progress,
    load_large,
    no_progress,
)
from gcore_llm.evaluation.sets import val_sources
from gcore_llm.sections import ChatDataConfig, DataConfig
from gcore_llm.tiny_model import MAX_POSITION_EMBEDDINGS
from gcore_rollout import (
    Prompt,
    PromptImages,
    RolloutError,
)
from gcore_runs import (
    UserError,
    columns,
    image_sources,
    mix_sets,
    model_folder,
    open_rows,
)
from gcore_runs.data.rows import RowSource
from gcore_runs.inputs import held_out_places, max_sequence_length

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
    val_by_name: Mapping[str, Sequence[Prompt]] = field(default_factory=dict[str, Sequence[Prompt]])
    """Held-out sets with names, in addition to ``val``."""

    @property
    def num_held_out(self) -> int:
        """Number of held-out prompts in all sets."""
        return len(self.val) + sum(map(len, self.val_by_name.values()))

    @classmethod
    def of_length(
        cls, max_length: int, train: Sequence[Prompt], val: Sequence[Prompt]
    ) -> "PromptSets":
        """Return the prompts of at most ``max_length`` tokens."""
        short_train = [p for p in train if len(p.token_ids) <= max_length]
        short_val = [p for p in val if len(p.token_ids) <= max_length]
        short = short_train + short_val
        longest = max((len(p.token_ids) for p in short), default=0)
        return cls(
            train=short_train,
            val=short_val,
            num_too_long=len(train) + len(val) - len(short),
            longest=longest,
        )


def uses_plain_text(value: object, tokenizer: Any, data: DataConfig) -> bool:
    """Return whether a prompt is given to the model without a chat template."""
    return isinstance(value, str) and (
        data.apply_chat_template == "never" or tokenizer.chat_template is None
    )


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
            raise UserError(
                f"{where} is {value!r:.80}; expected text, or a list of messages with role and content"
            )
        messages = normalize_messages(value, keeps_parts=bool(data.image_key))
        if tokenizer.chat_template is None:
            raise UserError(
                f"{where} is a list of chat messages: the model's tokenizer has no chat template to render it"
            )
        if data.image_key:
            messages = split_image_marks(messages)
        kwargs = {**data.chat_template_kwargs, "add_generation_prompt": True, "tokenize": False}
        return render_chat(tokenizer, messages, **kwargs)
    except MessageError as error:
        raise UserError(f"{where}: {error}") from None


def are_messages(value: object) -> TypeGuard[list[dict[str, Any]]]:
    """Return whether ``value`` is a list of at least one chat message; `normalize_messages` checks what is in them."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and "role" in m for m in value)
    )


def split_image_marks(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each mark of an image in their text as a part of its own, as chat templates expect."""
    return [{**message, "content": _with_image_parts(message["content"])} for message in messages]


def _with_image_parts(content: Any) -> Any:
    if not isinstance(content, str) or _IMAGE_MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(_IMAGE_MARK)):
        if i:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def takes_special_tokens(text: str, tokenizer: Any) -> bool:
    """Return whether the tokenizer adds special tokens to plain text, which it does unless the text starts with BOS."""
    return not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def make_prompts(problems: Sequence[Problem], tokenizer: Any, data: DataConfig) -> list[Prompt]:
    """Render and tokenize prompts; text rendered by a chat template has only the template's special tokens."""
    texts: list[str] = []
    indices: dict[bool, list[int]] = {False: [], True: []}
    for i, problem in enumerate(problems):
        text = render(problem.value, tokenizer, data, problem.where)
        is_plain = uses_plain_text(problem.value, tokenizer, data)
        indices[is_plain and takes_special_tokens(text, tokenizer)].append(i)
        texts.append(text)
    token_ids: dict[int, list[int]] = {}
    for add_special_tokens, batch in indices.items():
        if batch:
            encoded = tokenizer([texts[i] for i in batch], add_special_tokens=add_special_tokens)
            token_ids |= zip(batch, encoded["input_ids"], strict=True)
    prompts: list[Prompt] = []
    for i, problem in enumerate(problems):
        ids = tuple(token_ids[i])
        prompts.append(Prompt(text=texts[i], token_ids=ids, row=problem.row, where=problem.where))
    return prompts


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
        raise UserError(
            "data.train_files is not set; expected one or more files, or data sets on the Hub"
        )
    fits = min(data.max_prompt_length, fits or data.max_prompt_length)
    load = partial(_load_rows, data=data, tokenizer=tokenizer, fits=fits, progress=progress)
    sources = [list(map(load, open_rows(source, data.columns))) for source in data.train_files]
    val: dict[str, list[LoadedPrompts]] = {}
    val_size = data.val_size
    if data.val_files:
        val = load_val_files(data, tokenizer, fits=fits, progress=progress)
        val_size = 0
    files = list(chain.from_iterable(sources))
    sizes = [len(file.prompts) for file in files]
    num_too_long = sum(file.num_too_long for file in files)
    if not any(sizes):
        raise UserError(
            f"data.max_prompt_length is {data.max_prompt_length}: all {num_too_long} prompts are longer, the shortest "
            f"has {min(file.shortest for file in files)} tokens"
        )
    held_out_indices = iter(held_out_places(sizes, size=val_size, seed=seed))
    held_out: list[Prompt] = []
    train: list[Sequence[Prompt]] = []
    for source in sources:
        parts: list[Sequence[Prompt]] = []
        for file in source:
            indices = next(held_out_indices)
            held_out += [file.prompts[i] for i in indices]
            parts.append(_remove(file.prompts, set(indices)))
        train.append(_join(parts))
    sets = val_prompts(val, data)
    return replace(
        sets,
        train=mix_sets(train, data) if data.weights else _join(train),
        val=sets.val or held_out,
        num_too_long=sets.num_too_long + num_too_long,
        longest=max([sets.longest] + [file.longest for file in files]),
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
    files: dict[str, list[LoadedPrompts]] = {}
    for name, source, published in val_sources(data.val_files, setting=setting):
        for rows in open_rows(source, {} if published else data.columns, setting=setting):
            if published is None:
                loaded = _load_rows(
                    rows, data=data, tokenizer=tokenizer, fits=fits, progress=progress
                )
            else:
                problems: list[Problem] = []
                for n, row in enumerate(rows.rows, 1):
                    where = f"{rows.name}: row {n}"
                    text, prompt_row = published.problem(row, where)
                    problems.append(Problem(value=text, row=prompt_row, where=where))
                loaded = _drop_long(make_prompts(problems, tokenizer, data), data)
            files.setdefault(name, []).append(loaded)
    return files


def val_prompts(files: Mapping[str, Sequence[LoadedPrompts]], data: DataConfig) -> PromptSets:
    """Return held-out prompts alone, of files by the names of their sets; `UserError` if a set with a name has none."""
    val_by_name: dict[str, Sequence[Prompt]] = {}
    num_too_long = 0
    longest = 0
    for name, parts in files.items():
        val_by_name[name] = _join([part.prompts for part in parts])
        if name and not val_by_name[name]:
            raise UserError(
                f"data.max_prompt_length is {data.max_prompt_length}: all prompts of {name} are longer"
            )
        num_too_long += sum(part.num_too_long for part in parts)
        longest = max([longest] + [part.longest for part in parts])
    return PromptSets(
        train=[],
        val=val_by_name.pop("", []),
        num_too_long=num_too_long,
        longest=longest,
        val_by_name=val_by_name,
    )


def _join(parts: Sequence[Sequence[Prompt]]) -> Sequence[Prompt]:
    """Return the prompts of all parts, one part after the other."""
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    if len(parts) == 1:
        return parts[0]
    from gcore_controller import Mixture

    return Mixture(parts)


def _remove(prompts: Sequence[Prompt], indices: set[int]) -> Sequence[Prompt]:
    """Return the prompts without those of some indices."""
    if isinstance(prompts, list):
        return [prompt for i, prompt in enumerate(prompts) if i not in indices]
    assert isinstance(prompts, LargePrompts)
    return prompts.without(sorted(indices))


def _load_rows(
    rows: RowSource, *, data: DataConfig, tokenizer: Any, fits: int, progress: Progress
) -> LoadedPrompts:
    check_image_column(rows, data)
    make = partial(file_prompts, data=data, tokenizer=tokenizer)
    if rows.identity:
        return load_large(rows, data, tokenizer, make=make, fits=fits, progress=progress)
    return _drop_long(make(rows, range(len(rows.rows))), data)


def check_image_column(rows: RowSource, data: ChatDataConfig) -> None:
    """Raise `UserError` if none of the first rows has the column of images."""
    if data.image_key and not any(data.image_key in row for row in islice(rows.rows, 1000)):
        first = columns(rows.rows[0])
        raise UserError(
            f"{rows.name} has no column {data.image_key!r} (data.image_key); it has {first}"
        )


def _drop_long(prompts: Sequence[Prompt], data: DataConfig) -> LoadedPrompts:
    """Return those of some prompts in memory that are short enough."""
    sets = PromptSets.of_length(data.max_prompt_length, prompts, [])
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    return LoadedPrompts(
        prompts=sets.train, num_too_long=sets.num_too_long, longest=sets.longest, shortest=shortest
    )


def file_prompts(
    rows: RowSource, numbers: Sequence[int], *, data: DataConfig, tokenizer: Any
) -> list[Prompt]:
    """Return the prompts of some rows of a file, by their numbers; `UserError` if one has none, or other images."""
    key = data.prompt_key
    problems: list[Problem] = []
    for n in numbers:
        row = rows.rows[n]
        if key not in row:
            raise UserError(
                f"{rows.name}: row {n + 1} has no column {key!r} (data.prompt_key); it has {columns(row)}"
            )
        problems.append(
            Problem(value=row[key], row=row, where=f"{rows.name}: {key} of row {n + 1}")
        )
    prompts = make_prompts(problems, tokenizer, data)
    if data.image_key:
        for i, n in enumerate(numbers):
            where = f"{rows.name}: {data.image_key} of row {n + 1}"
            prompts[i] = add_images(prompts[i], data.image_key, tokenizer, rows.folder, where)
    return prompts


def add_images(prompt: Prompt, image_key: str, tokenizer: Any, folder: Path, where: str) -> Prompt:
    """Return the prompt with the images of its row."""
    model = tokenizer.name_or_path
    sources = image_sources(prompt.row, image_key, folder, where)
    images = PromptImages(model=model, sources=sources)
    try:
        token_ids = images.expand(prompt.token_ids)
    except (RolloutError, OSError, ImportError) as error:
        raise UserError(f"{where}: {error}") from None
    return replace(prompt, token_ids=token_ids, images=images if sources else None)


def longest_sequence(model: Path | None) -> int | None:
    """Return how many tokens a model folder's model takes, or the embedded one; None: any number."""
    if model is None:
        return MAX_POSITION_EMBEDDINGS
    return max_sequence_length(model)


def model_limits(config: TrainConfig) -> dict[str, int]:
    """Return how many tokens the policy and the critic take, by setting, where that is limited."""
    models = {"model": config.model}
    if config.algorithm.estimator.needs_critic and config.critic.model:
        models["critic.model"] = config.critic.model
    limits: dict[str, int] = {}
    for name, model in models.items():
        limit = longest_sequence(model_folder(model) if model else None)
        if limit is not None:
            limits[name] = limit
    return limits


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
