"""Balance items that arrive one after the other and are assigned at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.quantities import check_amount_list, check_positive


class StreamingBalancer:
    """Assigns items to parts as they arrive, with one number of memory per part.

    Each item goes to the part that is lightest so far; the items of one chunk are taken heaviest first. That is list
    scheduling (Graham, Bell System Technical Journal 45, 1966): at all times

        max(loads) <= sum(costs) / num_parts + (1 - 1 / num_parts) * max(costs) <= (2 - 1 / num_parts) * optimum

    over the costs so far, however they came and were cut in chunks; in one chunk alone it is the LPT rule, with
    4/3 - 1 / (3 num_parts). Deterministic: of equal items the one that
    came first is taken first. Assigned items stay where they are.

    Args:
        num_parts: at least 1.

    Raises:
        PlacementError: `num_parts` is less.
    """

    def __init__(self, num_parts: int) -> None:
        check_positive("num_parts", num_parts)
        self._loads = np.zeros(num_parts)

    @property
    def loads(self) -> NDArray[np.float64]:
        """[num_parts], the summed costs of each part."""
        return self._loads.copy()

    def add(self, costs: ArrayLike) -> NDArray[np.intp]:
        """Assign the next items to parts.

        Args:
            costs: [num_items], in the unit of those before, at least 0.

        Returns:
            The part of each item, [num_items].

        Raises:
            PlacementError: a cost is negative or not finite; none of the items is assigned.
        """
        amounts = check_amount_list("costs", costs)
        part_of = np.empty(len(amounts), dtype=np.intp)
        order = np.argsort(-amounts, kind="stable")
        first = 0
        while first < len(order):
            # The next items go to one part each, for as long as none of these is the lightest again.
            lightest = np.argsort(self._loads, kind="stable")[: len(order) - first]
            items = order[first : first + len(lightest)]
            loads = self._loads[lightest] + amounts[items]
            again = self._loads[lightest[1:]] > np.minimum.accumulate(loads)[:-1]
            count = int(again.argmax()) + 1 if again.any() else len(items)
            part_of[items[:count]] = lightest[:count]
            self._loads[lightest[:count]] = loads[:count]
            first += count
        return part_of
