"""The order in which a judge compares the responses of a group: all pairs at once, or the rounds of a tournament."""

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Literal

Scheme = Literal["all_pairs", "knockout", "swiss"]
"""Which pairs of a group of N responses are compared, each at most once.

- all_pairs: all N (N - 1) / 2 of them, in one round.
- knockout: N - 1 pairs in ceil(log2 N) rounds; the loser is out. If N is no power of two, the first responses of the
  draw do not play in the first round, so that a power of two is left after it.
- swiss: floor(N / 2) pairs in each of ceil(log2 N) rounds, between responses with equally many wins, or nearly so. If N
  is odd, the lowest response that has played in all rounds so far does not play.
"""

Pair = tuple[int, int]
_BYE = -1
"""The opponent of a response that does not play in a round."""


def draw_order(prompt: str, completions: Sequence[str]) -> list[int]:
    """Return the indices of the completions in random order, which depends on the texts, not on their order."""
    order = sorted(range(len(completions)), key=completions.__getitem__)
    texts = "\0".join([prompt, *(completions[i] for i in order)])
    random.Random(texts.encode("utf-8", "surrogatepass")).shuffle(order)
    return order


def pair_round(scheme: Scheme, order: Sequence[int], results: Mapping[Pair, float]) -> list[Pair]:
    """Return the pairs of the next round; none: the comparisons are over.

    Args:
        order: the draw, of two or more responses. If a pair of a knock-out ties, the first in the draw stays in.
        results: points of the first of each pair of the rounds before: 1 if it won, 0.5 for a tie, 0 if it lost.
    """
    match scheme:
        case "all_pairs":
            return [] if results else list(itertools.combinations(order, 2))
        case "knockout":
            return _pair_knockout(order, results)
        case "swiss":
            return _pair_swiss(order, results)


def _pair_knockout(order: Sequence[int], results: Mapping[Pair, float]) -> list[Pair]:
    losers = {b if points >= 0.5 else a for (a, b), points in results.items()}
    left = [response for response in order if response not in losers]
    if len(left) == 1:
        return []
    power_of_two = 1 << (len(left) - 1).bit_length()
    playing = left[power_of_two - len(left) :]
    return list(zip(playing[::2], playing[1::2], strict=True))


def _pair_swiss(order: Sequence[int], results: Mapping[Pair, float]) -> list[Pair]:
    num_rounds = len(results) // (len(order) // 2)
    if num_rounds == (len(order) - 1).bit_length():
        return []
    # A round without an opponent counts as a tie.
    lead = dict.fromkeys(order, 0.0)
    met: set[Pair] = set()
    for (a, b), points in results.items():
        lead[a] += points - 0.5
        lead[b] -= points - 0.5
        met |= {(a, b), (b, a)}
    ranking = sorted(order, key=lambda response: -lead[response])
    if len(order) % 2:
        ranking.append(_BYE)
        num_matches = Counter(response for response, _ in met)
        met |= {(response, _BYE) for response in order if num_matches[response] < num_rounds}
    pairs = _match_neighbours(ranking, met)
    assert pairs is not None, "with so few rounds there is always a pairing (Dirac's theorem)"
    return [pair for pair in pairs if _BYE not in pair]


def _match_neighbours(ranking: Sequence[int], met: Set[Pair]) -> list[Pair] | None:
    """Return the ranking in pairs that have not met, the highest with the nearest possible; None: there are none."""
    if not ranking:
        return []
    first = ranking[0]
    for opponent in ranking[1:]:
        if (first, opponent) not in met:
            others = [response for response in ranking[1:] if response != opponent]
            pairs = _match_neighbours(others, met)
            if pairs is not None:
                return [(first, opponent), *pairs]
    return None
