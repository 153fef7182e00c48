"""Verdicts of language models: read, reduced, compared; from scripted answers and from a real engine."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest
from engine_oracles import TinyModel, make_engine
from scripted_judge import ScriptedEngine, compared, decode, model_of, pairwise, random_judge

from gcore_rollout import (
    JudgeReward,
    NoScoreError,
    PairwiseJudge,
    RewardConfigError,
    RewardError,
    RewardRunner,
    evaluate,
    make_score_parser,
    make_winner_parser,
)


def judge(*answers: str, template: str = "{prompt} {completion}", **options: Any) -> JudgeReward:
    """A judge that gives these answers as its samples."""
    model = model_of(ScriptedEngine(lambda _, index: answers[index]), n=len(answers))
    return JudgeReward(model=model, template=template, **options)


async def scored(reward: JudgeReward, completion: str = "c") -> Any:
    return await evaluate(reward, prompt="p", completion=completion, row={"gold": 4})


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 0.7),
        ("Score:10", 1.0),
        ("Score: 0.5 points", 0.05),
        ("First I thought Score: 2, now Score: 9.", 0.9),
        ("Score: 11", None),
        ("Score: -1", None),
        ("score 7", None),
        ("Score: seven", None),
        ("", None),
    ],
)
def test_score_pattern(text: str, score: float | None) -> None:
    assert make_score_parser()(text) == (None if score is None else pytest.approx(score))


def test_custom_score_pattern() -> None:
    assert make_score_parser(pattern=r"\[\[(\w+)\]\]", low=-1, high=1)("[[0]]") == 0.5
    assert make_score_parser(pattern=r"\[\[(\w+)\]\]", low=-1, high=1)("[[good]]") is None
    assert make_score_parser(pattern=r"a(b)?")("a") is None, "the group took no part"


@pytest.mark.parametrize("reduce", ["mean", "median", "majority"])
async def test_several_verdicts(reduce: Any) -> None:
    answers = [
        "Score: 2 a",
        "Score: 9 b",
        "Score: 5 c",
        "Score: 2 d",
        "well",
        "Score: 2",
        "Score: 9",
    ]
    reward = judge(*answers, reduce=reduce)
    result = await scored(reward)
    expected = {"mean": 29 / 60, "median": 0.35, "majority": 0.2}[reduce]
    assert result.score == pytest.approx(expected)
    assert result.parts == {"parsed": pytest.approx(6 / 7), "spread": pytest.approx(0.7)}
    assert (
        result.feedback
        == {"mean": "Score: 5 c", "median": "Score: 2 a", "majority": "Score: 2 a"}[reduce]
    )


async def test_a_tie_of_the_majority_goes_to_the_lowest() -> None:
    assert (
        await scored(judge("Score: 8", "Score: 3", "Score: 8", "Score: 3", reduce="majority"))
    ).score == 0.3


async def test_what_cannot_be_read() -> None:
    silent = judge("hm", "well")
    with pytest.raises(
        NoScoreError,
        match=r"reward 'JudgeReward' .* none of 2 verdicts could be parsed, the first is 'hm'",
    ):
        await scored(silent)
    outcome = await RewardRunner(silent).score(prompt="p", completion="c", row={})
    assert isinstance(outcome, RewardError)
    assert (await scored(judge("hm", "Score: 10", on_unparsable=0.0))).score == 0.5
    assert (await scored(judge("hm", on_unparsable=-1))).score == -1.0


async def test_the_question_and_a_custom_parser() -> None:
    engine = ScriptedEngine(lambda question, _: question)
    reward = JudgeReward(
        model=model_of(engine),
        template="{{Q}} {prompt} | {completion} | {gold}",
        parse=lambda text: float(text.endswith("{gold} | 4")),
    )
    result = await evaluate(
        reward, prompt="{p!r} {0}", completion="{gold}", row={"gold": 4, "prompt": "the row's"}
    )
    assert result.feedback == "{Q} {p!r} {0} | {gold} | 4", "braces in values mean nothing"
    assert result.score == 1.0
    assert await reward.ask(["{Q} a | b | 3"]) == [[(0.0, "{Q} a | b | 3")]]
    with pytest.raises(
        RewardError, match=r"the row has no 'gold' for the judge's template: it has \['answer'\]"
    ):
        await evaluate(reward, prompt="", completion="", row={"answer": 4})


async def test_calls_run_together_and_a_question_has_one_answer() -> None:
    """Each call is one stream of the engine's; what is drawn depends on the question and the seed alone."""
    engine = ScriptedEngine(lambda question, _: f"Score: {len(question) % 10}", delay_s=0.05)
    reward = JudgeReward(model=model_of(engine, n=2), template="{prompt} {completion}")
    runner = RewardRunner(reward)
    texts = ["a" * i for i in range(16)]
    results = await asyncio.gather(*(runner.score(prompt="p", completion=t, row={}) for t in texts))
    assert [r.score for r in results if not isinstance(r, RewardError)] == [
        ((2 + i) % 10) / 10 for i in range(16)
    ]
    assert (engine.calls, engine.most_running) == (16, 16)
    assert (
        len({r.request_id for r in engine.requests}) == len({r.seed for r in engine.requests}) == 16
    )
    first = engine.requests[3]
    await runner.score(prompt="p", completion="aaa", row={})
    assert engine.requests[-1].seed == first.seed
    assert engine.requests[-1].request_id != first.request_id
    other = JudgeReward(model=model_of(engine, seed=1), template="{prompt} {completion}")
    await evaluate(other, prompt="p", completion="aaa", row={})
    assert engine.requests[-1].seed != first.seed


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: judge("x", template="{prompt}"),
            r"template is '\{prompt\}'; expected \{completion\} in it",
        ),
        (lambda: judge("x", template="{completion"), "template is '{completion': "),
        (lambda: judge("x", template="{completion.__class__}"), "expected names alone"),
        (lambda: judge("x", template="{completion} {}"), r"the field \{\}; expected names alone"),
        (
            lambda: judge("x", reduce="max"),
            "reduce is 'max'; expected one of mean, median, majority",
        ),
        (
            lambda: judge("x", on_unparsable="skip"),
            "on_unparsable is 'skip'; expected 'drop' or a finite number",
        ),
        (
            lambda: judge("x", on_unparsable=math.nan),
            "on_unparsable is nan; expected 'drop' or a finite number",
        ),
        (lambda: judge(), "n is 0; expected at least 1"),
        (lambda: make_score_parser(pattern="("), r"pattern is '\(': "),
        (
            lambda: make_score_parser(pattern="x"),
            "pattern is 'x'; expected a group around the number",
        ),
        (
            lambda: make_score_parser(low=1, high=1),
            "low and high are 1 and 1; expected finite numbers, low below high",
        ),
        (
            lambda: pairwise(lambda *_: "", template="{completion_a}"),
            r"expected \{completion_b\} in it",
        ),
        (
            lambda: pairwise(lambda *_: "", on_unparsable=0.5),
            "on_unparsable is 0.5; expected one of drop, tie",
        ),
    ],
)
def test_bad_settings(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RewardConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("Winner: A", 1.0),
        ("winner: **b**", 0.0),
        ("Winner: [[A]]", 1.0),
        ("Winner: A? No. Winner: Tie.", 0.5),
        ("Winner: Anna", None),
        ("A wins", None),
        ("", None),
    ],
)
def test_winner_pattern(text: str, points: float | None) -> None:
    assert make_winner_parser()(text) == points


def test_another_pattern_of_winners() -> None:
    better = make_winner_parser(pattern=r"([ABC]) is better")
    assert [better(text) for text in ("A is better. b is better", "C is better", "Winner: A")] == [
        0.0,
        None,
        None,
    ]
    for pattern, message in {
        "(": "pattern is '\\('",
        "A": "expected a group around the winner",
    }.items():
        with pytest.raises(RewardConfigError, match=message):
            make_winner_parser(pattern=pattern)


async def test_wins_become_scores() -> None:
    reward = pairwise(
        lambda a, b: f"Winner: {'A' if len(a) > len(b) else 'B' if len(b) > len(a) else 'tie'}", n=3
    )
    results = await compared(reward, "a", "aaa", "aa", "aa")
    assert [r.score for r in results] == pytest.approx([0, 1, 0.5, 0.5])
    assert all(r.parts == {"parsed": 1.0, "consistent": 1.0} for r in results)
    engine: Any = reward.model.engine
    assert sum(request.n for request in engine.requests) == 4 * 3 * 3


async def test_a_liking_for_the_first_place_cancels_out() -> None:
    results = await compared(pairwise(lambda *_: "Winner: A"), "x", "y", "z")
    assert [r.score for r in results] == [0.5, 0.5, 0.5]
    assert [r.parts["consistent"] for r in results] == [0.0, 0.0, 0.0]


async def test_a_group_is_one_call_of_the_engine() -> None:
    engine = ScriptedEngine(lambda *_: "Winner: A")
    reward = PairwiseJudge(model=model_of(engine), template="{completion_a}|{completion_b}")
    await compared(reward, "x", "y", "z")
    assert engine.calls == 1
    asked = [decode(r.prompt_token_ids) for r in engine.requests]
    assert sorted(asked) == ["x|y", "x|z", "y|x", "y|z", "z|x", "z|y"]


async def test_comparisons_that_cannot_be_read() -> None:
    def say(a: str, b: str) -> str:
        return "hm" if "bad" in (a, b) else f"Winner: {'A' if a > b else 'B'}"

    results = await compared(pairwise(say, on_unparsable="tie"), "a", "b", "bad")
    assert [r.score for r in results] == [0.25, 0.75, 0.5]
    assert [r.parts for r in results] == [{"parsed": 0.5, "consistent": 1.0}] * 2 + [
        {"parsed": 0.0}
    ]
    runner = RewardRunner(pairwise(say))
    outcome = await runner.score_group(prompt="p", completions=["a", "b", "bad"], row={})
    assert isinstance(outcome, RewardError)
    assert "none of 4 verdicts on completion 2 could be parsed" in str(outcome)
    assert runner.stats().num_no_score == 1
    good = await compared(
        pairwise(lambda a, b: "hm" if a == "bad" else say(a, b.replace("bad", "c"))),
        "a",
        "b",
        "bad",
    )
    assert [r.score for r in good] == pytest.approx([0, 2 / 3, 1]), "the verdicts that are left"


async def test_one_completion_has_nothing_to_be_compared_with() -> None:
    with pytest.raises(NoScoreError, match="a group of 1 has nothing to compare"):
        await compared(pairwise(lambda *_: "Winner: A"), "x")


async def test_a_real_engine(tied: TinyModel) -> None:
    """A random model judges: its verdicts depend on the question alone, whatever runs alongside."""
    engine = make_engine("hf", tied, max_num_seqs=8)
    model = random_judge(engine, max_tokens=12, n=3)
    reward = JudgeReward(
        model=model,
        template="{completion}: good?",
        parse=lambda text: float(text.split()[0]),
        reduce="median",
    )
    alone = [await evaluate(reward, prompt="", completion=c, row={}) for c in ("a", "bb", "ccc")]
    runner = RewardRunner(reward)
    together = await asyncio.gather(
        *(runner.score(prompt="", completion=c, row={}) for c in ("ccc", "bb", "x", "a"))
    )
    assert [together[3], together[1], together[0]] == alone
    [verdicts] = await reward.ask(["a: good?"])
    assert len({text for _, text in verdicts}) > 1, "samples differ"
    assert alone[0].score == sorted(score for score, _ in verdicts if score is not None)[1]
    with pytest.raises(RewardError, match="RequestError"):
        await evaluate(reward, prompt="", completion="x" * 600, row={})
    outcome = await runner.score(prompt="", completion="a", row={})
    assert outcome == alone[0], "the engine continues"
    await engine.close()
