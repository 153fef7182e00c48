"""Reward functions with other parameters: lists, or those of verl and of TRL, called as these libraries call them."""

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from gcore_rollout.errors import NotApplicableError, RewardError
from gcore_rollout.rewards.batch import BatchReward
from gcore_rollout.rewards.reward import RewardFunction, Scored, column, name_of
from gcore_rollout.rewards.runner import is_async

FORMS = (
    "(prompt, completion, row)",
    "(prompts, completions, rows), which are lists",
    "verl's (data_source, solution_str, ground_truth, extra_info=None)",
    "TRL's (completions, prompts=None, **columns)",
)
"""Parameters of a reward function that are recognised, in words."""

CALL_PARAMETERS = {
    *("prompt", "completion", "row", "prompts", "completions", "rows", "completion_ids"),
    *("data_source", "solution_str", "ground_truth", "extra_info"),
    *("log_metric", "log_extra", "trainer_state", "environments"),
}
"""Names of parameters that calls have in one of the forms: no further arguments may have them."""

_BATCH = {"prompts", "completions", "rows"}
_VERL = {"solution_str", "ground_truth"}
_TRL = {"completions"}
_TRL_OWN = {"prompt", "prompts", "completion", "completions", "completion_ids"}
"""Names of columns that TRL does not pass on as they are."""


def with_known_parameters(function: Callable[..., Any], *, setting: str, prompt_key: str) -> RewardFunction:
    """Return a reward function as ``(prompt, completion, row)``, whose form is recognised by its parameters' names.

    verl's gets columns of the row: data_source, the ground_truth of reward_model, and extra_info. It returns a number,
    or a dict with a score, whose other numbers become parts. TRL's gets lists of one entry each: of the prompt, which
    is the column ``prompt_key``, of the completion, as a message where the prompt is messages, and of every other
    column that it has a parameter for; it returns a list of one number, or of None where it does not apply.

    One with the parameters ``(prompts, completions, rows)`` gets lists of many entries each; see `BatchReward`.

    Raises:
        RewardError: the parameters are of no known form; ``setting`` is the name of the setting, for errors.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A callable of an extension module, whose parameters cannot be read.
        return function
    names = set(signature.parameters)
    if names >= _BATCH:
        return BatchReward(function)
    if names >= _VERL:
        return _adapted(function, _verl_arguments(signature), _verl_result)
    if names >= _TRL:
        # Arguments that settings give it, rather than columns.
        fixed = function.keywords if isinstance(function, partial) else ()
        return _adapted(function, _trl_arguments(signature, setting, name_of(function), prompt_key, fixed), _trl_result)
    try:
        signature.bind("", "", {})
    except TypeError:
        found = f"{name_of(function)}{signature}"
        expected = f"the parameters {', '.join(FORMS[:-1])} or {FORMS[-1]}"
        raise RewardError(f"{setting} is {found}; expected {expected}") from None
    return function


_Arguments = Callable[[str, Mapping[str, Any], dict[str, float]], dict[str, Any]]
"""From a completion, its row and a dict for logged numbers to arguments by name."""
_Result = Callable[[Any, dict[str, float]], float | Scored]
"""From the function's result and its logged numbers to a reward's result."""


def _adapted(function: Callable[..., Any], arguments: _Arguments, result: _Result) -> RewardFunction:
    async def asynchronous(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        del prompt
        logged: dict[str, float] = {}
        return result(await function(**arguments(completion, row, logged)), logged)

    def synchronous(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        del prompt
        logged: dict[str, float] = {}
        return result(function(**arguments(completion, row, logged)), logged)

    reward = asynchronous if is_async(function) else synchronous
    reward.__name__ = name_of(function)
    return reward


def _accepts(signature: inspect.Signature, name: str) -> bool:
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return takes_any or name in signature.parameters


def _verl_arguments(signature: inspect.Signature) -> _Arguments:
    def arguments(completion: str, row: Mapping[str, Any], _: dict[str, float]) -> dict[str, Any]:
        extra_info = row.get("extra_info")
        given = {
            "data_source": row.get("data_source"),
            "solution_str": completion,
            "ground_truth": _ground_truth(row),
            "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
        }
        return {name: value for name, value in given.items() if _accepts(signature, name)}

    return arguments


def _ground_truth(row: Mapping[str, Any]) -> Any:
    own = row.get("reward_model")
    if isinstance(own, Mapping) and "ground_truth" in own:
        return own["ground_truth"]
    if "ground_truth" not in row:
        raise RewardError(f"the row has neither reward_model.ground_truth nor ground_truth: it has {sorted(row)}")
    return row["ground_truth"]


def _verl_result(value: Any, _: dict[str, float]) -> float | Scored:
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise RewardError(f"returned a dict with {sorted(value)}; expected a number, or a dict with 'score'")
    parts = {name: float(v) for name, v in value.items() if name != "score" and isinstance(v, numbers.Real)}
    return Scored(score=value["score"], parts=parts)


def _trl_arguments(
    signature: inspect.Signature, setting: str, name: str, prompt_key: str, fixed: Collection[str]
) -> _Arguments:
    for missing in ("trainer_state", "completion_ids", "environments"):
        parameter = signature.parameters.get(missing)
        if parameter is not None and parameter.default is parameter.empty:
            raise RewardError(f"{setting} is {name}{signature}; expected no {missing}, which gcore does not pass")

    def arguments(completion: str, row: Mapping[str, Any], logged: dict[str, float]) -> dict[str, Any]:
        prompt = column(row, prompt_key, "a reward of TRL's form")
        answer = completion if isinstance(prompt, str) else [{"role": "assistant", "content": completion}]
        given: dict[str, Any] = {n: [v] for n, v in row.items() if n not in _TRL_OWN and n != prompt_key}
        given |= {"prompts": [prompt], "completions": [answer]}
        given |= {"log_metric": logged.__setitem__, "log_extra": lambda *_: None}
        return {n: value for n, value in given.items() if _accepts(signature, n) and n not in fixed}

    return arguments


def _trl_result(value: Any, logged: dict[str, float]) -> Scored:
    scores = list(value)
    if len(scores) != 1:
        raise RewardError(f"returned {len(scores)} scores; expected one for each of 1 completions")
    if scores[0] is None:
        raise NotApplicableError("returned None: it does not apply to this prompt")
    return Scored(score=scores[0], parts=logged)
