"""The ages of samples in a run that samples without a pause while it trains, predicted from the times of its groups."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from gcore_placement.errors import refusal
from gcore_placement.quantities import Floats, Ints, check_above_0

_NUM_ITERATIONS = 200


@dataclass(frozen=True, kw_only=True)
class PredictedAges:
    """A prediction of `predict_ages`.

    Example:
        >>> ages = PredictedAges(step_s=10.0, shares=np.array([0.25, 0.75]), stale_share=0.0)
        >>> float(ages.shares @ np.arange(2))  # the mean age
        0.75
    """

    step_s: float
    """Seconds of a step."""
    shares: Floats
    """[max_staleness + 1] share of each age, from 0, in the groups that are trained on."""
    stale_share: float
    """Share of the started groups that are dropped."""


def predict_ages(
    group_s: ArrayLike,
    *,
    num_in_flight: float,
    train_batch_size: int,
    update_s: float,
    max_staleness: int,
    strategy: Literal["drop", "wait"] = "drop",
) -> PredictedAges:
    """Predict the ages of the groups of a step: the versions of the weights between their start and their update.

    The model: engines keep C groups in flight, and one starts as another ends. A group takes L seconds, and groups end
    evenly over time. A step takes its B groups as soon as there are so many, and publishes weights U seconds later. By
    Little's law a step then takes T = B E[L] / C. A group that ends uT before its step is taken has seen versions
    published at U - jT, j = 1, 2, ..., before that: its age is the number of j below u + x, where x = (L + U) / T. With
    u even over [0, 1)

        P(age > a) = E[min(1, max(0, x - a))],   E[age] = C / B + U / T.

    A group older than the bound S is dropped at the first batch that it is too old for, K seconds after its start,
    where K is even over [ST - U, (S + 1)T - U]. Then p = P(age <= S) of the groups are kept, their ages are
    distributed as above given that they are at most S, and T = B E[min(L, K)] / (C p), which is solved by iteration. A
    step that waits for such groups takes them at the age S; its T is a lower bound.

    If training takes longer, U >= T, engines are held back once S batches are complete: a batch is then sampled by the
    weights of S steps before, and T = U. Where U is above T by less than the time of a group, or C above (S - 1)B with
    "wait", which holds prompts back, groups are younger than predicted.

    Args:
        group_s: [N] seconds of groups from their start to their last token and score, as they run next to others.
        num_in_flight: groups that run at once (C).
        train_batch_size: groups of a step (B).
        update_s: seconds from the start of an update until engines have its weights (U).
        max_staleness: largest age of a group that is trained on (S), 1 or more.
        strategy: "drop": groups that are too old are dropped, and their prompts sampled again; "wait": a step waits for
            those that the next one would be too late for.

    Raises:
        PlacementError: a number is out of range.

    Example:
        >>> ages = predict_ages([60.0], num_in_flight=96, train_batch_size=64, update_s=10.0, max_staleness=4)
        >>> ages.step_s, ages.shares.tolist()
        (40.0, [0.0, 0.25, 0.75, 0.0, 0.0])
    """
    times_N = np.asarray(group_s, dtype=float)
    check_above_0("group_s", float(times_N.min(initial=np.inf)))
    check_above_0("num_in_flight", num_in_flight)
    check_above_0("train_batch_size", train_batch_size)
    check_above_0("max_staleness", max_staleness)
    if update_s < 0:
        raise refusal("update_s", update_s, "0 or more")
    slot_s = train_batch_size / num_in_flight
    step_s = float(slot_s * times_N.mean())
    ages = np.arange(max_staleness + 1)
    if update_s >= step_s:
        shares = (ages == max_staleness).astype(float)
        return PredictedAges(step_s=update_s, shares=shares, stale_share=0.0)
    older = _shares_older(times_N + update_s, step_s, ages)
    if strategy == "wait":
        older[-1] = 0.0
    else:
        for _ in range(_NUM_ITERATIONS):
            busy_s = _mean_time_in_flight(times_N, max_staleness * step_s - update_s, step_s)
            step_s = max(update_s, slot_s * busy_s / max(1 - float(older[-1]), 1e-9))
            older = _shares_older(times_N + update_s, step_s, ages)
    shares = np.append(1.0, older[:-1]) - older
    return PredictedAges(step_s=step_s, shares=shares / shares.sum(), stale_share=float(older[-1]))


def _shares_older(times_N: Floats, step_s: float, ages: Ints) -> Floats:
    """Return P(age > a) of groups that are never dropped, from L + U."""
    return np.clip(times_N / step_s - ages[:, None], 0, 1).mean(axis=1)


def _mean_time_in_flight(times_N: Floats, first_s: float, step_s: float) -> float:
    """Return E[min(L, K)], where K is even over the step from ``first_s`` on."""
    late_N = np.clip(times_N - first_s, 0, step_s)
    return float((np.minimum(times_N, first_s) + late_N - late_N**2 / (2 * step_s)).mean())
