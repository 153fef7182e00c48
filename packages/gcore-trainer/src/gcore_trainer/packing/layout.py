"""The layout of a row: its segments, and the packing of samples end to end.

No padding is computed, and a prompt that many samples share is computed once. A row of T tokens is made of segments. A
*causal* segment starts from nothing: a prompt, or a prompt with its only response. A *branch* segment is one of several
responses to a prompt: its tokens see the prompt's and their own predecessors. A response's last token predicts nothing,
so it is never an input.

Where the row is divided among ranks, its length must be a multiple of something: padding tokens, of id 0, then
follow the real ones of a causal segment or make up a last segment of their own, so that no real token sees them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import ConfigError
from gcore_trainer.sample import MicroBatch, Sample


class Segment(NamedTuple):
    """A segment of a row; a branch has the prompt that it follows as its parent."""

    start: int
    length: int
    parent: "Segment | None"
    num_padding: int
    """Tokens of the length that are padding, at its end."""

    @property
    def tokens(self) -> range:
        """Places of its tokens in the row."""
        return range(self.start, self.start + self.length)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt that a branch follows; 0 for a causal segment."""
        if self.parent is None:
            return 0
        return self.parent.length


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """T packed tokens that predict N response tokens, in the samples' order, from U distinct places.

    Example:
        >>> prompt = np.array([1, 5, 7])
        >>> samples = [Sample(prompt_ids=prompt, response_ids=np.array(response)) for response in ([8, 2], [9, 9, 2])]
        >>> batch = pack(samples)
        >>> batch.input_ids
        array([1, 5, 7, 8, 9, 9])
        >>> batch.target_ids
        array([8, 2, 9, 9, 2])
    """

    input_ids: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T] place of each token in its own sequence; padding at the end of a segment repeats the last."""
    segments: list[Segment]
    """All segments, in the row's order; their lengths sum to T."""
    predict_index: NDArray[np.int64]
    """[U] packed places whose next-token distribution is needed."""
    target_place: NDArray[np.int64]
    """[N] which of those U predicts each response token."""
    target_ids: NDArray[np.int64]
    """[N]."""
    last_prompt_places: NDArray[np.int64]
    """Place of each sample's last prompt token in the row."""
    first_response_places: NDArray[np.int64]
    """Place of each sample's first response token in the row; the last response token has none."""

    @property
    def segment_lengths(self) -> NDArray[np.int64]:
        """Lengths of the segments, with their padding."""
        return np.array([s.length for s in self.segments])

    def input_places(self, samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
        """Return the places [P + R - 1] of each sample's input tokens in the row."""
        index: list[NDArray[np.int64]] = []
        for sample, last, first in zip(
            samples, self.last_prompt_places, self.first_response_places, strict=True
        ):
            prompt_places = np.arange(last - sample.prompt_ids.size, last) + 1
            response_places = first + np.arange(sample.response_ids.size - 1)
            index.append(np.concatenate([prompt_places, response_places]))
        return index


def pack(
    samples: MicroBatch,
    *,
    share_prefix: bool = True,
    multiple_of: int = 1,
    segment_multiple_of: int = 1,
) -> PackedBatch:
    """Pack one micro-batch.

    Args:
        multiple_of: pad the row so that T is a multiple of it.
        segment_multiple_of: pad every segment so that its length is a multiple of it.

    Raises:
        ConfigError: a multiple is below 1, or segments are to be padded where they share prompts: the padding of a
            prompt would stand between it and its responses.
    """
    for name, value in (("multiple_of", multiple_of), ("segment_multiple_of", segment_multiple_of)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; expected 1 or more")
    if share_prefix and segment_multiple_of > 1:
        raise ConfigError(
            f"segment_multiple_of is {segment_multiple_of} with share_prefix=True; expected False"
        )
    by_prompt: dict[bytes | int, list[int]] = {}
    for i, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_key if share_prefix else i, []).append(i)

    pieces: list[NDArray[np.int64]] = []
    segments: list[Segment] = []
    last_prompt_places = np.empty(len(samples), np.int64)
    first_response_places = np.empty(len(samples), np.int64)
    total = 0

    def add(*parts: NDArray[np.int64], parent: Segment | None = None) -> Segment:
        nonlocal total
        num_real = sum(part.size for part in parts)
        num_padding = -num_real % segment_multiple_of
        pieces.extend(parts)
        pieces.append(np.zeros(num_padding, np.int64))
        segment = Segment(total, num_real + num_padding, parent, num_padding)
        segments.append(segment)
        total += segment.length
        return segment

    for members in by_prompt.values():
        prompt = samples[members[0]].prompt_ids
        last_prompt_places[members] = total + prompt.size - 1
        if len(members) == 1:
            first_response_places[members] = total + prompt.size
            add(prompt, samples[members[0]].response_ids[:-1])
            continue
        root = add(prompt)
        for i in members:
            first_response_places[i] = total
            if samples[i].response_ids.size > 1:
                add(samples[i].response_ids[:-1], parent=root)
    num_padding = -total % math.lcm(multiple_of, segment_multiple_of)
    if num_padding:
        add(np.zeros(num_padding, np.int64))

    starts = np.array([s.start for s in segments])
    lengths = np.array([s.length for s in segments])
    first_positions = np.array([s.prompt_length for s in segments])
    last_positions = first_positions + lengths - 1 - np.array([s.num_padding for s in segments])
    response_lengths = np.array([s.response_ids.size for s in samples])
    ends = np.cumsum(response_lengths)
    sources = np.repeat(
        first_response_places - 1 - (ends - response_lengths), response_lengths
    ) + np.arange(ends[-1])
    sources[ends - response_lengths] = last_prompt_places
    predict_index, target_place = np.unique(sources, return_inverse=True)
    positions = np.arange(total) - np.repeat(starts - first_positions, lengths)
    return PackedBatch(
        input_ids=np.concatenate(pieces),
        positions=np.minimum(positions, np.repeat(last_positions, lengths)),
        segments=segments,
        predict_index=predict_index,
        target_place=target_place,
        target_ids=np.concatenate([s.response_ids for s in samples]),
        last_prompt_places=last_prompt_places,
        first_response_places=first_response_places,
    )


def rounded_length(length: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())
