"""The layout of a row: its segments, and the packing of samples end to end.

No padding is computed, and tokens that several sequences share are computed once: the prompt of many samples, and the
common path of a response's branches (`Sample.forks`). A row of T tokens is made of segments. A *causal* segment starts
from nothing: a prompt, or a prompt with its only response. A *branch* segment follows its parent, one of several that
do: its tokens see all tokens of the parent and of its ancestors, and their own predecessors. All segments that follow
one, directly or not, stand next to each other after it. A response's last token, and that of each of its branches,
predicts nothing, so it is never an input.

Where the row is divided among ranks, its length must be a multiple of something: padding tokens, of id 0, then
follow the real ones of a causal segment or make up a last segment of their own, so that no real token sees them.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import MicroBatch, Sample, cut_at_forks


@dataclass(frozen=True, eq=False)
class Segment:
    """A segment of a row; a branch follows its parent's last token, and sees that one's ancestors, too."""

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
    def index(self) -> NDArray[np.int64]:
        """[length] places of its tokens in the row."""
        return np.arange(self.start, self.start + self.length)

    @property
    def path(self) -> "list[Segment]":
        """The segments that its last token sees, first to last: its ancestors and itself."""
        path: list[Segment] = [self]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[::-1]

    @cached_property
    def context_length(self) -> int:
        """Tokens of all its ancestors; 0 for a causal segment."""
        if self.parent is None:
            return 0
        return self.parent.context_length + self.parent.length

    @property
    def sequence(self) -> NDArray[np.int64]:
        """[context_length + length] places of the tokens that its last token sees."""
        return np.concatenate([segment.index for segment in self.path])


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
    """[N] which of those U predicts each response token; any of them for a token that nothing predicts."""
    target_ids: NDArray[np.int64]
    """[N]."""
    last_prompt_places: NDArray[np.int64]
    """Place of each sample's last prompt token in the row."""
    response_places: list[NDArray[np.int64]]
    """[R] place of each sample's response tokens in the row; -1: the token predicts nothing, and is not in it."""

    @property
    def segment_lengths(self) -> NDArray[np.int64]:
        """Lengths of the segments, with their padding."""
        return np.array([s.length for s in self.segments])

    @cached_property
    def sequences(self) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """The sequences of the row, each with a copy of what it shares, in rectangles of similar lengths.

        First the places [S, L] of each rectangle, padded with 0; then [T] where each token stands in them, flattened.
        """
        by_length: dict[int, list[NDArray[np.int64]]] = {}
        shared = {s.parent for s in self.segments if s.parent}
        for segment in self.segments:
            if segment in shared:
                continue
            sequence = segment.sequence
            by_length.setdefault(rounded_length(sequence.size), []).append(sequence)
        rectangles: list[NDArray[np.int64]] = []
        unpack_index = np.empty(self.input_ids.size, np.int64)
        offset = 0
        for _, members in sorted(by_length.items()):
            rectangle, is_real = make_rectangle(members)
            unpack_index[rectangle[is_real]] = offset + np.flatnonzero(is_real)
            offset += rectangle.size
            rectangles.append(rectangle)
        return rectangles, unpack_index

    def input_places(self, samples: Sequence[Sample]) -> list[NDArray[np.int64]]:
        """Return the places [num_inputs] of each sample's input tokens in the row."""
        index: list[NDArray[np.int64]] = []
        for sample, last, response_places in zip(
            samples, self.last_prompt_places, self.response_places, strict=True
        ):
            prompt_places = np.arange(last - sample.prompt_ids.size, last) + 1
            index.append(np.concatenate([prompt_places, response_places[response_places >= 0]]))
        return index


class _Branch(NamedTuple):
    """Consecutive tokens of a prompt or a response; others follow the last of them, and no other one."""

    ids: NDArray[np.int64]
    """Its input tokens."""
    row_index: NDArray[np.int64]
    """Gets the place of each of them in the row."""
    children: "list[_Branch]"


def pack(
    samples: MicroBatch,
    *,
    share_prefix: bool = True,
    multiple_of: int = 1,
    segment_multiple_of: int = 1,
) -> PackedBatch:
    """Pack one micro-batch.

    Args:
        share_prefix: compute equal prompts once; branches of one response share their path in any case.
        multiple_of: pad the row so that T is a multiple of it.
        segment_multiple_of: pad every segment so that its length is a multiple of it.

    Raises:
        ConfigError: a multiple is below 1, or segments are to be padded where they share prompts: the padding of a
            prompt would stand between it and its responses.
        BatchError: segments are to be padded, and branches of a response share tokens.
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
    response_places = [np.full(sample.response_ids.size, -1) for sample in samples]
    total = 0

    def add(branches: Sequence[_Branch], parent: Segment | None) -> Segment:
        nonlocal total
        start = total
        for branch in branches:
            branch.row_index[:] = np.arange(total, total + branch.ids.size)
            pieces.append(branch.ids)
            total += branch.ids.size
        num_padding = -(total - start) % segment_multiple_of
        pieces.append(np.zeros(num_padding, np.int64))
        total += num_padding
        segment = Segment(start, total - start, parent, num_padding)
        if segment.length:
            segments.append(segment)
        return segment

    def add_tree(root: _Branch) -> None:
        pending: list[tuple[_Branch, Segment | None]] = [(root, None)]
        while pending:
            branch, parent = pending.pop()
            chain = [branch]
            while len(chain[-1].children) == 1:
                chain += chain[-1].children
            segment = add(chain, parent)
            pending.extend((child, segment) for child in reversed(chain[-1].children))

    for members in by_prompt.values():
        prompt = samples[members[0]].prompt_ids
        prompt_places = np.empty_like(prompt)
        responses: list[_Branch] = []
        separate: list[_Branch] = []
        for i in members:
            branches = _cut_response(samples[i], response_places[i])
            responses += branches[-1]
            separate += branches[-2]
        add_tree(_Branch(prompt, prompt_places, responses))
        for root in separate:
            add_tree(root)
        last_prompt_places[members] = prompt_places[-1]
    if segment_multiple_of > 1 and any(s.parent for s in segments):
        raise BatchError(
            "forks of a sample share tokens, and ranks that pass keys and values on (a ring) divide its row; expected "
            "ulysses_sequence_parallel_size equal to context_parallel_size"
        )
    num_padding = -total % math.lcm(multiple_of, segment_multiple_of)
    if num_padding:
        add([_Branch(np.zeros(num_padding, np.int64), np.empty(num_padding, np.int64), [])], None)

    sources: list[NDArray[np.int64]] = []
    for sample, row_index, last in zip(samples, response_places, last_prompt_places, strict=True):
        parents = sample.parents
        sources.append(np.where(parents < 0, last, row_index[parents]))
    predict_index, target_place = np.unique(np.concatenate(sources), return_inverse=True)
    starts = np.array([s.start for s in segments])
    lengths = np.array([s.length for s in segments])
    first_positions = np.array([s.context_length for s in segments])
    last_positions = first_positions + lengths - 1 - np.array([s.num_padding for s in segments])
    positions = np.arange(total) - np.repeat(starts - first_positions, lengths)
    return PackedBatch(
        input_ids=np.concatenate(pieces),
        positions=np.minimum(positions, np.repeat(last_positions, lengths)),
        segments=segments,
        predict_index=predict_index,
        target_place=target_place,
        target_ids=np.concatenate([s.response_ids for s in samples]),
        last_prompt_places=last_prompt_places,
        response_places=response_places,
    )


def _cut_response(sample: Sample, row_index: NDArray[np.int64]) -> dict[int, list[_Branch]]:
    """Cut a response where tokens follow another than their predecessor: the branches by the token they follow.

    Those that follow the prompt's last token are at -1, those that follow nothing at -2.
    """
    branches: dict[int, list[_Branch]] = defaultdict(list)
    spans = cut_at_forks(sample.response_ids.size, sample.forks)
    followed = {parent for _, _, parent in spans}
    for start, stop, parent in spans:
        last = stop - 1
        inputs = slice(start, stop if last in followed else last)
        branch = _Branch(sample.response_ids[inputs], row_index[inputs], branches[last])
        branches[parent].append(branch)
    return branches


def rounded_length(length: int) -> int:
    """Round up to a power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())


def make_rectangle(
    rows: Sequence[NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Lay places in the row out as [S, L], padded to the longest by the row's first, and say which are not padding."""
    lengths = np.array([[row.size] for row in rows])
    is_real = np.arange(lengths.max()) < lengths
    rectangle = np.zeros(is_real.shape, np.int64)
    rectangle[is_real] = np.concatenate(rows)
    return rectangle, is_real
