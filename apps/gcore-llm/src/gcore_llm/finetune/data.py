"""Examples of a run: rows of files or of a task, checked, tokenized, filtered and split."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from gcore_agents import MessageError, check_text, drop_none, normalize_messages
from gcore_llm.data.tasks import WORKED_EXAMPLES, make_problems, require_worked_examples
from gcore_llm.finetune.config import FineTuneConfig, RewardModelRunConfig
from gcore_llm.finetune.tokens import Encoder, Messages, Tokens, Tools
from gcore_llm.prompts import Problem, are_messages, check_image_column
from gcore_llm.sections import ChatDataConfig
from gcore_placement import TransformerWorkload, micro_batches
from gcore_rollout import PromptImages
from gcore_runs import hold_out, image_sources, open_rows
from gcore_runs.errors import UserError
from gcore_trainer import MicroBatch, Sample, scored_at_end

Example = list[Sample]
"""The samples of a row: one, or a chosen and a rejected one after the same prompt."""
Row = tuple[Mapping[str, Any], str]
"""A row's columns, and its place in the data, for errors."""


@dataclass(frozen=True, kw_only=True)
class ExampleSets:
    """Training and held-out examples of a run."""

    train: list[Example]
    sizes: list[int]
    """Number of training examples from each of data.train-files."""
    val: list[Example]
    notices: list[str]
    """Lines about rows that were left out, and about what is not learned of others."""
    images: Mapping[Sample, PromptImages]
    """The images of samples that have some, to be read whenever they are needed."""


def load_examples(
    config: FineTuneConfig, encoder: Encoder, rows: tuple[list[Row], list[Row]] | None
) -> ExampleSets:
    """Return the examples of data.train-files and data.val-files, or of ``rows``, a task's own of both."""
    data = config.data
    num_too_long = 0
    num_equal = 0

    def encode(part: Sequence[Row]) -> list[tuple[Tokens, ...]]:
        nonlocal num_too_long, num_equal
        encoded: list[tuple[Tokens, ...]] = []
        for row, where in part:
            sides = (
                pair_tokens(encoder, row, where)
                if config.rows_are_pairs
                else (sft_tokens(encoder, row, where),)
            )
            if data.image_key:
                images = row.get(data.image_key, ())
                place = f"{where}, {data.image_key}"
                sides = [encoder.add_images(side, images, place) for side in sides]
            if max(side.ids.size for side in sides) > data.max_length:
                num_too_long += 1
            elif len(sides) == 2 and np.array_equal(sides[0].ids, sides[1].ids):
                num_equal += 1
            else:
                encoded.append(tuple(sides))
        return encoded

    if rows:
        train = [encode(rows[0])]
        val = encode(rows[1])
    else:
        train = [encode(part) for part in [_read(source, data) for source in data.train_files]]
        val = encode(list(chain.from_iterable(_read(source, data) for source in data.val_files)))
    notices: list[str] = []
    if num_too_long:
        notices.append(f"left out {num_too_long} rows longer than {data.max_length} tokens")
    if num_equal:
        notices.append(f"left out {num_equal} rows whose chosen and rejected answers are equal")
    if not any(train):
        reason = f"{num_too_long} are longer than data.max_length={data.max_length} tokens"
        if num_equal:
            reason += f", in {num_equal} chosen and rejected are equal"
        raise UserError(f"no row is left to train on: {reason}")
    if not rows and not data.val_files:
        train, val = hold_out(train, size=data.val_size, seed=data.shuffle_seed)
    notices += encoder.notices()
    prepare = _scored_example if isinstance(config, RewardModelRunConfig) else _learned_example
    train_sides = list(chain.from_iterable(train))
    examples = [prepare(sides) for sides in train_sides + val]
    images_of: dict[Sample, PromptImages] = {}
    for side, sample in zip(chain(*train_sides, *val), chain(*examples), strict=True):
        if side.images is not None:
            images_of[sample] = side.images
    return ExampleSets(
        train=examples[: len(train_sides)],
        sizes=list(map(len, train)),
        val=examples[len(train_sides) :],
        notices=notices,
        images=images_of,
    )


def task_rows(config: FineTuneConfig) -> tuple[list[Row], list[Row]]:
    """Return a task's training and held-out problems with their worked answers, and wrong ones for pairs."""
    require_worked_examples(
        config.task.name, instead="or rows of your own: --data.train-files FILE"
    )
    rng = np.random.default_rng(config.seed)

    def row(problem: Problem) -> Row:
        answer = WORKED_EXAMPLES[config.task.name](problem.row)
        columns: dict[str, Any] = {"prompt": problem.value}
        if config.rows_are_pairs:
            columns["chosen"] = answer
            columns["rejected"] = _miscount(answer, rng)
        else:
            columns["completion"] = answer
        return columns, f"task {config.task.name}"

    train, val = make_problems(config.task, seed=config.seed)
    return list(map(row, train)), list(map(row, val))


def _miscount(answer: str, rng: np.random.Generator) -> str:
    """Return the answer with its last number up to twenty too high or too low."""
    error = int(rng.integers(1, 21)) * int(rng.choice([-1, 1]))
    return re.sub(r"-?\d+$", lambda last: str(int(last[0]) + error), answer)


def _read(source: str, data: ChatDataConfig) -> list[Row]:
    rows: list[Row] = []
    key = data.image_key
    for file in open_rows(source, data.columns):
        check_image_column(file, data)
        for n, row in enumerate(file.rows, 1):
            if key:
                where = f"{file.name}: {key} of row {n}"
                row = {**row, key: image_sources(row, key, file.folder, where)}
            rows.append((row, f"{file.name}: row {n}"))
    return rows


def sft_tokens(encoder: Encoder, row: Mapping[str, Any], where: str) -> Tokens:
    """Encode a row to imitate: ``messages``, or ``prompt`` and ``completion`` (text or messages each), or ``text``.

    With messages, ``tools`` are what the chat template announces: JSON schemas, or a JSON text of them.
    """
    columns = _read_columns(encoder, row, ("messages", "prompt", "completion", "text"), where)
    if columns.keys() == {"messages"}:
        messages = _messages(columns, "messages", where)
        return encoder.conversation(messages, where, tools=_tools(row, where))
    if columns.keys() == {"prompt", "completion"}:
        return _encode_answer(encoder, columns, "completion", where, _tools(row, where))
    if columns.keys() == {"text"}:
        return encoder.text(_text(columns, "text", where), where)
    raise UserError(
        f"{where} has the columns {', '.join(row) or 'none'}; expected messages, or prompt and completion, or text"
    )


def pair_tokens(encoder: Encoder, row: Mapping[str, Any], where: str) -> tuple[Tokens, Tokens]:
    """Encode a ``chosen`` and a ``rejected`` answer to ``prompt``, or without it to the start that they share.

    ``tools`` are as in `sft_tokens`.
    """
    columns = _read_columns(encoder, row, ("prompt", "chosen", "rejected"), where)
    chosen = columns.get("chosen")
    rejected = columns.get("rejected")
    if chosen is None or rejected is None:
        raise UserError(
            f"{where} has the columns {', '.join(row) or 'none'}; expected chosen and rejected, and prompt "
            "unless they are whole conversations"
        )
    num_shared = 0
    # Some data sets repeat the start of their conversations as text in `prompt`.
    if are_messages(chosen) and are_messages(rejected) and not are_messages(columns.get("prompt")):
        shortest = min(len(chosen), len(rejected))
        while num_shared < shortest and chosen[num_shared] == rejected[num_shared]:
            num_shared += 1

    tools = _tools(row, where)

    def encode(key: str) -> Tokens:
        if num_shared:
            num_given = min(num_shared, len(chosen) - 1, len(rejected) - 1)
            return encoder.conversation(
                columns[key], f"{where}, {key}", num_given=num_given, tools=tools
            )
        if "prompt" not in columns:
            return encoder.text(_text(columns, key, where), f"{where}, {key}")
        return _encode_answer(encoder, columns, key, where, tools)

    return encode("chosen"), encode("rejected")


def _read_columns(
    encoder: Encoder, row: Mapping[str, Any], names: Sequence[str], where: str
) -> dict[str, Any]:
    """Return those of some columns that a row has, with messages in one form; `UserError` if these are malformed."""
    columns: dict[str, Any] = {}
    for name in names:
        value = row.get(name)
        if value is None:
            continue
        try:
            if isinstance(value, str):
                check_text(value, name)
            elif are_messages(value):
                value = normalize_messages(value, keeps_parts=encoder.vision is not None)
        except MessageError as error:
            reason = str(error) if isinstance(value, str) else f"{name}: {error}"
            raise UserError(f"{where}: {reason}") from None
        columns[name] = value
    return columns


def _tools(row: Mapping[str, Any], where: str) -> Tools:
    """Return the JSON schemas of the column ``tools``, which may be a JSON text of them; otherwise a `UserError`."""
    value = row.get("tools")
    if not value:
        return ()
    tools: Any = value
    if isinstance(value, str):
        try:
            tools = json.loads(value)
        except ValueError:
            tools = None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(
            f"{where}: tools is {value!r:.80}; expected a list of JSON schemas, or a JSON text of one"
        )
    try:
        return drop_none(tools, "tools")
    except MessageError as error:
        raise UserError(f"{where}: {error}") from None


def _encode_answer(
    encoder: Encoder, row: Mapping[str, Any], key: str, where: str, tools: Tools
) -> Tokens:
    """Encode the prompt with the answer in column ``key``, which is learned."""
    prompt = row["prompt"]
    answer = row[key]
    for name in ("prompt", key):
        if row[name] == "":
            raise UserError(f"{where} has an empty {name}")
    if isinstance(prompt, str) and isinstance(answer, str) and not encoder.makes_messages:
        return encoder.completion(prompt, answer)
    messages: list[dict[str, Any]] = []
    for name, role in (("prompt", "user"), (key, "assistant")):
        if isinstance(row[name], str):
            messages.append({"role": role, "content": row[name]})
        else:
            messages += _messages(row, name, where)
    num_given = 1 if isinstance(prompt, str) else len(prompt)
    return encoder.conversation(messages, f"{where}, {key}", num_given=num_given, tools=tools)


def _messages(row: Mapping[str, Any], key: str, where: str) -> Messages:
    if not are_messages(row[key]):
        text = "" if key == "messages" else "text, or "
        raise UserError(
            f"{where}: {key} is {row[key]!r:.80}; expected {text}a list of messages with role and content"
        )
    return row[key]


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(row[key], str):
        accepted = (
            "text" if key == "text" else "text after a prompt, or conversations with the same start"
        )
        raise UserError(f"{where}: {key} is {row[key]!r:.80}; expected {accepted}")
    return row[key]


def _learned_example(sides: tuple[Tokens, ...]) -> Example:
    """Return samples of one prompt, all tokens before the first one to learn, up to the last one to learn."""
    num_given = max(1, min([_num_equal(sides)] + [side.num_given for side in sides]))
    samples: Example = []
    for side in sides:
        response = slice(num_given, side.end)
        samples.append(
            Sample(
                prompt_ids=side.ids[:num_given],
                response_ids=side.ids[response],
                response_mask=side.mask[response],
            )
        )
    return samples


def _scored_example(sides: tuple[Tokens, ...]) -> Example:
    """Return samples whose prompt is all that the sides share, scored at their last token."""
    num_shared = max(1, _num_equal(sides))
    samples: Example = []
    for side in sides:
        sample = Sample(prompt_ids=side.ids[:num_shared], response_ids=side.ids[num_shared:])
        samples.append(scored_at_end(sample))
    return samples


def _num_equal(sides: tuple[Tokens, ...]) -> int:
    """Return the number of first tokens that the sides share, at most all but the last."""
    length = min(side.ids.size for side in sides) - 1
    differs = np.any([side.ids[:length] != sides[0].ids[:length] for side in sides], axis=0)
    if not differs.any():
        return length
    return int(differs.argmax())


def in_micro_batches(
    examples: Sequence[Example],
    *,
    workload: TransformerWorkload,
    max_tokens: int,
    num_multiple: int = 1,
) -> list[MicroBatch]:
    """Divide whole examples into micro-batches of at most ``max_tokens`` computed tokens and about equal work.

    Their number is a multiple of ``num_multiple``, unless there are fewer examples.

    Computed are an example's prompt once, and each response without its last token.
    """
    tokens: list[int] = []
    costs: list[float] = []
    for example in examples:
        prompt_length = example[0].prompt_ids.size
        lengths = np.array([sample.response_ids.size for sample in example])
        tokens.append(prompt_length + int((lengths - 1).sum()))
        costs.append(float(workload.group_flops(prompt_length, lengths)))
    parts = micro_batches(tokens, max_tokens=max_tokens, num_multiple=num_multiple, costs=costs)
    return [list(chain.from_iterable(examples[i] for i in part)) for part in parts if part.size]
