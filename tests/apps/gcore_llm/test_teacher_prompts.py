"""What teachers see in place of a prompt: columns of its row, feedback, a better response of its group."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_llm.config import TrainConfig
from gcore_llm.learning.config import AlgorithmConfig, DistillationConfig
from gcore_llm.learning.preparation import unscored_samples
from gcore_llm.learning.teacher_prompts import check_columns, count_teacher_tokens, show_to_teachers
from gcore_llm.tiny_model import MAX_POSITION_EMBEDDINGS, tiny_tokenizer
from gcore_rollout import Completion, Group, Prompt
from gcore_runs import UserError

PLAIN = tiny_tokenizer()
ANY = {"prompt": "1+1=", "answer": "2"}


def make_group(*responses: tuple[str, float, str], columns: dict[str, Any] | None = None) -> Group:
    """A group of responses with their scores and feedback."""
    completions: list[Completion] = []
    for index, (text, score, feedback) in enumerate(responses):
        token_ids = np.array(PLAIN(text)["input_ids"])
        completions.append(
            Completion(
                request_id="0",
                index=index,
                finish_reason="stop",
                token_ids=token_ids,
                log_probs=np.zeros(token_ids.size, np.float32),
                weight_versions=np.zeros(token_ids.size, np.int32),
                kept_counts=np.ones(token_ids.size, np.int32),
                kept_ids=token_ids.astype(np.int32),
                score=score,
                feedback=feedback,
            )
        )
    return Group(
        prompt_index=0,
        prompt_ids=np.array([4, 5]),
        responses=completions,
        columns=dict(columns or ANY),
    )


def seen_by_teachers(
    template: str, group: Group, *, max_tokens: int = 99, tokenizer: Any = PLAIN
) -> list[tuple[str, list[str]]]:
    """Each prompt that teachers see, and the responses that they see after it."""
    samples = [unscored_samples(group, AlgorithmConfig())]
    algorithm = AlgorithmConfig(filter_groups=False)
    config = TrainConfig(algorithm=algorithm, distillation=DistillationConfig(prompt=template))
    taught = show_to_teachers([group], samples, tokenizer, config, max_tokens=max_tokens)
    seen: list[tuple[str, list[str]]] = []
    for sub_group, seen_samples, written in taught:
        texts: list[str] = []
        for response, sample, own in zip(sub_group.responses, seen_samples, written, strict=True):
            assert any(own is s for s in samples[0])
            assert own.prompt_ids.tolist() == [4, 5]
            np.testing.assert_array_equal(sample.prompt_ids, sub_group.prompt_ids)
            np.testing.assert_array_equal(sample.response_ids, own.response_ids)
            np.testing.assert_array_equal(sample.response_ids, response.token_ids)
            np.testing.assert_array_equal(sample.kept_counts, response.kept_counts)
            np.testing.assert_array_equal(sample.kept_ids, response.kept_ids)
            texts.append(PLAIN.decode(sample.response_ids))
        seen.append((tokenizer.decode(sub_group.prompt_ids), texts))
    return seen


def test_responses_with_one_prompt_are_one_group() -> None:
    group = make_group(("2", 1.0, ""), ("3", 0.0, ""))
    assert seen_by_teachers("{prompt}{answer}! {prompt}", group) == [("1+1=2! 1+1=", ["2", "3"])]


def test_feedback_is_of_each_response() -> None:
    """Two responses with the same feedback are in one group, and one without is not taught."""
    group = make_group(("2", 1.0, ""), ("3", 0.0, "no"), ("5", 0.0, "far"), ("4", 0.0, "no"))
    expected = [("1+1=no", ["3", "4"]), ("1+1=far", ["5"])]
    assert seen_by_teachers("{prompt}{feedback}", group) == expected


def test_a_better_response_is_shown_to_the_others() -> None:
    group = make_group(("2", 1.0, ""), ("3", 0.0, ""), ("II", 1.0, ""))
    assert seen_by_teachers("{success}. {prompt}", group) == [("2. 1+1=", ["3"])]
    alike = make_group(("2", 1.0, ""), ("3", 1.0, ""))
    assert seen_by_teachers("{success}. {prompt}", alike) == []


def test_the_last_message_is_replaced() -> None:
    system = {"role": "system", "content": "Add."}
    question = {"role": "user", "content": "1+1"}
    columns = {"prompt": [system, question], "answer": "2"}
    group = make_group(("2", 1.0, ""), columns=columns)
    tokenizer = tiny_tokenizer(chats=True)
    messages = [system, {**question, "content": "1+1 is 2"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    seen = seen_by_teachers("{prompt} is {answer}", group, tokenizer=tokenizer)
    assert seen == [(expected, ["2"])]


def test_what_is_too_long_or_lacks_a_column_is_not_taught() -> None:
    group = make_group(("2", 1.0, ""), ("3333", 0.0, ""))
    assert seen_by_teachers("{prompt}", group, max_tokens=7) == [("1+1=", ["2"])]
    assert seen_by_teachers("{hint}", group) == []


def test_groups_keep_their_columns_in_checkpoints() -> None:
    group = make_group(("2", 1.0, "right"))
    again = Group.from_state(group.state())
    assert again.columns == ANY
    assert again.responses[0].feedback == "right"
    older = group.state()
    del older["columns"]
    assert Group.from_state({**older, "source": "sums"}).columns == {"data_source": "sums"}


def test_a_column_that_no_row_has_is_refused() -> None:
    config = TrainConfig(
        algorithm=AlgorithmConfig(filter_groups=False),
        distillation=DistillationConfig(prompt="{prompt} {hint} {feedback}"),
    )
    prompts = [Prompt(text="1+1=", token_ids=(4, 5), row=ANY)]
    message = (
        r"distillation.prompt has the field {hint}; expected answer, feedback, prompt, success"
    )
    with pytest.raises(UserError, match=message):
        check_columns(config, prompts)
    check_columns(config, [*prompts, Prompt(text="", token_ids=(4,), row={"hint": "2"})])


@pytest.mark.parametrize("template", ["no field", "{}", "{answer.real}", "{answer"])
def test_what_is_no_template_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"expected text with {COLUMN}, {feedback} or {success}"):
        DistillationConfig(prompt=template)


def test_prompts_fit_the_model_and_its_micro_batches(tiny: Path) -> None:
    distillation = DistillationConfig(prompt="{answer}")
    algorithm = AlgorithmConfig(filter_groups=False)
    config = TrainConfig(model=str(tiny), algorithm=algorithm, distillation=distillation)
    max_tokens = count_teacher_tokens(config)
    assert max_tokens == MAX_POSITION_EMBEDDINGS < config.actor.ppo_max_token_len
