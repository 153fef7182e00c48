"""Token ids of text and chat messages, with a mask of the tokens to learn."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_agents import MessageError, render_chat
from gcore_llm.prompts import split_image_marks, takes_special_tokens
from gcore_rollout import PromptImages, RolloutError, VisionProcessor
from gcore_runs.errors import UserError

Messages = Sequence[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of functions."""
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\b")
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokens:
    """T tokens; some may follow the last one to learn, such as a template's after a turn."""

    ids: NDArray[np.int64]
    """[T]."""
    mask: NDArray[np.bool_]
    """[T] which tokens the model is to learn; at least one."""
    images: PromptImages | None = None
    """Images before the last token to learn, with the places where they start; None: there are none."""

    @property
    def num_given(self) -> int:
        """Tokens before the first one to learn."""
        return int(self.mask.argmax())

    @property
    def end(self) -> int:
        """Index after the last token to learn."""
        return self.mask.size - int(self.mask[::-1].argmax())


class Encoder:
    """Turns rows into `Tokens`, whose last token to learn is one of ``eos_token_ids``, which end a response.

    A prompt and its answer given as text become messages if ``apply_chat_template`` is set and there is a template.
    ``chat_template_kwargs`` are further variables of the template. ``vision`` is the model's image processor, for rows
    with images; see `add_images`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        eos_token_ids: Collection[int],
        apply_chat_template: bool,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        vision: VisionProcessor | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"the model's tokenizer is {type(tokenizer).__name__}; expected a fast one, with tokenizer.json, which "
                "gives the positions of its tokens in the text"
            )
        self._tokenizer = tokenizer
        self._eos_token_ids = set(eos_token_ids)
        self._template_kwargs = dict(chat_template_kwargs or {})
        self.vision = vision
        self.makes_messages = apply_chat_template and tokenizer.chat_template is not None
        self._num_without_thoughts = 0
        self._num_without_ends = 0

    def notices(self) -> list[str]:
        """Return lines about what was not learned of the conversations so far."""
        lines: list[str] = []
        if self._num_without_thoughts:
            lines.append(
                f"{self._num_without_thoughts:,} rows: the chat template leaves out reasoning of the assistant, which "
                "is not learned; a row for each turn, with the messages up to it, keeps it"
            )
        if self._num_without_ends:
            lines.append(
                f"{self._num_without_ends:,} rows: the chat template ends turns before the last with no token that "
                "ends a response (eos_token_id in generation_config.json), so that their end is not learned"
            )
        return lines

    def text(self, text: str, where: str) -> Tokens:
        """Encode text that is learned as a whole."""
        if not text:
            raise UserError(f"{where} is empty")
        ids, _ = self._encode(text, add_special_tokens=takes_special_tokens(text, self._tokenizer))
        return self._add_ends(ids, np.ones(ids.shape, np.bool_))

    def completion(self, prompt: str, completion: str) -> Tokens:
        """Encode a prompt and a completion, which is learned; neither is empty.

        A token that spans both belongs to the completion.
        """
        adds = takes_special_tokens(prompt, self._tokenizer)
        ids, ends = self._encode(prompt + completion, add_special_tokens=adds)
        return self._add_ends(ids, ends > len(prompt))

    def conversation(
        self, messages: Messages, where: str, *, num_given: int = 0, tools: Tools = ()
    ) -> Tokens:
        """Encode messages, of which the assistant's after the first ``num_given`` are learned.

        The template announces the ``tools``. After each turn the token that ends a response is learned, too, be it the
        first of the next message.

        The chat template says itself which tokens are the assistant's, if it holds ``{% generation %}``. Otherwise
        it is rendered up to every such message, which has to give a prefix of the whole; learned is what follows, up to
        the first token that ends a response, as in generation, or to the end of the message.
        """
        if self._tokenizer.chat_template is None:
            raise UserError(
                f"{where} holds chat messages: the model's tokenizer has no chat template to render them"
            )
        template = self._tokenizer.chat_template
        if tools and "tools" not in str(template):
            raise UserError(
                f"{where}: tools are given; expected a chat template that announces them, the model's does not"
            )
        if self.vision is not None:
            messages = split_image_marks(messages)
        turns = [i for i in range(num_given, len(messages)) if messages[i]["role"] == "assistant"]
        if not turns:
            raise UserError(f"{where} has no message of the assistant to learn from")
        if _GENERATION_MARK.search(template):
            ids, mask = self._encode_by_marks(messages, num_given, where, tools)
        else:
            ids, mask = self._encode_by_prefixes(messages, turns, where, tools)
        if not mask.any():
            raise UserError(
                f"{where} has no token of the assistant to learn from, as the chat template renders it"
            )
        self._count_left_out_thoughts(messages, turns, where, tools)
        return self._add_ends(ids, mask)

    def add_images(
        self, tokens: Tokens, sources: tuple[bytes | Path | str, ...], where: str
    ) -> Tokens:
        """Return tokens with as many in each image's place as the model reads of it, none of which is learned.

        Of ``sources`` see `PromptImages`. `UserError`, which names ``where``, if they do not fit the places, or are no
        images.
        """
        assert self.vision is not None
        images = PromptImages(model=self._tokenizer.name_or_path, sources=sources)
        # Negative tokens are the learned ones: what replaces an image's place is not.
        marked = np.where(tokens.mask, -1 - tokens.ids, tokens.ids)
        try:
            encoded = images.encoded()
            expanded = np.array(self.vision.expand(marked.tolist(), encoded))
            if not encoded:
                return tokens
            mask = expanded < 0
            ids = np.where(mask, -1 - expanded, expanded)
            image_index = self.vision.find_images(ids.tolist(), encoded)
        except (RolloutError, OSError, ImportError) as error:
            raise UserError(f"{where}: {error}") from None
        tokens = Tokens(ids=ids, mask=mask)
        starts = [int(index[0]) for index in image_index if index[0] < tokens.end]
        if not starts:
            return tokens
        images = replace(images, sources=sources[: len(starts)], starts=tuple(starts))
        return replace(tokens, images=images)

    def _count_left_out_thoughts(
        self, messages: Messages, turns: Sequence[int], where: str, tools: Tools
    ) -> None:
        thoughts = list(chain.from_iterable(_find_thoughts(messages[i]) for i in turns))
        if thoughts:
            text: str = self._apply(messages, where, tools, tokenize=False)
            self._num_without_thoughts += any(thought not in text for thought in thoughts)

    def _encode_by_marks(
        self, messages: Messages, num_given: int, where: str, tools: Tools
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        options: dict[str, Any] = {"tokenize": True, "return_dict": True}
        encoded = self._apply(messages, where, tools, **options, return_assistant_tokens_mask=True)
        mask = np.array(encoded["assistant_masks"], np.bool_)
        if num_given:
            prefix = self._apply(messages[:num_given], where, tools, **options)
            mask[: len(prefix["input_ids"])] = False
        return np.array(encoded["input_ids"], np.int64), mask

    def _encode_by_prefixes(
        self, messages: Messages, turns: Sequence[int], where: str, tools: Tools
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        text: str = self._apply(messages, where, tools, tokenize=False)
        starts: list[int] = []
        for i in turns:
            opening: str = self._apply(
                messages[:i], where, tools, tokenize=False, add_generation_prompt=True
            )
            if not text.startswith(opening):
                raise _unstable(where, i)
            starts.append(len(opening))
        ids, ends = self._encode(text, add_special_tokens=False)
        is_end = np.isin(ids, list(self._eos_token_ids))
        mask = np.zeros(ids.shape, np.bool_)
        for i, start, next_start in zip(turns, starts, [*starts[1:], len(text)], strict=True):
            closing: str = self._apply(messages[: i + 1], where, tools, tokenize=False)
            is_stable = text.startswith(closing)
            turn_end = len(closing) if is_stable else next_start
            turn = np.flatnonzero((ends > start) & (ends <= turn_end))
            closers = np.flatnonzero(is_end[turn])
            if closers.size:
                turn = turn[: closers[0] + 1]
            elif not is_stable:
                raise _unstable(where, i)
            mask[turn] = True
        return ids, mask

    def _apply(self, messages: Messages, where: str, tools: Tools, **options: Any) -> Any:
        options = {**self._template_kwargs, **options}
        if tools:
            options["tools"] = list(tools)
        try:
            return render_chat(self._tokenizer, list(messages), **options)
        except MessageError as error:
            raise UserError(f"{where}: {error}") from None

    def _encode(
        self, text: str, *, add_special_tokens: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids, and the end of each in the text; 0 for tokens that are not in the text."""
        encoded = self._tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return np.array(encoded["input_ids"], np.int64), offsets[:, 1]

    def _add_ends(self, ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> Tokens:
        """Return the tokens with one after each turn that ends a response, to be learned too.

        After the last turn it is added where the template has none.
        """
        is_end = np.isin(ids, list(self._eos_token_ids))
        *earlier, last = np.flatnonzero(mask & ~np.append(mask[1:], False)).tolist()
        for turn_end in (*earlier, last):
            if not is_end[turn_end] and is_end[turn_end + 1 : turn_end + 2].any():
                mask[turn_end + 1] = True
        has_end = is_end | np.append((is_end & mask)[1:], False)
        self._num_without_ends += not has_end[earlier].all()
        if not has_end[last]:
            ids = np.append(ids[: last + 1], self._tokenizer.eos_token_id)
            mask = np.append(mask[: last + 1], True)
        return Tokens(ids=ids, mask=mask)


def _find_thoughts(message: Mapping[str, Any]) -> list[str]:
    """Return the reasoning of a turn, in its content or in a field of its own."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    thoughts: list[str] = _THOUGHT.findall(content)
    thoughts += [
        message[key] for key in ("reasoning_content", "reasoning", "thinking") if key in message
    ]
    return list(filter(None, map(str.strip, thoughts)))


def _unstable(where: str, message: int) -> UserError:
    return UserError(
        f"{where}: the model's chat template renders what comes before the assistant's turn (message {message + 1}) "
        "differently once the conversation continues, so its tokens cannot be identified: mark them in the template "
        "with {% generation %} and {% endgeneration %}"
    )
