"""The layout of a row: its segments, the packing of samples end to end, and the tiles of attention over it.

No padding is computed, and a prompt that many samples share is computed once. A row of T tokens is made of segments. A
*causal* segment starts from nothing: a prompt, or a prompt with its only response. A *branch* segment is one of several
responses to a prompt: its tokens see the prompt's and their own predecessors. A response's last token predicts nothing,
so it is never an input.

Where the row is divided among ranks, its length must be a multiple of something: padding tokens, of id 0, then
follow the real ones of a causal segment or make up a last segment of their own, so that no real token sees them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

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


class TokenSpan(NamedTuple):
    """Neighbouring tokens of a row."""

    start: int
    length: int

    def part(self, first: int, last: int | None = None) -> "TokenSpan":
        """Return tokens `first` up to `last` of these."""
        if last is None:
            last = self.length
        return TokenSpan(self.start + first, last - first)


class Tile(NamedTuple):
    """Neighbouring queries, and neighbouring keys that they see: all, or a triangle of as many keys as queries.

    Segments, shared prompts, sliding windows and the chunks of a ring are exact sums of tiles, without masks.
    """

    queries: TokenSpan
    keys: TokenSpan
    seen: Literal["all", "until", "from"]
    """Which keys query i sees: all, those until key i, or those from key i."""


def causal_tiles(tokens: TokenSpan, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of tokens that see their latest predecessors and themselves, `window` in all."""
    step = tokens.length
    if window is not None:
        step = min(window, step)
    chunks = [tokens.part(i, min(i + step, tokens.length)) for i in range(0, tokens.length, step)]
    for chunk in chunks:
        yield Tile(chunk, chunk, "until")
    for previous, chunk in pairwise(chunks):
        yield from earlier_tiles(chunk, previous, step, window)


def earlier_tiles(
    queries: TokenSpan, keys: TokenSpan, distance: int, window: int | None
) -> Iterator[Tile]:
    """Yield the tiles of queries whose keys all come before them, so that only a sliding window hides some.

    Args:
        distance: position of the first query less that of the first key.
        window: latest tokens that a query sees, its own included; None: all.
    """
    # Query i sees the keys from i + shift.
    shift = -queries.length
    if window is not None:
        shift = distance - window + 1
    if shift > 0:
        keys = keys.part(min(shift, keys.length))
        shift = 0
    num_full = min(-shift, queries.length)
    num_partial = min(queries.length - num_full, keys.length)
    partial = queries.part(num_full, num_full + num_partial)
    for tile in (
        Tile(queries.part(0, num_full), keys, "all"),
        Tile(partial, keys.part(num_partial), "all"),
    ):
        if tile.queries.length and tile.keys.length:
            yield tile
    if num_partial:
        yield Tile(partial, keys.part(0, num_partial), "from")


def row_tiles(
    segments: Sequence[Segment], window: int | None, *, kernel_has_windows: bool = False
) -> list[Tile]:
    """Return the tiles of a row's segments: each sees itself causally, and its prompt if it has one.

    A kernel that has windows gets causal tiles whole.
    """
    tiles: list[Tile] = []
    branches: dict[Segment, list[TokenSpan]] = {}
    causal_window = None if kernel_has_windows else window
    for segment in segments:
        tokens = TokenSpan(segment.start, segment.length)
        tiles += causal_tiles(tokens, causal_window)
        if segment.parent is not None:
            branches.setdefault(segment.parent, []).append(tokens)
    for prompt, spans in branches.items():
        keys = TokenSpan(prompt.start, prompt.length)
        # Branches are neighbours, and the prompt's last tokens are seen by all of them.
        longest = max(span.length for span in spans)
        first = 0
        if window is not None:
            first = min(keys.length, max(0, keys.length + longest - window))
        start = spans[0].start
        end = spans[-1].start + spans[-1].length
        if first < keys.length:
            tiles.append(Tile(TokenSpan(start, end - start), keys.part(first), "all"))
        if first:
            for span in spans:
                tiles += earlier_tiles(span, keys.part(0, first), keys.length, window)
    return tiles
