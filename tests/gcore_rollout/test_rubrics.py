"""Rubrics in rows: a verdict on each criterion, the weighted share of those that are met, and rows that are refused."""

import math
from typing import Any

import numpy as np
import pytest
from engine_oracles import TinyModel, make_engine
from scripted_judge import ScriptedEngine, decode, model_of, random_judge

from gcore_rollout import (
    JudgeReward,
    NoScoreError,
    RewardConfigError,
    RewardError,
    RewardRunner,
    evaluate,
)

RUBRIC: list[dict[str, Any]] = [
    {"title": "Dose", "description": "names the dose", "weight": 5},
    {"name": "tone", "description": "is polite", "weight": 3.0},
    {"name": "tone", "description": "is calm", "weight": 1},
    {"title": "Scare", "description": "frightens the patient", "weight": -2},
]
VERDICTS = {"dose": "8", "polite": "10", "calm": "5", "frightens": "10"}


def say(question: str, index: int) -> str:
    del index
    [score] = [score for word, score in VERDICTS.items() if word in question]
    return f"So. Score: {score}"


def judge(engine: Any, **options: Any) -> JudgeReward:
    return JudgeReward(model=model_of(engine), rubric_key="rubric", **options)


async def scored(reward: JudgeReward, rubric: Any = RUBRIC) -> Any:
    return await evaluate(reward, prompt="p", completion="c", row={"rubric": rubric})


async def test_criteria_are_judged_together_and_weighed() -> None:
    engine = ScriptedEngine(say)
    result = await scored(judge(engine))
    weights = np.array([5, 3, 1, -2])
    met = np.array([0.8, 1.0, 0.5, 1.0])
    assert result.score == pytest.approx(weights @ met / weights[weights > 0].sum())
    expected = {"criterion/1": 0.8, "criterion/tone": 0.75, "criterion/4": 1.0, "parsed": 1.0}
    assert result.parts == pytest.approx(expected)
    assert result.feedback.startswith("names the dose\nSo. Score: 8\n\nis polite\n")
    assert engine.calls == 1
    questions = [decode(request.prompt_token_ids) for request in engine.requests]
    assert len(questions) == 4
    for criterion, question in zip(RUBRIC, questions, strict=True):
        assert f"Request:\np\n\nAnswer:\nc\n\nCriterion:\n{criterion['description']}\n" in question


async def test_the_best_and_the_worst_scores() -> None:
    """Without faults as in "Rubrics as Rewards"; of faults alone, 0 is the best score."""
    rewarded = RUBRIC[:3]
    assert (await scored(judge(ScriptedEngine(lambda *_: "Score: 10")), rewarded)).score == 1.0
    assert (await scored(judge(ScriptedEngine(lambda *_: "Score: 0")), rewarded)).score == 0.0
    assert (await scored(judge(ScriptedEngine(lambda *_: "Score: 10")), RUBRIC[3:])).score == -1.0
    assert (await scored(judge(ScriptedEngine(lambda *_: "Score: 0")), RUBRIC[3:])).score == 0.0


async def test_a_criterion_without_a_verdict() -> None:
    def silent(question: str, index: int) -> str:
        return "hm" if "polite" in question else say(question, index)

    with pytest.raises(NoScoreError, match="criterion 2: none of 1 verdicts could be parsed"):
        await scored(judge(ScriptedEngine(silent)))
    result = await scored(judge(ScriptedEngine(silent), on_unparsable=0.0))
    assert result.parts["parsed"] == 0.75
    assert result.score == pytest.approx((5 * 0.8 + 1 * 0.5 - 2) / 9)


@pytest.mark.parametrize(
    ("rubric", "message"),
    [
        ("be polite", "the row's 'rubric' is 'be polite'; expected a list of one or more {'desc"),
        ([], "the row's 'rubric' is []; expected a list of one or more {'description': text"),
        (None, "the row's 'rubric' is None; expected a list"),
        (["be polite"], "criterion 1 of the row's 'rubric' is 'be polite'; expected description"),
        (
            [*RUBRIC, {"title": "Dose", "weight": 1}],
            "description of criterion 5 of the row's 'rubric' is None; expected a text",
        ),
        (
            [{"description": " ", "weight": 1}],
            "description of criterion 1 of the row's 'rubric' is ' '; expected a text",
        ),
        (
            [{"description": "is calm", "weight": "high"}],
            "weight of criterion 1 of the row's 'rubric' is 'high'; expected one number",
        ),
        (
            [{"description": "is calm"}],
            "weight of criterion 1 of the row's 'rubric' is None; expected one number",
        ),
        (
            [{"description": "is calm", "weight": math.nan}],
            "weight of criterion 1 of the row's 'rubric' is nan; expected a finite number",
        ),
        (
            [{"description": "is calm", "weight": 0}],
            "'weight': 0}]; expected a weight that is not 0",
        ),
    ],
)
async def test_bad_rubrics(rubric: Any, message: str) -> None:
    reward = judge(ScriptedEngine(say))
    with pytest.raises(RewardError) as refused:
        RewardRunner(reward).check_row({"rubric": rubric})
    assert message in str(refused.value)
    with pytest.raises(RewardError) as failed:
        await scored(reward, rubric)
    assert message in str(failed.value)


def test_rows_without_a_rubric_and_templates_without_a_criterion() -> None:
    reward = judge(ScriptedEngine(say))
    reward.check_row({"rubric": RUBRIC})
    with pytest.raises(
        RewardError, match=r"the row has no 'rubric' for the criteria .* \['answer'\]"
    ):
        reward.check_row({"answer": "4"})
    JudgeReward(model=reward.model).check_row({"answer": "4"})
    with pytest.raises(RewardConfigError, match=r"expected \{criterion\} in it"):
        judge(ScriptedEngine(say), template="{completion}")


async def test_a_real_engine(tied: TinyModel) -> None:
    """Each criterion gets the verdict that its question gets alone."""
    engine = make_engine("hf", tied, max_num_seqs=8)
    model = random_judge(engine, max_tokens=8, n=2)
    options: dict[str, Any] = {"model": model, "parse": lambda text: float(text.split()[0]) / 96}
    template = "{completion}: {criterion}?"
    result = await scored(JudgeReward(rubric_key="rubric", template=template, **options))
    total = 0.0
    for criterion in RUBRIC:
        alone = JudgeReward(template="{completion}: {text}?", **options)
        row = {"text": criterion["description"]}
        total += (
            criterion["weight"] * (await evaluate(alone, prompt="", completion="c", row=row)).score
        )
    assert result.score == pytest.approx(total / 9)
    await engine.close()
