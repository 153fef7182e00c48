"""The choice, from step to step, whether training ranks lend their devices to generation while the policy samples."""

from collections import deque
from statistics import median

from gcore_placement.quantities import check_amounts, check_positive

_WINDOW = 3
"""Steps whose medians decide, and fewest steps between two changes."""


class LendChoice:
    """Decides after the sampling of each step whether training ranks lend their devices in the next step.

    The gain of lending is the time that generation takes with the engines that have devices of their own, less the time
    that it takes with the lent ones, too, less the swaps: ranks asleep and engines awake, and back. What the present
    way takes is measured, in seconds per token or image, so that steps of more work are no evidence. What the other way
    would take is predicted from the ratio of the two: at first by the law that generation is work which divides over
    all engines, from the first change on as measured before and after it. The law is the most that lending can gain,
    so that it is tried where it may pay, and left where the longest samples or the swaps take the gain away.

    Args:
        engines: those with devices of their own.
        lent: those on the devices of ranks.

    Example:
        >>> choice = LendChoice(engines=4, lent=4)
        >>> for _ in range(3):
        ...     lends = choice.observe(generation_s=60.0, generated=100_000, swap_s=0.0)
        >>> lends
        True
    """

    def __init__(self, *, engines: int, lent: int) -> None:
        check_positive("engines", engines)
        check_positive("lent", lent)
        self.lends = False
        """Whether ranks lend their devices in the next step."""
        self._ratio = engines / (engines + lent)
        """Seconds of generation with the lent engines over those without."""
        self._unit_s: deque[float] = deque(maxlen=_WINDOW)
        """Seconds of generation per token or image, in the last steps of the present way."""
        self._before_s: float | None = None
        """The same before the last change, until the ratio is measured."""
        self._generated: deque[float] = deque(maxlen=_WINDOW)
        self._swap_s: deque[float] = deque(maxlen=_WINDOW)

    @property
    def gain_s(self) -> float:
        """Return the predicted seconds that lending saves a step; below 0 it costs time."""
        if not self._unit_s:
            return 0.0
        present_s = median(self._unit_s) * median(self._generated)
        alone_s = present_s / self._ratio if self.lends else present_s
        swap_s = median(self._swap_s) if self._swap_s else 0.0
        return alone_s * (1 - self._ratio) - swap_s

    def observe(self, *, generation_s: float, generated: float, swap_s: float) -> bool:
        """Observe a step; return whether ranks lend their devices in the next one.

        Args:
            generation_s: seconds of generation.
            generated: tokens, or images, that were generated.
            swap_s: seconds of all swaps since the last call; of no effect unless ranks lend their devices.
        """
        check_amounts("generation_s", generation_s)
        check_amounts("generated", generated)
        check_amounts("swap_s", swap_s)
        if not generated or not generation_s:
            return self.lends
        self._unit_s.append(generation_s / generated)
        self._generated.append(generated)
        if self.lends:
            self._swap_s.append(swap_s)
        if len(self._unit_s) < _WINDOW:
            return self.lends
        if self._before_s is not None:
            ratio = median(self._unit_s) / self._before_s
            self._ratio = ratio if self.lends else 1 / ratio
            self._before_s = None
        if (self.gain_s > 0) is not self.lends:
            self._before_s = median(self._unit_s)
            self.lends = not self.lends
            self._unit_s.clear()
        return self.lends
