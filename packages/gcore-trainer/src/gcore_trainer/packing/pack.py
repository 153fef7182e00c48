"""Packing of samples end to end, so that no padding is computed and a prompt shared by many samples is computed once.

A micro-batch becomes one row of T tokens, made of segments. A *causal* segment starts from nothing: a prompt, or a
prompt with its only response. A *branch* segment is one of several responses to a prompt: its tokens see the prompt's
and their own predecessors. A response's last token predicts nothing, so it is never an input.

Where the row is divided among ranks, its length must be a multiple of something: padding tokens, of id 0, then
follow the real ones of a causal segment or make up a last segment of their own, so that no real token sees them.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import ConfigError
from gcore_trainer.sample import Sample


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Segments of similar length, attended to as one rectangle. S segments, Lq queries, Lk keys."""

    query_index: NDArray[np.int64]
    """[S, Lq] places in the packed row; what pads a segment points to 0 and is never read back."""
    key_index: NDArray[np.int64]
    """[S, Lk]."""
    prompt_lengths: NDArray[np.int64] | None
    """[S] for branches, whose keys are Lk - Lq places of their prompts, so many of them real, and then the queries'
    own places, causally. None: the keys are the queries' places, causally; padding follows every real token."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """T packed tokens that predict N response tokens, in the samples' order, from U distinct places."""

    input_ids: NDArray[np.int64]
    """[T]."""
    positions: NDArray[np.int64]
    """[T] place of each token in its own sequence; padding at the end of a segment repeats the last."""
    segment_lengths: NDArray[np.int64]
    """Lengths of all segments, in the row's order and with their padding; they sum to T."""
    buckets: list[Bucket]
    unpack_index: NDArray[np.int64]
    """[T] where each token's attention output stands among the flattened rectangles of all buckets."""
    sequences: list[NDArray[np.int64]]
    """Places of each whole sequence, in its order: every token is in one, those of a shared prompt are in several."""
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


@dataclass(frozen=True)
class _Segment:
    start: int
    length: int
    parent: "_Segment | None" = None
    num_padding: int = 0
    """Tokens of the length that are padding, at its end."""


def pack(
    samples: list[Sample], *, share_prefix: bool = True, multiple_of: int = 1, segment_multiple_of: int = 1
) -> PackedBatch:
    """Pack one micro-batch.

    Args:
        samples: at least one.
        share_prefix: compute equal prompts once.
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
        raise ConfigError(f"segment_multiple_of is {segment_multiple_of} with share_prefix=True; expected False")
    by_prompt: dict[bytes, list[int]] = {}
    for i, sample in enumerate(samples):
        key = sample.prompt_key if share_prefix else i.to_bytes(8, "little")
        by_prompt.setdefault(key, []).append(i)

    pieces: list[NDArray[np.int64]] = []
    segments: list[_Segment] = []
    last_prompt_places = np.empty(len(samples), np.int64)
    first_response_places = np.empty(len(samples), np.int64)
    total = 0
    for members in by_prompt.values():
        prompt = samples[members[0]].prompt_ids
        pieces.append(prompt)
        last_prompt_places[members] = total + prompt.size - 1
        if len(members) == 1:
            [i] = members
            inputs = samples[i].response_ids[:-1]
            num_padding = -(prompt.size + inputs.size) % segment_multiple_of
            pieces += [inputs, np.zeros(num_padding, np.int64)]
            first_response_places[i] = total + prompt.size
            segments.append(_Segment(total, prompt.size + inputs.size + num_padding, num_padding=num_padding))
            total += segments[-1].length
            continue
        root = _Segment(total, prompt.size)
        segments.append(root)
        total += prompt.size
        for i in members:
            inputs = samples[i].response_ids[:-1]
            first_response_places[i] = total
            if inputs.size:
                pieces.append(inputs)
                segments.append(_Segment(total, inputs.size, root))
                total += inputs.size
    if num_padding := -total % math.lcm(multiple_of, segment_multiple_of):
        pieces.append(np.zeros(num_padding, np.int64))
        segments.append(_Segment(total, num_padding))
        total += num_padding

    starts, lengths = _bounds(segments)
    first_positions = np.array([s.parent.length if s.parent else 0 for s in segments])
    last_positions = first_positions + lengths - 1 - np.array([s.num_padding for s in segments])
    response_lengths = np.array([s.response_ids.size for s in samples])
    ends = np.cumsum(response_lengths)
    places = np.repeat(first_response_places - 1 - (ends - response_lengths), response_lengths) + np.arange(ends[-1])
    places[ends - response_lengths] = last_prompt_places
    predict_index, target_place = np.unique(places, return_inverse=True)
    buckets, unpack_index = _bucketed(segments, total)
    return PackedBatch(
        input_ids=np.concatenate(pieces),
        positions=np.minimum(
            np.arange(total) - np.repeat(starts - first_positions, lengths), np.repeat(last_positions, lengths)
        ),
        segment_lengths=lengths,
        buckets=buckets,
        unpack_index=unpack_index,
        sequences=_sequences(segments),
        predict_index=predict_index,
        target_place=target_place,
        target_ids=np.concatenate([s.response_ids for s in samples]),
        last_prompt_places=last_prompt_places,
        first_response_places=first_response_places,
    )


def sequence_rectangles(batch: PackedBatch) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Lay out the sequences of a row, each with its own copy of its prompt, in rectangles of similar lengths.

    Returns:
        Places in the row [S, L] of each rectangle; what pads a sequence, at its end, points to 0. And [T] where each
        token of the row stands among the flattened rectangles, in one of its sequences.
    """
    by_length: dict[int, list[NDArray[np.int64]]] = {}
    for sequence in batch.sequences:
        by_length.setdefault(_rounded(sequence.size), []).append(sequence)
    rectangles: list[NDArray[np.int64]] = []
    unpack_index = np.empty(batch.input_ids.size, np.int64)
    offset = 0
    for _, members in sorted(by_length.items()):
        rectangle = np.zeros((len(members), max(x.size for x in members)), np.int64)
        for row, sequence in zip(rectangle, members, strict=True):
            row[: sequence.size] = sequence
            unpack_index[sequence] = offset + np.arange(sequence.size)
            offset += row.size
        rectangles.append(rectangle)
    return rectangles, unpack_index


def _sequences(segments: list[_Segment]) -> list[NDArray[np.int64]]:
    shared = {s.parent.start for s in segments if s.parent}
    return [
        np.concatenate([np.arange(x.start, x.start + x.length) for x in (s.parent, s) if x])
        for s in segments
        if s.start not in shared
    ]


def _bucketed(segments: list[_Segment], num_tokens: int) -> tuple[list[Bucket], NDArray[np.int64]]:
    """Group segments whose lengths, and prompts' lengths, round up to the same power of two."""
    groups: dict[tuple[int, int], list[_Segment]] = {}
    for segment in segments:
        prompt_length = 0 if segment.parent is None else _rounded(segment.parent.length)
        groups.setdefault((prompt_length, _rounded(segment.length)), []).append(segment)
    buckets: list[Bucket] = []
    unpack_index = np.empty(num_tokens, np.int64)
    offset = 0
    for _, members in sorted(groups.items()):
        starts, lengths = _bounds(members)
        query_index, is_real = _rectangle(starts, lengths)
        unpack_index[query_index[is_real]] = offset + np.flatnonzero(is_real)
        offset += query_index.size
        key_index, prompt_lengths = query_index, None
        if parents := [s.parent for s in members if s.parent]:
            prompt_starts, prompt_lengths = _bounds(parents)
            prompt_index, _ = _rectangle(prompt_starts, prompt_lengths)
            key_index = np.concatenate([prompt_index, query_index], axis=1)
        buckets.append(Bucket(query_index=query_index, key_index=key_index, prompt_lengths=prompt_lengths))
    return buckets, unpack_index


def _rounded(length: int) -> int:
    return max(16, 1 << (length - 1).bit_length())


def _bounds(segments: list[_Segment]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return np.array([s.start for s in segments]), np.array([s.length for s in segments])


def _rectangle(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Packed places [S, L] of segments padded to the longest, and which of them are real."""
    columns = np.arange(lengths.max())
    is_real = columns < lengths[:, None]
    return np.where(is_real, starts[:, None] + columns, 0), is_real
