"""Boxes of tensors and the headers of data files, against what numpy and json make of them."""

import json
from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from gcore_ckpt.format.boxes import DTYPES, Box, HeldBox, lay_out_file, safetensors_header

NAMES = st.text(max_size=3) | st.sampled_from(
    ["__metadata__", "a", "a#", "a[0:1]", "\U0001f600", '"', "\\"]
)
SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return Box(
        start,
        tuple(draw(st.integers(1, extent - at)) for extent, at in zip(shape, start, strict=True)),
    )


@st.composite
def held_boxes(draw: st.DrawFn) -> HeldBox:
    shape = draw(SHAPES | st.just((10**6, 3)))
    return HeldBox(draw(NAMES), draw(st.sampled_from(sorted(DTYPES))), shape, draw(boxes_in(shape)))


@given(st.data(), SHAPES)
def test_what_of_a_box_lies_within_a_span(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Boxes that hold each element once, and at most two for each dimension."""
    box = data.draw(boxes_in(shape))
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, numbers.size)] * 2)))
    found = [*box.parts_in_span(shape, first, last)]
    elements = [int(number) for part in found for number in numbers[part.slices()].flat]
    assert elements == [number for number in numbers[box.slices()].flat if first <= number < last]
    assert len(found) <= max(1, 2 * len(shape))


@given(st.lists(held_boxes(), min_size=1, max_size=12))
def test_a_header_fits_into_the_place_that_is_left_for_it(boxes: list[HeldBox]) -> None:
    layout = lay_out_file(range(len(boxes)), boxes)
    assert len(layout.header) == layout.offsets[0]
    assert layout.offsets[0] % 64 == 0
    shortest = safetensors_header(boxes)
    assert len(shortest) <= len(layout.header)
    entries = json.loads(layout.header[8:])
    assert entries == json.loads(shortest[8:])
    spans = [
        tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__"
    ]
    assert spans == [*pairwise(offset - layout.offsets[0] for offset in layout.offsets)]
