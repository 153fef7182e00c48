"""Neighbouring tokens of a row, and the tiles that attention over its segments is the sum of."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from gcore_trainer.packing.packed_batch import Segment


class Span(NamedTuple):
    """Neighbouring tokens of a row."""

    start: int
    length: int

    def part(self, first: int, last: int | None = None) -> "Span":
        """Return tokens `first` up to `last` of these."""
        return Span(self.start + first, (self.length if last is None else last) - first)


class Tile(NamedTuple):
    """Neighbouring queries, and neighbouring keys that they see: all, or a triangle of as many keys as queries.

    Segments, shared prompts, sliding windows and the chunks of a ring are exact sums of tiles, without masks.
    """

    queries: Span
    keys: Span
    seen: Literal["all", "until", "from"]
    """Which keys query i sees: all, those until key i, or those from key i."""


def causal_tiles(tokens: Span, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of tokens that see their latest predecessors and themselves, `window` in all."""
    step = tokens.length if window is None else min(window, tokens.length)
    chunks = [tokens.part(i, min(i + step, tokens.length)) for i in range(0, tokens.length, step)]
    for chunk in chunks:
        yield Tile(chunk, chunk, "until")
    for previous, chunk in pairwise(chunks):
        yield from earlier_tiles(chunk, previous, step, window)


def earlier_tiles(queries: Span, keys: Span, distance: int, window: int | None) -> Iterator[Tile]:
    """Yield the tiles of queries whose keys all come before them, so that only a sliding window hides some.

    Args:
        distance: position of the first query less that of the first key.
        window: latest tokens that a query sees, its own included; None: all.
    """
    # Query i sees the keys from i + shift.
    shift = -queries.length if window is None else distance - window + 1
    if shift > 0:
        keys, shift = keys.part(min(shift, keys.length)), 0
    num_whole = min(-shift, queries.length)
    num_partial = min(queries.length - num_whole, keys.length)
    whole, partial = queries.part(0, num_whole), queries.part(num_whole, num_whole + num_partial)
    for seeing, seen in ((whole, keys), (partial, keys.part(num_partial))):
        if seeing.length and seen.length:
            yield Tile(seeing, seen, "all")
    if num_partial:
        yield Tile(partial, keys.part(0, num_partial), "from")


def row_tiles(segments: Sequence[Segment], window: int | None, *, kernel_has_windows: bool = False) -> list[Tile]:
    """Return the tiles of a row's segments: each sees itself causally, and its prompt if it has one.

    A kernel that has windows gets causal tiles whole.
    """
    tiles: list[Tile] = []
    branches: dict[Segment, list[Span]] = {}
    for segment in segments:
        tiles += causal_tiles(own := Span(segment.start, segment.length), None if kernel_has_windows else window)
        if segment.parent is not None:
            branches.setdefault(segment.parent, []).append(own)
    for prompt, spans in branches.items():
        keys = Span(prompt.start, prompt.length)
        # Branches are neighbours, and the prompt's last tokens are seen by all of them.
        longest = max(span.length for span in spans)
        first = 0 if window is None else min(keys.length, max(0, keys.length + longest - window))
        last = spans[-1].start + spans[-1].length
        if first < keys.length:
            tiles.append(Tile(Span(spans[0].start, last - spans[0].start), keys.part(first), "all"))
        for span in spans if first else ():
            tiles += earlier_tiles(span, keys.part(0, first), keys.length, window)
    return tiles
