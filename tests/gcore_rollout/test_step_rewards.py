"""Scores of steps: a token classifier's against transformers' own forward, a judge's, and the tokens of steps."""

import asyncio
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from test_sequence_classifier import SIZES, encode, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForTokenClassification,
)

from gcore_rollout import (
    Completion,
    CompositeReward,
    EngineModelError,
    JudgeReward,
    NoScoreError,
    RewardConfigError,
    Scored,
    evaluate,
)
from gcore_rollout.rewards.kinds.sequence_classifier import SequenceClassifierReward
from gcore_rollout.rewards.steps import credit_steps, score_steps, split_steps

ANSWERS = ["2 and 2\n\nis 4\n\nso 4", "4", "", "\n\n\n\nno\n\n \n\nyes\n\n", "a\nb\n\nc"]


def model_of(kind: str = "qwen3", **fields: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_labels": 2} | fields
    if kind == "bert":
        return BertForTokenClassification(BertConfig(**sizes)).eval()
    config = Qwen3Config(num_key_value_heads=2, head_dim=8, **sizes)
    return Qwen3ForTokenClassification(config).eval()


@given(st.text(alphabet="ab \n", max_size=30))
def test_steps_are_paragraphs(text: str) -> None:
    steps = split_steps(text, "\n\n")
    assert "".join(steps) == text
    assert all(step.strip() for step in steps) or len(steps) == 1
    assert [step.strip("\n ") for step in steps if step.strip()] == [
        part for part in (part.strip("\n ") for part in text.split("\n\n")) if part
    ]
    assert all("\n\n" not in step.strip() for step in steps)


def test_separators_are_texts() -> None:
    assert split_steps("1. go (left) 2. stop", "(left)") == ["1. go (left) ", "2. stop"]


def test_reductions() -> None:
    scores = {name: score_steps(["a", "bc"], [0.5, 0.25], name) for name in ("min", "product")}
    assert [scored.score for scored in scores.values()] == [0.25, 0.125]
    assert score_steps(["a", "bc"], [0.25, 0.5], "last").score == 0.5
    assert score_steps(["a", "bc"], [0.25, 0.5], "mean").score == 0.375
    assert scores["min"].steps == {1: 0.5, 3: 0.25}
    assert scores["min"].parts == {"steps": 2.0}


@pytest.mark.parametrize("kind", ["qwen3", "bert"])
@pytest.mark.parametrize("step_end", ["", "<+>"])
async def test_scores_are_those_of_transformers(kind: str, step_end: str) -> None:
    """The probability of label 1 at the last token after each step, in one batch as in a forward of each text alone."""
    model = model_of(kind)
    reward = SequenceClassifierReward(
        model, encode=encode, step_end=step_end, step_reduction="product"
    )
    results = await asyncio.gather(
        *(evaluate(reward, prompt="say: ", completion=text, row={}) for text in ANSWERS)
    )
    assert reward.num_batches == 1
    for text, scored in zip(ANSWERS, results, strict=True):
        steps = [step.strip() for step in text.split("\n\n") if step.strip()] or [""]
        written = "say: "
        places: list[int] = []
        for step in steps:
            written += step + (step_end or "\n\n")
            places.append(len(written) - 1)
        logits = model(torch.tensor([encode(written, "")])).logits[0, places]
        expected = (logits[:, 1].exp() / logits.exp().sum(1)).tolist()
        assert [*scored.steps.values()] == pytest.approx(expected, abs=1e-5)
        assert scored.score == pytest.approx(math.prod(expected), abs=1e-5)
        assert max(scored.steps) == len(text)
        assert scored.parts["steps"] == len(steps)
    every = [score for scored in results for score in scored.steps.values()]
    assert max(every) - min(every) > 0.01, "the model distinguishes them"
    reward.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_folder_says_that_it_scores_steps(tmp_path: Path, chat: bool) -> None:
    model = model_of()
    model.save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    reward = SequenceClassifierReward.from_pretrained(
        tmp_path, apply_chat_template=chat, step_separator="; ", step_end="#"
    )
    assert reward.scores_steps
    scored = await evaluate(reward, prompt="go:", completion="left; right", row={})
    text = ("<user>go:;" if chat else "go:") + "left;#right#"
    places = [text.index("#"), len(text) - 1]
    tokens: Any = tokenizer(text, return_tensors="pt")["input_ids"]
    expected = model(tokens).logits[0, places].softmax(-1)[:, 1].tolist()
    assert [*scored.steps.values()] == pytest.approx(expected, abs=1e-5)
    assert [*scored.steps] == [6, 11]
    assert scored.score == pytest.approx(min(expected), abs=1e-5)
    reward.close()


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"num_labels": 1}, {}, EngineModelError, "num_labels=1; expected 2"),
        (
            {},
            {"step_reduction": "sum"},
            RewardConfigError,
            "step_reduction is 'sum'; expected one of min, product, last, mean",
        ),
    ],
)
def test_bad_settings(fields: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        SequenceClassifierReward(model_of(**fields), encode=encode, **options)


class Verdicts:
    """In place of a `JudgeModel`: the score of a step is its number of letters."""

    questions: list[str]

    async def ask(self, questions: Any, images: Any = None) -> list[list[str]]:
        del images
        self.questions = questions
        verdicts: list[list[str]] = []
        for question in questions:
            step = question.partition("Last step:\n")[2].partition("\n")[0]
            verdicts.append([f"Score: {len(step)}" if step != "?" else "Hm.", "Hm."])
        return verdicts


async def test_a_judge_of_steps() -> None:
    """It sees each step, and what was written up to its end."""
    model: Any = Verdicts()
    judge = JudgeReward(model=model, step_separator="\n\n", step_reduction="mean")
    scored = await evaluate(judge, prompt="Go.", completion="left\n\nor right\n\n", row={})
    assert scored.steps == {6: 0.4, 16: 0.8}
    assert scored.score == pytest.approx(0.6)
    assert scored.parts == {"steps": 2.0, "parsed": 0.5}
    assert scored.feedback == "Score: 4\n\nScore: 8"
    assert "Request:\nGo.\n\nAnswer:\nleft\n\n\n\nLast step:\nleft\n" in model.questions[0]
    assert "Answer:\nleft\n\nor right\n\n\n\nLast step:\nor right\n" in model.questions[1]
    with pytest.raises(NoScoreError, match="step 2: none of 2 verdicts could be parsed"):
        await evaluate(judge, prompt="Go.", completion="left\n\n?", row={})
    with pytest.raises(RewardConfigError, match=r"expected \{step\} in it"):
        JudgeReward(model=model, step_separator="\n\n", template="{completion}")


async def test_scores_of_the_response_are_those_of_its_last_step() -> None:
    def process(prompt: str, completion: str, row: Any) -> Scored:
        return Scored(score=0.2, steps={3: 0.2, 7: 0.6})

    def other(prompt: str, completion: str, row: Any) -> Scored:
        return Scored(score=1.0, steps={3: 1.0})

    def right(prompt: str, completion: str, row: Any) -> float:
        return 5.0

    rewards: Any = {"process": process, "other": other, "right": right}
    weights = {"process": 0.5, "other": 2.0, "right": 3.0}
    scored = await evaluate(
        CompositeReward(rewards, weights=weights), prompt="", completion="ab\ncdef", row={}
    )
    assert scored.steps == pytest.approx({3: 0.5 * 0.2 + 2.0, 7: 0.5 * 0.6 + 15.0})
    assert scored.score == pytest.approx(0.1 + 2.0 + 15.0)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes are tokens, as are blank lines and " t": a character such as the euro sign is of three tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate([*alphabet, "ĊĊ", "Ġt", "</s>"])}
    inner = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ"), ("Ġ", "t")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Spaces are a part of the next word, and left out before the first one, as those of Llama 2 are."""
    vocabulary = {character: i for i, character in enumerate("abt€😀\n▁")}
    vocabulary |= {"▁t": 7, "\n\n": 8, "</s>": 9}
    inner = Tokenizer(models.BPE(vocabulary, [("▁", "t"), ("\n", "\n")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), spaced_tokenizer()], ids=["bytes", "words"]
)
@given(
    steps=st.lists(st.text(alphabet="abt €😀\n", min_size=1, max_size=12), min_size=1, max_size=6)
)
def test_tokens_of_steps(tokenizer: PreTrainedTokenizerFast, steps: list[str]) -> None:
    """A step ends at the first token with which the text up to there has all its characters, decoded from the start."""
    token_ids: Any = tokenizer("\n\n".join(steps))["input_ids"]
    token_ids.append(tokenizer.eos_token_id)

    def decode(stop: int) -> str:
        return str(tokenizer.decode(token_ids[:stop], skip_special_tokens=True))

    text = decode(len(token_ids))
    ends = np.cumsum([len(step) for step in split_steps(text, "\n\n")]).tolist()
    scores = {end: float(i + 1) for i, end in enumerate(ends)}
    completion = Completion(
        request_id="",
        index=0,
        finish_reason="stop",
        token_ids=np.array(token_ids),
        log_probs=np.zeros(len(token_ids), np.float32),
        weight_versions=np.zeros(len(token_ids), np.int32),
    )
    credited = credit_steps(completion, scores, tokenizer)
    expected = np.zeros(len(token_ids), np.float32)
    start = 0
    spans: list[list[int]] = []
    for end in ends:
        stop = next(k for k in range(len(token_ids) + 1) if len(decode(k)) >= end)
        if end == ends[-1]:
            stop = len(token_ids)
        expected[start:stop] = scores[end]
        spans += [[start, stop]] if start < stop else []
        start = stop
    assert credited.credit is not None
    np.testing.assert_array_equal(credited.credit, expected)
    assert credited.agents[""].tolist() == spans
    turns = [(start, stop, float(expected[start]), 0) for start, stop in spans]
    assert credited.scored_turns() == turns
    assert statistics.fmean(turn[2] for turn in turns) == pytest.approx(credited.mean_credit()[""])
