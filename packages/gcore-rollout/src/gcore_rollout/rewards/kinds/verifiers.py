"""Rewards of answers that a program verifies: by reasoning-gym, by math-verify, or by the row's tests in a sandbox."""

import asyncio
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from gcore_rollout.errors import MissingExtraError, RewardError
from gcore_rollout.rewards.reward import Scored

if TYPE_CHECKING:
    from gcore_rollout.sandbox.sandbox import Sandbox, SandboxResult

_BLOCK = re.compile(r"^[ ]{0,3}```[ ]*(\w*)[^\n]*\n(.*?)^[ ]{0,3}```[ ]*$", re.DOTALL | re.MULTILINE)
_PYTHON = {"", "py", "python", "python3"}


def import_reasoning_gym() -> Any:
    """Import reasoning_gym; raise `MissingExtraError` if it is not installed."""
    try:
        with warnings.catch_warnings():
            # A package it imports has two literals compared with `is`; Python says so whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise MissingExtraError("reasoning_gym", "reasoning-gym") from error
    return reasoning_gym


class ReasoningGymReward:
    """1 if the task's verifier gives full marks, else 0.

    Partial marks are not used: the library's default gives some to any answer that contains the right one, and a
    policy soon learns to write long answers.

    Args:
        answer_after: the answer is what follows the last occurrence of this string; empty: the whole completion.
    """

    def __init__(self, *, answer_after: str = "") -> None:
        self._answer_after = answer_after
        self._gym = import_reasoning_gym()
        self._verifiers: dict[str, Callable[[str, Mapping[str, Any]], float]] = {}

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Score one completion of a row whose ``entry`` is the task's own, as reasoning_gym made it."""
        del prompt
        try:
            entry: Mapping[str, Any] = row["entry"]
            name: str = entry["metadata"]["source_dataset"]
        except KeyError as error:
            raise RewardError(f"the row has no {error}; expected reasoning-gym's own entry under 'entry'") from None
        if name not in self._verifiers:
            self._verifiers[name] = self._gym.get_score_answer_fn(name)
        answer = completion.rpartition(self._answer_after)[2] if self._answer_after else completion
        return float(self._verifiers[name](answer.strip(), entry) >= 1.0)


class MathVerifyReward:
    """1 if math-verify finds the completion's answer equal to the one in the row's column ``answer_key``, else 0."""

    def __init__(self, *, answer_key: str = "answer") -> None:
        try:
            import math_verify
        except ImportError as error:
            raise MissingExtraError("math_verify", "math-verify") from error
        # It warns at every call that its time-out is off.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._library = math_verify
        self._answer_key = answer_key

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt
        if self._answer_key not in row:
            raise RewardError(
                f"the row has no {self._answer_key!r} for math-verify to compare with: it has {sorted(row)}"
            )
        # Its own time-outs use SIGALRM, which works in the main thread alone and would break the event loop's timers.
        gold = self._library.parse(f"${row[self._answer_key]}$", parsing_timeout=0)
        answer = self._library.parse(completion, parsing_timeout=0)
        return float(self._library.verify(gold, answer, timeout_seconds=0))


def last_code_block(completion: str) -> str | None:
    """Return the last closed fenced block that is marked as Python, or not marked; None: there is none."""
    blocks = [code for language, code in _BLOCK.findall(completion) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


class CodeReward:
    """1 if the program in the completion passes the row's tests, else 0.

    The program is the last fenced block (see `last_code_block`); without one the score is 0. The row's tests are

    - a string, or several, of Python statements that raise if the program is wrong, such as ``assert f(1) == 2``; they
      see its variables. A program can be written to pass any of these (see `Sandbox.run`);
    - or several ``{"input": str, "output": str}``: the program is run with each input, and must print the output and
      exit with status 0. White space at the ends of lines and of the text is not compared. The outputs stay outside
      the sandbox, so nothing passes but printing them.

    Parts: ``passed``, the fraction of tests that passed (of the tests run, where the first failure ends it),
    ``has_code`` and ``timed_out``.

    Args:
        sandbox: its limits hold for each run.
        tests_key: the row's column.
        partial: score the fraction of tests that passed; all of them are run then.
    """

    def __init__(self, sandbox: "Sandbox", *, tests_key: str = "tests", partial: bool = False) -> None:
        self._sandbox = sandbox
        self._tests_key = tests_key
        self._partial = partial

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion; `RewardError` if the row has no such tests, `SandboxError` if a run does not start."""
        del prompt
        tests = self._tests(row)
        program = last_code_block(completion)
        if program is None:
            return Scored(score=0.0, parts={"passed": 0.0, "has_code": 0.0, "timed_out": 0.0})
        if isinstance(tests[0], str):
            result = await self._sandbox.run(program, tests=cast(list[str], tests))
            passed, results = list(result.passed), [result]
        else:
            passed, results = await self._run_cases(program, cast(list[Mapping[str, str]], tests))
        fraction = sum(passed) / len(passed)
        timed_out = float(any(result.outcome == "timed_out" for result in results))
        return Scored(
            score=fraction if self._partial else float(all(passed)),
            parts={"passed": fraction, "has_code": 1.0, "timed_out": timed_out},
        )

    async def _run_cases(
        self, program: str, cases: Sequence[Mapping[str, str]]
    ) -> tuple[list[bool], list["SandboxResult"]]:
        if self._partial:
            results = list(await asyncio.gather(*(self._sandbox.run(program, stdin=c["input"]) for c in cases)))
            return [_is_right(r, c["output"]) for r, c in zip(results, cases, strict=True)], results
        results: list[SandboxResult] = []
        for case in cases:
            results.append(await self._sandbox.run(program, stdin=case["input"]))
            if not _is_right(results[-1], case["output"]):
                return [*[True] * (len(results) - 1), False], results
        return [True] * len(results), results

    def _tests(self, row: Mapping[str, Any]) -> list[str] | list[Mapping[str, str]]:
        """Return the row's tests, of one kind and at least one."""
        if self._tests_key not in row:
            raise RewardError(f"the row has no {self._tests_key!r} for its program to pass: it has {sorted(row)}")
        value = row[self._tests_key]
        tests: list[Any] = [value] if isinstance(value, str) else list(value) if isinstance(value, Sequence) else []
        if tests and (all(isinstance(test, str) for test in tests) or all(_is_case(test) for test in tests)):
            return tests
        raise RewardError(
            f"the row's {self._tests_key!r} is {value!r:.200}; expected Python statements (a string or several), "
            'or one or more {"input": str, "output": str}'
        )


def _is_case(test: Any) -> bool:
    return isinstance(test, Mapping) and all(isinstance(test.get(key), str) for key in ("input", "output"))


def _is_right(result: "SandboxResult", output: str) -> bool:
    return result.outcome == "finished" and _lines(result.stdout) == _lines(output)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
