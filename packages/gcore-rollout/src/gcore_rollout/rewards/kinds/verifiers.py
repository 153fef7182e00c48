"""Rewards of answers that a program verifies: by reasoning-gym, by math-verify, or by the row's tests in a sandbox."""

import asyncio
import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from gcore_rollout.errors import RewardError, make_extra_error
from gcore_rollout.rewards.reward import Scored, column, gold_answer

if TYPE_CHECKING:
    from gcore_rollout.sandbox.sandbox import Sandbox, SandboxResult

_BLOCK = re.compile(
    r"^[ ]{0,3}```[ ]*(\w*)[^\n]*\n(.*?)^[ ]{0,3}```[ ]*$", re.DOTALL | re.MULTILINE
)
_READS_A_NUMBER = frozenset({"chain_sum", "products"})
"""Tasks of reasoning-gym whose verifier compares decimal numbers."""
_NAN = re.compile(r"\bnan\b", re.IGNORECASE)
_NO_ANSWER = "?"
_PYTHON = {"", "py", "python", "python3"}


def import_reasoning_gym() -> Any:
    """Import reasoning_gym; raise `RolloutError` if it is not installed."""
    try:
        with warnings.catch_warnings():
            # A package it imports has two literals compared with `is`; Python says so whenever it compiles them.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise make_extra_error("reasoning_gym", "reasoning-gym") from error
    return reasoning_gym


class ReasoningGymReward:
    """1 if the task's verifier gives full marks, else 0.

    Partial marks are not used: the library's default gives some to any answer that contains the right one, and a
    policy soon learns to write long answers. The answer is what follows the last ``answer_after``; empty: it is the
    whole completion. An answer that the verifier cannot read is wrong. Some verifiers compute what an answer says,
    which may take for ever: see `build_task_reward`. With ``names_task`` the score is also the part of the task's name,
    as of the tasks in a ``composite``.

    Example:
        >>> entry = import_reasoning_gym().create_dataset("chain_sum", size=1, seed=0)[0]
        >>> reward = ReasoningGymReward(answer_after="Answer:")
        >>> reward(entry["question"], f"Let me see. Answer: {entry['answer']}", {"entry": entry}).score
        1.0
        >>> reward(entry["question"], "Answer: none", {"entry": entry}).score
        0.0
    """

    def __init__(self, *, answer_after: str = "", names_task: bool = False) -> None:
        self._answer_after = answer_after
        self._names_task = names_task
        self._gym = import_reasoning_gym()
        self._verifiers: dict[str, Callable[[str, Mapping[str, Any]], float]] = {}

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion of a row whose ``entry`` is the task's own, as reasoning_gym made it."""
        del prompt
        try:
            entry: Mapping[str, Any] = row["entry"]
            name: str = entry["metadata"]["source_dataset"]
        except KeyError as error:
            raise RewardError(
                f"the row has no {error}; expected reasoning-gym's own entry under 'entry'"
            ) from None
        answer = completion
        if self._answer_after:
            answer = completion.rpartition(self._answer_after)[2]
        answer = answer.strip()
        score = float(self._is_right(name, answer, entry))
        parts = {name: score} if self._names_task else {}
        return Scored(score=score, parts=parts, answer=answer)

    def computes(self, task: str) -> bool:
        """Return whether a task's verifier does more than compare texts or numbers, so that it may run for long."""
        if task in _READS_A_NUMBER:
            return False
        dataset = self._gym.factory.DATASETS[task][0]
        return dataset.score_answer is not self._gym.dataset.ProceduralDataset.score_answer

    def _is_right(self, task: str, answer: str, entry: Mapping[str, Any]) -> bool:
        if task not in self._verifiers:
            self._verifiers[task] = self._gym.get_score_answer_fn(task)
        verify = self._verifiers[task]
        gold = entry["answer"]
        try:
            is_right = verify(answer, entry) >= 1.0
        except Exception:
            # An answer that cannot be read is wrong, unless the verifier fails at the right one, too.
            verify(gold, entry)
            return False
        if not is_right or answer == gold:
            return is_right
        # A verifier that takes any text for "False" or NaN for equal gives full marks for these, too.
        return not _NAN.search(answer) and not verify(_NO_ANSWER, entry) >= 1.0


class MathVerifyReward:
    """1 if math-verify finds the completion's answer equal to the one in the row's column ``answer_key``, else 0.

    Some texts, such as a tower of powers, keep it busy for ever: `ProcessReward` limits its time and memory.

    Example:
        >>> reward = MathVerifyReward()
        >>> reward("", "So x is $1/2$", {"answer": "0.5"})
        Scored(score=1.0, parts={}, feedback='', answer='1/2')
        >>> reward("", "So x is $2$", {"answer": "0.5"}).score
        0.0
    """

    def __init__(self, *, answer_key: str = "answer") -> None:
        try:
            import math_verify
        except ImportError as error:
            raise make_extra_error("math_verify", "math-verify") from error
        # It warns at every call that its time-out is off.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._library = math_verify
        self._answer_key = answer_key

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        del prompt
        # Its own time-outs use SIGALRM, which works in the main thread alone and would break the event loop's timers.
        gold = self._library.parse(f"${self._gold(row)}$", parsing_timeout=0)
        answers = self._library.parse(completion, parsing_timeout=0)
        score = float(self._library.verify(gold, answers, timeout_seconds=0))
        if not answers:
            return Scored(score=score)
        return Scored(score=score, answer=str(answers[0]))

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raise `RewardError` if a row has no answer to compare with."""
        self._gold(row)

    def _gold(self, row: Mapping[str, Any]) -> str:
        return gold_answer(row, self._answer_key, "math-verify to compare with")


def last_code_block(completion: str) -> str | None:
    """Return the last closed fenced block that is marked as Python, or not marked; None: there is none."""
    last: str | None = None
    for language, code in _BLOCK.findall(completion):
        if language.lower() in _PYTHON:
            last = code
    return last


@dataclass(eq=False)
class CodeReward:
    """1 if the program in the completion passes the row's tests, else 0.

    The program is the last fenced block (see `last_code_block`); without one the score is 0. The row's tests are

    - a string, or several, of Python statements that raise if the program is wrong, such as ``assert f(1) == 2``; they
      see its variables. A program can be written to pass any of these (see `Sandbox.run`);
    - or several ``{"input": str, "output": str}``: the program is run with each input, and must print the output and
      exit with status 0. White space at the ends of lines and of the text is not compared. The outputs stay outside
      the sandbox, so nothing passes but printing them.

    A row without the column may be one of HumanEval, with ``test``, ``entry_point`` and ``prompt``, the start of the
    program, or one of MBPP, with ``test_list`` and ``test_imports`` or ``test_setup_code``. For HumanEval the block is
    the function, without the imports of the prompt, or what follows the prompt.

    Parts: ``passed``, the fraction of tests that passed (of the tests run, where the first failure ends it),
    ``has_code`` and ``timed_out``.

    Example:
        >>> reward = CodeReward(Sandbox(isolation="limits"), partial=True)
        >>> completion = '''Here it is:
        ... ```python
        ... def double(x):
        ...     return 2 * x
        ... ```'''
        >>> row = {"tests": ["assert double(2) == 4", "assert double('a') == 'b'"]}
        >>> asyncio.run(reward("Write double(x).", completion, row))
        Scored(score=0.5, parts={'passed': 0.5, 'has_code': 1.0, 'timed_out': 0.0}, feedback='', answer=None)
    """

    sandbox: "Sandbox"
    """Its limits hold for each run."""
    _: KW_ONLY
    tests_key: str = "tests"
    """The row's column."""
    partial: bool = False
    """Score the fraction of tests that passed; all of them are run then."""

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion; `RewardError` if the row has no such tests, `RolloutError` if a run does not start."""
        del prompt
        tests = self._tests(row)
        program = last_code_block(completion)
        if program is None:
            return Scored(score=0.0, parts={"passed": 0.0, "has_code": 0.0, "timed_out": 0.0})
        program = _add_start(program, row)
        if isinstance(tests[0], str):
            result = await self.sandbox.run(program, tests=tests)
            passed = list(result.passed)
            timed_out = result.outcome == "timed_out"
        else:
            passed = []
            timed_out = False
            for is_right, result in await self._run_cases(program, tests):
                passed.append(is_right)
                timed_out = timed_out or result.outcome == "timed_out"
        fraction = sum(passed) / len(passed)
        return Scored(
            score=fraction if self.partial else float(all(passed)),
            parts={"passed": fraction, "has_code": 1.0, "timed_out": float(timed_out)},
        )

    async def _run_cases(
        self, program: str, cases: Sequence[Mapping[str, str]]
    ) -> Sequence[tuple[bool, "SandboxResult"]]:
        """Return for each case whether the output is right, with the result, up to the first that is wrong."""

        async def run(case: Mapping[str, str]) -> tuple[bool, "SandboxResult"]:
            result = await self.sandbox.run(program, stdin=case["input"])
            return result.outcome == "finished" and _lines(result.stdout) == _lines(
                case["output"]
            ), result

        if self.partial:
            return await asyncio.gather(*map(run, cases))
        results: list[tuple[bool, SandboxResult]] = []
        for case in cases:
            results.append(await run(case))
            if not results[-1][0]:
                break
        return results

    def _tests(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the row's tests, of one kind and at least one."""
        if self.tests_key not in row:
            published = _published_tests(row)
            if published:
                return published
        value = column(row, self.tests_key, "its program to pass")
        if isinstance(value, str):
            return [value]
        if isinstance(value, Sequence) and value:
            tests: list[Any] = list(value)
            if all(isinstance(test, str) for test in tests) or all(map(_is_case, tests)):
                return tests
        raise RewardError(
            f"the row's {self.tests_key!r} is {value!r:.200}; expected Python statements (a string or several), "
            'or one or more {"input": str, "output": str}'
        )


def _published_tests(row: Mapping[str, Any]) -> list[Any]:
    """Return the tests of a row in the format of HumanEval or MBPP; none: it is in another one."""
    if isinstance(row.get("test"), str) and isinstance(row.get("entry_point"), str):
        return [f"{row['test']}\n\ncheck({row['entry_point']})"]
    setup = row.get("test_imports", row.get("test_setup_code")) or ""
    if not isinstance(setup, str):
        setup = "\n".join(setup)
    return [f"{setup}\n{test}".lstrip() for test in row.get("test_list") or []]


def _add_start(program: str, row: Mapping[str, Any]) -> str:
    """Return a program with what HumanEval's prompt has before the function, or with all of it before its rest."""
    name = row.get("entry_point")
    start = row.get("prompt")
    if not isinstance(name, str) or not isinstance(start, str):
        return program
    head = re.compile(rf"^(async )?def {re.escape(name)}\b", re.MULTILINE)
    if not head.search(program):
        return f"{start}{program}"
    match = head.search(start)
    if match is None:
        return program
    return f"{start[: match.start()]}{program}"


def _is_case(test: Any) -> bool:
    return isinstance(test, Mapping) and all(
        isinstance(test.get(key), str) for key in ("input", "output")
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
