"""What a request refuses, and what its completions can be kept as."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_oracles import make_request

from gcore_rollout import Completion, Group, RepetitionDetection, RequestError


def _cut_short(num_tokens: int = 3, **fields: Any) -> Completion:
    completion = Completion(
        request_id="r",
        index=1,
        token_ids=np.arange(num_tokens),
        log_probs=np.full(num_tokens, -0.5, np.float32),
        weight_versions=np.zeros(num_tokens, np.int32),
        finish_reason="abort",
    )
    return replace(completion, **fields)


def test_cut_short_samples_are_accepted() -> None:
    cut_short = (_cut_short(), _cut_short(0, index=0), _cut_short(15, index=3))
    assert (
        replace(make_request("r", 4, n=4, max_tokens=16), prefixes=cut_short).prefixes == cut_short
    )


@pytest.mark.parametrize(
    ("cut_short", "message"),
    [
        ([_cut_short(request_id="other")], "request_id 'other'; expected its own"),
        ([_cut_short(index=4)], r"index 4; expected a wanted one, \(0, 1, 2, 3\)"),
        ([_cut_short(index=-1)], r"index -1; expected a wanted one, \(0, 1, 2, 3\)"),
        ([_cut_short(), _cut_short(2)], r"have indices \[1, 1\]; expected each once"),
        ([_cut_short(finish_reason="stop")], "finish_reason 'stop'; expected 'abort'"),
        ([_cut_short(16)], "has 16 tokens; expected fewer than max_tokens=16"),
        (
            [_cut_short(log_probs=np.zeros(2, np.float32))],
            r"of shapes \[\(3,\), \(2,\), \(3,\)\]; expected one shape \[T\]",
        ),
        ([_cut_short(weight_versions=np.zeros((3, 1), np.int32))], r"expected one shape \[T\]"),
    ],
)
def test_bad_cut_short_samples_are_refused(cut_short: list[Completion], message: str) -> None:
    with pytest.raises(RequestError, match=f"request 'r' .*{message}"):
        replace(make_request("r", 4, n=4, max_tokens=16), prefixes=tuple(cut_short))


@pytest.mark.parametrize("indices", [(), (4,), (-1,), (1, 1)])
def test_bad_indices_are_refused(indices: tuple[int, ...]) -> None:
    with pytest.raises(
        RequestError,
        match=r"indices of request 'r' are .*; expected one or more of 0 to 3, each once",
    ):
        replace(make_request("r", 4, n=4), indices=indices)
    assert replace(make_request("r", 4, n=4), indices=(2, 0)).sample_indices == (2, 0)


def test_completions_are_kept_as_plain_values() -> None:
    """As a checkpoint or a file of arrays would."""
    cut_short = _cut_short()
    values = cut_short.state()
    assert {name: type(value) for name, value in values.items()} == {
        "request_id": str,
        "index": int,
        "token_ids": np.ndarray,
        "log_probs": np.ndarray,
        "weight_versions": np.ndarray,
        "finish_reason": str,
        "agents": dict,
        "score": float,
        "parts": dict,
        "feedback": str,
        "states": dict,
    }
    for revived in (Completion.from_state(values), pickle.loads(pickle.dumps(cut_short))):
        assert revived.state().keys() == values.keys()
        assert all(np.array_equal(revived.state()[name], value) for name, value in values.items())


def test_groups_of_older_checkpoints_are_read() -> None:
    """Whole ones, and those that were cut short."""
    arrays = {
        "token_ids": np.arange(2),
        "log_probs": np.zeros(2, np.float32),
        "weight_versions": np.full(2, 3, np.int32),
    }
    scored = {
        **arrays,
        "truncated": True,
        "score": 0.5,
        "mask": None,
        "end": None,
        "parts": {},
        "answer": None,
    }
    state = {
        "ticket": 7,
        "prompt_ids": np.arange(3),
        "greedy_score": 1.0,
        "images": None,
        "source": "math",
    }
    whole = Group.from_state({**state, "responses": [scored, {**scored, "truncated": False}]})
    assert (whole.prompt_index, whole.greedy_score, whole.columns, whole.scores) == (
        7,
        1.0,
        {"data_source": "math"},
        [0.5, 0.5],
    )
    assert [(r.request_id, r.index, r.finish_reason) for r in whole.responses] == [
        ("7", 0, "length"),
        ("7", 1, "stop"),
    ]
    begun = {**arrays, "request_id": "7", "index": 0, "finish_reason": "abort"}
    cut_short = Group.from_state(
        {"ticket": 7, "responses": [{"index": 2, **scored}], "begun": [begun]}
    )
    assert [(r.index, r.finish_reason) for r in cut_short.responses] == [
        (0, "abort"),
        (2, "length"),
    ]
    assert [r.index for r in cut_short.aborted] == [0]
    again = Group.from_state(cut_short.state())
    assert [r.state().keys() for r in again.responses] == [
        r.state().keys() for r in cut_short.responses
    ]
    assert again.oldest_version == cut_short.oldest_version == 3


@pytest.mark.parametrize(
    ("sizes", "count", "message"),
    [
        ((0, 4), 3, "min_pattern_size is 0; expected 1 to max_pattern_size=4"),
        ((5, 4), 3, "min_pattern_size is 5; expected 1 to max_pattern_size=4"),
        ((1, 4), 1, "min_count is 1; expected at least 2"),
    ],
)
def test_bad_repetition_detection_is_refused(
    sizes: tuple[int, int], count: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        RepetitionDetection(min_pattern_size=sizes[0], max_pattern_size=sizes[1], min_count=count)
