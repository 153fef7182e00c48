"""Form micro-batches: as few as a token budget allows, each with about the same work."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.balancing.assignment import Assignment, sum_per_part
from gcore_placement.balancing.balance import balance, scale_to_one
from gcore_placement.balancing.initial_assignment import best_fit_decreasing, fill_empty, longest_first_within
from gcore_placement.balancing.refine import refine
from gcore_placement.errors import PlacementError, check_amount_list, check_lengths, check_positive


def micro_batches(
    lengths: ArrayLike, *, max_tokens: int, num_multiple: int = 1, costs: ArrayLike | None = None
) -> list[NDArray[np.intp]]:
    """Group sequences into micro-batches of at most `max_tokens` tokens and about even cost.

    The count is the smallest found by bisection between the lower bound of bin packing and best fit decreasing, so it
    is never above best fit's, then rounded up to a multiple of `num_multiple`. Costs are made even within that count:
    a budget that is full to the last few percent leaves little choice. Deterministic.

    Args:
        lengths: [num_sequences], tokens of each sequence.
        max_tokens: the budget of one micro-batch, in tokens.
        num_multiple: the count is a multiple of this, as a pipeline schedule may ask.
        costs: [num_sequences], what to make even, such as `TransformerWorkload.flops(lengths)`; `lengths` if None.

    Returns:
        The indices of each micro-batch, ascending. One is empty only where rounding up left fewer sequences than
        micro-batches; no sequences give no micro-batches.

    Raises:
        PlacementError: a sequence is longer than `max_tokens`, or a length, cost or count is out of bounds.
    """
    tokens = check_lengths("lengths", check_amount_list("lengths", lengths))
    check_positive("max_tokens", max_tokens)
    check_positive("num_multiple", num_multiple)
    work = tokens if costs is None else check_amount_list("costs", costs)
    if len(work) != len(tokens):
        raise PlacementError(f"costs has {len(work)} values; expected one per sequence ({len(tokens)})")
    if not len(tokens):
        return []
    if tokens.max() > max_tokens:
        longest = int(tokens.argmax())
        raise PlacementError(
            f"lengths[{longest}] is {int(tokens[longest])} tokens; expected at most max_tokens={max_tokens}: "
            f"raise max_tokens to at least {int(tokens[longest])}, or truncate the sequence"
        )

    order = np.lexsort((-tokens, -work))
    tokens, work = tokens[order], work[order]
    by_tokens, num_parts = _fewest(tokens, max_tokens=max_tokens, num_multiple=num_multiple)
    by_work = longest_first_within(work, tokens, num_parts, capacity=max_tokens)
    starts = [by_tokens] if by_work is None else [by_work, by_tokens]

    scaled = scale_to_one(work)
    assignments = [
        Assignment.of(
            fill_empty(start, num_parts), costs=scaled, weights=tokens, capacity=max_tokens, num_parts=num_parts
        )
        for start in starts
    ]
    for assignment in assignments:
        refine(assignment, lower_bound=max(float(scaled.sum()) / num_parts, float(scaled.max())))
    return min(assignments, key=lambda assignment: assignment.makespan).parts(order)


def _fewest(tokens: NDArray[np.float64], *, max_tokens: int, num_multiple: int) -> tuple[NDArray[np.intp], int]:
    """Return the micro-batch of each sequence and their count: few, a multiple of `num_multiple`, within the budget."""
    packed = best_fit_decreasing(tokens, capacity=max_tokens)
    # Two sequences of more than half the budget never share a micro-batch.
    least = max(-(-int(tokens.sum()) // max_tokens), int((tokens * 2 > max_tokens).sum()), 1)
    below = (least - 1) // num_multiple
    enough = -(-(int(packed.max()) + 1) // num_multiple)
    fewest = packed
    while enough - below > 1:
        middle = (below + enough) // 2
        tried = np.empty(len(tokens), dtype=np.intp)
        for part, items in enumerate(balance(tokens, middle * num_multiple)):
            tried[items] = part
        if sum_per_part(tried, tokens, middle * num_multiple).max() <= max_tokens:
            fewest, enough = tried, middle
        else:
            below = middle
    return fewest, enough * num_multiple
