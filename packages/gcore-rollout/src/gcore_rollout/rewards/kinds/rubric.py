"""Rubrics in the rows of a data set: criteria with weights, and the score of a completion that meets some of them."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import RewardError, require
from gcore_rollout.rewards.reward import Scored, column
from gcore_rollout.rewards.runner import check_number

CRITERION_QUESTION = """Here are a request, an answer to it, and a criterion.

Request:
{prompt}

Answer:
{completion}

Criterion:
{criterion}

Does the answer meet the criterion? Think about it briefly, then end with "Score: N", where N is 10 if it does, 0 if it
does not, and a whole number between them if it does in part.
"""


def read_rubric(row: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """Return the criteria in a column of a row; `RewardError` if it has no rubric, or a wrong one."""
    rubric = column(row, name, "the criteria of its rubric")
    field = f"the row's {name!r}"
    is_list = isinstance(rubric, list | tuple) and bool(rubric)
    accepted = "a list of one or more {'description': text, 'weight': number}"
    require(field, rubric, is_list, accepted, RewardError)
    weights: list[float] = []
    for number, criterion in enumerate(rubric, 1):
        where = f"criterion {number} of {field}"
        is_criterion = isinstance(criterion, Mapping)
        require(where, criterion, is_criterion, "description and weight", RewardError)
        description = criterion.get("description")
        is_text = isinstance(description, str) and bool(description.strip())
        require(f"description of {where}", description, is_text, "a text", RewardError)
        weights.append(check_number(f"weight of {where} is", criterion.get("weight")))
    require(field, rubric, any(weights), "a weight that is not 0", RewardError)
    return rubric


def score_rubric(rubric: Sequence[Mapping[str, Any]], scores: Sequence[Scored]) -> Scored:
    """Return the weighted share of the criteria that a completion meets.

    With weight w_j of criterion j, and c_j in [0, 1] for how far it is met, the score is sum_j w_j c_j / sum_j w_j
    ("Rubrics as Rewards", arXiv 2507.17746, explicit aggregation). Faults are criteria with weights below 0, which the
    divisor leaves out, as in HealthBench (arXiv 2505.08775): a completion that meets all others and has no fault scores
    1, and one with faults may score below 0. Of faults alone the divisor is the sum of their weights without the sign.
    """
    weights = [float(criterion["weight"]) for criterion in rubric]
    total = 0.0
    shares = defaultdict[str, list[float]](list)
    feedback: list[str] = []
    for number, criterion in enumerate(rubric):
        scored = scores[number]
        total += weights[number] * scored.score
        shares[str(criterion.get("name") or number + 1)].append(scored.score)
        feedback.append(f"{criterion['description']}\n{scored.feedback}")
    parts = {f"criterion/{name}": statistics.fmean(met) for name, met in shares.items()}
    parts["parsed"] = statistics.fmean(scored.parts["parsed"] for scored in scores)
    best = sum(max(weight, 0.0) for weight in weights) or -sum(weights)
    return Scored(score=total / best, parts=parts, feedback="\n\n".join(feedback))
