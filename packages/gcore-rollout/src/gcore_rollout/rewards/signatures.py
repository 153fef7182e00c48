"""Reward functions with other parameters: lists, or those of verl and of TRL, called as these libraries call them."""

import inspect
import numbers
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gcore_rollout.errors import NotApplicableError, RewardError
from gcore_rollout.rewards.batch import BatchReward
from gcore_rollout.rewards.reward import RewardFunction, Scored, column, name_of
from gcore_rollout.rewards.runner import is_async

_FORMS = (
    "(prompt, completion, row), (prompts, completions, rows), which are lists, verl's (data_source, solution_str, "
    "ground_truth, extra_info=None) or TRL's (completions, prompts=None, **columns)"
)
"""Parameters of a reward function that are recognised, in words."""

_BATCH = {"prompts", "completions", "rows"}
_VERL = {"solution_str", "ground_truth"}
_TRL = {"completions"}
_TRL_RESERVED = {"prompt", "prompts", "completion", "completions", "completion_ids"}
"""Names of columns that TRL does not pass on as they are."""
_TRL_UNSUPPORTED = ("trainer_state", "completion_ids", "environments")
"""Parameters of TRL's form that gcore has no values for."""

CALL_PARAMETERS = (
    _BATCH | _VERL | _TRL_RESERVED | {"row", "data_source", "extra_info", "log_metric", "log_extra"}
)
CALL_PARAMETERS.update(_TRL_UNSUPPORTED)
"""Names of parameters that calls have in one of the forms: no further arguments may have them."""


def with_known_parameters(
    function: Callable[..., Any], *, setting: str, prompt_key: str
) -> RewardFunction:
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
        return _adapt(function, signature, _verl_arguments, _verl_result)
    if names >= _TRL:
        return _adapt(
            function,
            signature,
            _trl_arguments(function, signature, setting, prompt_key),
            _trl_result,
        )
    try:
        signature.bind("", "", {})
    except TypeError:
        raise RewardError(
            f"{setting} is {name_of(function)}{signature}; expected the parameters {_FORMS}"
        ) from None
    return function


_Arguments = Callable[[str, Mapping[str, Any], dict[str, float]], dict[str, Any]]
"""From a completion, its row and a dict for logged numbers to arguments by name."""
_Result = Callable[[Any, dict[str, float]], float | Scored]
"""From the function's result and its logged numbers to a reward's result."""


def _adapt(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: _Arguments,
    result: _Result,
) -> RewardFunction:
    """Return a function as ``(prompt, completion, row)``, by functions for its arguments and its result."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    def select(completion: str, row: Mapping[str, Any], logged: dict[str, float]) -> dict[str, Any]:
        """Return the arguments that the function has a parameter for."""
        by_name = arguments(completion, row, logged)
        return {
            name: value
            for name, value in by_name.items()
            if takes_any or name in signature.parameters
        }

    async def asynchronous(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        del prompt
        logged: dict[str, float] = {}
        return result(await function(**select(completion, row, logged)), logged)

    def synchronous(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        del prompt
        logged: dict[str, float] = {}
        return result(function(**select(completion, row, logged)), logged)

    reward = asynchronous if is_async(function) else synchronous
    reward.__name__ = name_of(function)
    return reward


def _verl_arguments(completion: str, row: Mapping[str, Any], _: dict[str, float]) -> dict[str, Any]:
    extra_info = row.get("extra_info")
    return {
        "data_source": row.get("data_source"),
        "solution_str": completion,
        "ground_truth": _ground_truth(row),
        "extra_info": dict(extra_info) if isinstance(extra_info, Mapping) else {},
    }


def _ground_truth(row: Mapping[str, Any]) -> Any:
    reward_model = row.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return reward_model["ground_truth"]
    if "ground_truth" not in row:
        raise RewardError(
            f"the row has neither reward_model.ground_truth nor ground_truth: it has {sorted(row)}"
        )
    return row["ground_truth"]


def _verl_result(value: Any, _: dict[str, float]) -> float | Scored:
    if not isinstance(value, Mapping):
        return value
    if "score" not in value:
        raise RewardError(
            f"returned a dict with {sorted(value)}; expected a number, or a dict with 'score'"
        )
    parts = {
        name: float(v)
        for name, v in value.items()
        if name != "score" and isinstance(v, numbers.Real)
    }
    return Scored(score=value["score"], parts=parts)


def _trl_arguments(
    function: Callable[..., Any], signature: inspect.Signature, setting: str, prompt_key: str
) -> _Arguments:
    for name in _TRL_UNSUPPORTED:
        parameter = signature.parameters.get(name)
        if parameter is not None and parameter.default is parameter.empty:
            value = f"{name_of(function)}{signature}"
            raise RewardError(
                f"{setting} is {value}; expected no {name}, which gcore does not pass"
            )
    skipped = _TRL_RESERVED | {prompt_key}
    # Arguments that settings give it, rather than columns.
    fixed = function.keywords if isinstance(function, partial) else {}

    def arguments(
        completion: str, row: Mapping[str, Any], logged: dict[str, float]
    ) -> dict[str, Any]:
        prompt = column(row, prompt_key, "a reward of TRL's form")
        answer = (
            completion
            if isinstance(prompt, str)
            else [{"role": "assistant", "content": completion}]
        )
        by_name: dict[str, Any] = {
            name: [value] for name, value in row.items() if name not in skipped
        }
        by_name["prompts"] = [prompt]
        by_name["completions"] = [answer]
        by_name["log_metric"] = logged.__setitem__
        by_name["log_extra"] = lambda *_: None
        for name in fixed:
            by_name.pop(name, None)
        return by_name

    return arguments


def _trl_result(value: Any, logged: dict[str, float]) -> Scored:
    scores = list(value)
    if len(scores) != 1:
        raise RewardError(f"returned {len(scores)} scores; expected one for each of 1 completions")
    if scores[0] is None:
        raise NotApplicableError("returned None: it does not apply to this prompt")
    return Scored(score=scores[0], parts=logged)
