"""What every engine promises, whatever runs behind it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    EOS_TOKEN_IDS,
    MAX_LENGTH,
    VLLM_IMPORT_WARNINGS,
    VOCAB_SIZE,
    TinyModel,
    assert_equal,
    collect,
    errors,
    first_then_abandon,
    go_on,
    in_parts,
    interrupt,
    make_engine,
    make_request,
    reference_after_swap,
    reference_log_probs,
    repeats,
    until,
    until_idle,
    until_sampled,
)
from transformers import AutoTokenizer

from gcore_rollout import Completion, Engine, RepetitionDetection, RequestError, RolloutError

pytestmark = VLLM_IMPORT_WARNINGS

MAX_NUM_SEQS = 8
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Subject:
    """An engine that runs the ``old`` weights of ``model`` when a test starts."""

    engine: Engine
    model: TinyModel
    num_engines: int = 1
    """Those behind it; each that makes samples of a request computes its prompt."""

    async def update(self, model: Any) -> int:
        version = self.engine.weight_version + 1
        await self.engine.update_weights(model.state_dict().items(), version=version)
        return version


@pytest.fixture(
    scope="module", params=["hf", "hf-static", pytest.param("vllm", marks=pytest.mark.slow)]
)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def tied_engine(kind: str, tied: TinyModel) -> Iterator[Engine]:
    engine = make_engine(kind, tied, max_num_seqs=MAX_NUM_SEQS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def untied_engine(kind: str, untied: TinyModel) -> Iterator[Engine]:
    engine = make_engine(kind, untied, max_num_seqs=MAX_NUM_SEQS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def subject(tied_engine: Engine, tied: TinyModel) -> Subject:
    subject = Subject(tied_engine, tied)
    await subject.update(tied.old)
    return subject


@pytest.fixture
async def untied_subject(untied_engine: Engine, untied: TinyModel) -> Subject:
    subject = Subject(untied_engine, untied)
    await subject.update(untied.old)
    return subject


@pytest.fixture(params=["tied", "untied"])
def either_subject(
    request: pytest.FixtureRequest, subject: Subject, untied_subject: Subject
) -> Subject:
    return subject if request.param == "tied" else untied_subject


async def test_every_completion_comes_once(subject: Subject) -> None:
    requests = [make_request(f"r{n}", 3 + n, n=n, max_tokens=4 + n) for n in (1, 5, 2, 11)]
    found = await collect(subject.engine, *requests)
    assert sorted(found) == sorted((r.request_id, i) for r in requests for i in range(r.n))
    limits = {r.request_id: r.sampling.max_tokens for r in requests}
    for c in found.values():
        assert 1 <= len(c.token_ids) <= limits[c.request_id]
        assert c.token_ids.shape == c.log_probs.shape == c.weight_versions.shape
        assert (c.token_ids.dtype, c.log_probs.dtype, c.weight_versions.dtype) == (
            np.int64,
            np.float32,
            np.int32,
        )
        assert set(c.weight_versions) == {subject.engine.weight_version}
        assert c.token_ids.min() >= 0
        assert c.token_ids.max() < VOCAB_SIZE


async def test_no_requests_no_completions(subject: Subject) -> None:
    assert await collect(subject.engine) == {}


async def test_short_completions_do_not_wait_for_long_ones(subject: Subject) -> None:
    requests = [make_request("long", 4, max_tokens=200), make_request("short", 4, max_tokens=1)]
    first = await first_then_abandon(subject.engine, requests)
    assert first.request_id == "short"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
async def test_log_probs_are_those_of_transformers(subject: Subject, temperature: float) -> None:
    """At the temperature that was sampled with, and at 1 for greedy tokens."""
    requests = [
        make_request(f"r{length}", length, n=2, temperature=temperature)
        for length in (1, 7, 40, 150)
    ]
    found = await collect(subject.engine, *requests)
    assert max(errors(subject.model.old, requests, found)) < TOLERANCE


async def test_temperatures_may_be_mixed(subject: Subject) -> None:
    requests = [make_request(f"r{t}", 9, n=2, temperature=t) for t in (0.0, 0.5, 1.0, 1.5)]
    found = await collect(subject.engine, *requests)
    assert max(errors(subject.model.old, requests, found)) < TOLERANCE


async def test_top_p_and_top_k(subject: Subject) -> None:
    """Log-probs are of the distribution without the tokens that transformers leaves out; others are drawn from all."""
    truncations = [(0.7, -1), (1.0, 3), (0.8, 5), (1.0, 1), (1.0, 0)]
    requests = [make_request(f"r{p, k}", 9, n=2) for p, k in truncations]
    for i, (top_p, top_k) in enumerate(truncations):
        sampling = replace(requests[i].sampling, top_p=top_p, top_k=top_k, temperature=1.3)
        requests[i] = replace(requests[i], sampling=sampling)
    found = await collect(subject.engine, *requests)
    assert max(errors(subject.model.old, requests, found)) < TOLERANCE
    assert not any(found["r(1.0, 1)", 0].log_probs)
    assert all(found["r(1.0, 0)", 0].log_probs < 0)


async def test_finish_reasons(subject: Subject) -> None:
    """A completion ends with its first end-of-sequence token, which it includes, or at its limit."""
    found = await collect(subject.engine, make_request("r", 5, n=48, max_tokens=30))
    for c in found.values():
        ends = np.isin(c.token_ids, EOS_TOKEN_IDS)
        assert not ends[:-1].any()
        assert c.finish_reason == ("stop" if ends[-1] else "length")
        assert ends[-1] or len(c.token_ids) == 30
    assert {c.finish_reason for c in found.values()} == {"stop", "length"}
    assert {int(c.token_ids[-1]) for c in found.values() if c.finish_reason == "stop"} == set(
        EOS_TOKEN_IDS
    )


async def test_greedy_equals_generate(subject: Subject) -> None:
    requests = [
        make_request(f"r{length}", length, max_tokens=24, temperature=0.0) for length in (1, 6, 33)
    ]
    found = await collect(subject.engine, *requests)
    for r in requests:
        prompt = torch.tensor([r.prompt_token_ids])
        expected = subject.model.old.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=EOS_TOKEN_IDS,
        )
        assert found[r.request_id, 0].token_ids.tolist() == expected[0, prompt.shape[1] :].tolist()


async def test_seeds(subject: Subject) -> None:
    request = make_request("r", 6, n=4, seed=3)
    first, again, other = [
        await collect(subject.engine, r)
        for r in (request, request, replace(request, seed=request.seed + 1))
    ]
    tokens = [c.token_ids.tolist() for c in first.values()]
    assert tokens == [again[key].token_ids.tolist() for key in first]
    assert all(a != b for a, b in pairwise(tokens))
    assert tokens != [other[key].token_ids.tolist() for key in first]


async def test_single_samples_of_a_request(subject: Subject) -> None:
    """They are drawn as they are alongside the others."""
    request = make_request("r", 5, n=6, max_tokens=8)
    whole = await collect(subject.engine, request)
    some = await collect(subject.engine, replace(request, indices=(4, 1)))
    assert sorted(some) == [("r", 1), ("r", 4)]
    for key, completion in some.items():
        assert completion.token_ids.tolist() == whole[key].token_ids.tolist()


async def test_concurrent_calls_get_their_own(subject: Subject) -> None:
    calls = [
        [make_request(f"{call}{i}", 3 + i, n=3, max_tokens=5 + 4 * call) for i in range(2)]
        for call in range(4)
    ]
    results = await asyncio.gather(*(collect(subject.engine, *requests) for requests in calls))
    for requests, found in zip(calls, results, strict=True):
        assert {key[0] for key in found} == {r.request_id for r in requests}
        assert len(found) == 6
        assert max(errors(subject.model.old, requests, found)) < TOLERANCE


async def test_more_samples_than_slots(subject: Subject) -> None:
    requests = [make_request(f"r{i}", 2 + i, n=1 + i % 7, max_tokens=4 + i) for i in range(12)]
    found = await collect(subject.engine, *requests)
    assert len(found) == sum(r.n for r in requests)
    assert max(errors(subject.model.old, requests, found)) < TOLERANCE


async def test_new_weights_take_effect(either_subject: Subject) -> None:
    """For a prompt long enough that its keys and values were cached with the old weights, too."""
    engine, model = either_subject.engine, either_subject.model
    requests = [make_request("short", 5, n=2), make_request("long", 300, n=2)]
    assert max(errors(model.old, requests, await collect(engine, *requests))) < TOLERANCE
    version = await either_subject.update(model.new)
    found = await collect(engine, *requests)
    assert engine.weight_version == engine.stats().weight_version == version
    assert all(set(c.weight_versions) == {version} for c in found.values())
    assert max(errors(model.new, requests, found)) < TOLERANCE
    assert min(errors(model.old, requests, found)) > 0.1


async def test_update_copies(either_subject: Subject) -> None:
    """The tensors handed over are the caller's again when `update_weights` returns, and may have had gradients."""
    weights = {
        name: tensor.clone().requires_grad_()
        for name, tensor in either_subject.model.new.state_dict().items()
    }
    version = either_subject.engine.weight_version + 1
    await either_subject.engine.update_weights(weights.items(), version=version)
    for tensor in weights.values():
        tensor.detach().fill_(float("nan"))
    request = make_request("r", 9, n=2)
    found = await collect(either_subject.engine, request)
    assert max(errors(either_subject.model.new, [request], found)) < TOLERANCE


async def test_tied_head_may_be_left_out(subject: Subject) -> None:
    weights = subject.model.new.state_dict()
    del weights["lm_head.weight"]
    await subject.engine.update_weights(weights.items(), version=subject.engine.weight_version + 1)
    request = make_request("r", 9, n=2)
    assert (
        max(errors(subject.model.new, [request], await collect(subject.engine, request)))
        < TOLERANCE
    )


async def test_update_in_mid_generation(either_subject: Subject) -> None:
    """Each token carries the version that made it, over the keys and values computed until then."""
    engine, model = either_subject.engine, either_subject.model
    before = engine.weight_version
    request = make_request("r", 140, n=3, max_tokens=60, temperature=0.9)
    late = make_request("late", 140, n=2)
    late = replace(late, prompt_token_ids=request.prompt_token_ids)
    running = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 25)
    after = await either_subject.update(model.new)
    # The same prompt as samples still running: their keys and values are of no use to it.
    found_late = await collect(engine, late)
    assert max(errors(model.new, [late], found_late)) < TOLERANCE
    crossed = 0
    for c in (await running).values():
        num_old = int((c.weight_versions == before).sum())
        assert c.weight_versions.tolist() == [before] * num_old + [after] * (
            len(c.token_ids) - num_old
        )
        expected = reference_after_swap(model.old, model.new, request, c.token_ids, num_old)
        np.testing.assert_allclose(c.log_probs, expected, atol=TOLERANCE, rtol=0)
        crossed += num_old < len(c.token_ids)
    assert crossed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.norm.weight": None}, r"missing names \['model.norm.weight'\]"),
        ({"model.layers.1.mlp.up_proj.weight": None}, "missing names"),
        ({"model.extra": torch.zeros(1)}, r"unknown names \['model.extra'\]"),
        (
            {"model.norm.weight": torch.zeros(3)},
            r"shape of weight 'model.norm.weight' is \(3,\); expected \(128,\)",
        ),
    ],
)
async def test_bad_weights_change_nothing(
    either_subject: Subject, change: dict[str, torch.Tensor | None], message: str
) -> None:
    engine, model = either_subject.engine, either_subject.model
    version = engine.weight_version
    weights = {**model.new.state_dict(), **change}
    with pytest.raises(ValueError, match=message):
        await engine.update_weights(
            [(k, v) for k, v in weights.items() if v is not None], version=version + 1
        )
    assert engine.weight_version == version
    request = make_request("r", 9)
    assert max(errors(model.old, [request], await collect(engine, request))) < TOLERANCE


async def test_versions_must_grow(subject: Subject) -> None:
    version = subject.engine.weight_version
    with pytest.raises(
        ValueError, match=f"version is {version}; expected a version above the current {version}"
    ):
        await subject.engine.update_weights(subject.model.new.state_dict().items(), version=version)
    request = make_request("r", 9)
    assert (
        max(errors(subject.model.old, [request], await collect(subject.engine, request)))
        < TOLERANCE
    )


async def test_abandoned_samples_free_the_engine(subject: Subject) -> None:
    requests = [
        make_request("short", 4, max_tokens=1),
        make_request("long", 4, n=3 * MAX_NUM_SEQS, max_tokens=400),
    ]
    other = make_request("other", 5, n=4, max_tokens=40)
    kept = asyncio.create_task(collect(subject.engine, other))
    await first_then_abandon(subject.engine, requests)
    found = await kept
    assert len(found) == 4
    assert max(errors(subject.model.old, [other], found)) < TOLERANCE
    await until_idle(subject.engine)


async def test_cancelled_consumer_frees_the_engine(subject: Subject) -> None:
    running = asyncio.create_task(
        collect(subject.engine, make_request("r", 4, n=20, max_tokens=400))
    )
    await until_sampled(subject.engine, 5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(await collect(subject.engine, make_request("next", 4))) == 1
    await until_idle(subject.engine)


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (MAX_LENGTH, 1, f"needs {MAX_LENGTH} prompt \\+ 1 completion tokens = {MAX_LENGTH + 1}"),
        (3, MAX_LENGTH, f"expected at most {MAX_LENGTH}"),
    ],
)
async def test_too_long_requests_are_refused(
    subject: Subject, length: int, max_tokens: int, message: str
) -> None:
    good = make_request("good", 3)
    with pytest.raises(RequestError, match=message):
        await collect(subject.engine, good, make_request("bad", length, max_tokens=max_tokens))
    assert subject.engine.stats().num_waiting == 0


async def test_longest_request_is_served(subject: Subject) -> None:
    request = make_request("r", MAX_LENGTH - 2, max_tokens=2)
    assert (
        max(errors(subject.model.old, [request], await collect(subject.engine, request)))
        < TOLERANCE
    )


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
async def test_unknown_prompt_tokens_are_refused(subject: Subject, token: int) -> None:
    request = replace(make_request("r", 3), prompt_token_ids=(4, token, 7))
    with pytest.raises(
        RequestError, match=f"'r' has prompt tokens from .*expected 0 to {VOCAB_SIZE - 1}"
    ):
        await collect(subject.engine, request)


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE])
async def test_unknown_prefix_tokens_are_refused(subject: Subject, token: int) -> None:
    cut_short = Completion(
        request_id="r",
        index=0,
        token_ids=np.array([7, token]),
        log_probs=np.zeros(2, np.float32),
        weight_versions=np.zeros(2, np.int32),
        finish_reason="abort",
    )
    with pytest.raises(
        RequestError, match=f"'r' has prefix tokens from .*expected 0 to {VOCAB_SIZE - 1}"
    ):
        await collect(subject.engine, replace(make_request("r", 3), prefixes=(cut_short,)))


async def test_interrupted_greedy_equals_uninterrupted(subject: Subject) -> None:
    """However often it is interrupted, and with samples of one request in several states."""
    requests = [
        make_request(f"r{length}", length, n=2, max_tokens=60, temperature=0.0)
        for length in (5, 33, 140)
    ]
    whole = await collect(subject.engine, *requests)
    found, num_aborts = await in_parts(subject.engine, *requests, num_tokens=40)
    assert num_aborts > 1
    assert found.keys() == whole.keys()
    for key, expected in whole.items():
        assert_equal(found[key], expected, tolerance=2 * TOLERANCE)


async def test_samples_continue_alongside_new_ones(subject: Subject) -> None:
    """A third of the samples is cut short; log-probs are those of one forward over all tokens."""
    engine = subject.engine
    request = make_request("r", 40, n=6, max_tokens=48, temperature=0.9)
    cut = await interrupt(engine, request, after=60)
    cut_short = [c for c in cut.values() if c.finish_reason == "abort"][1::3]
    before = engine.stats()
    found = await collect(engine, replace(request, prefixes=tuple(cut_short)))
    after = engine.stats()
    assert max(errors(subject.model.old, [request], found)) < TOLERANCE
    for c in cut_short:
        length = len(c.token_ids)
        assert length
        longer = found["r", c.index]
        assert longer.token_ids[:length].tolist() == c.token_ids.tolist()
        assert longer.log_probs[:length].tolist() == c.log_probs.tolist()
        assert len(longer.token_ids) > length
    num_cut_short = sum(len(c.token_ids) for c in cut_short)
    # The prompt once for those that start again, and once for each that continues.
    prompt_tokens = after.prompt_tokens - before.prompt_tokens - 40 * len(cut_short) - num_cut_short
    assert prompt_tokens in [40 * n for n in range(1, subject.num_engines + 1)]
    num_tokens = sum(len(c.token_ids) for c in found.values())
    assert after.completion_tokens - before.completion_tokens == num_tokens - num_cut_short


async def test_continuing_with_new_weights(either_subject: Subject) -> None:
    """Each token has the version that made it, and the log-prob that these weights give it in one forward."""
    engine, model = either_subject.engine, either_subject.model
    before = engine.weight_version
    request = make_request("r", 140, n=6, max_tokens=60)
    cut = await interrupt(engine, request, after=30)
    after = await either_subject.update(model.new)
    again = go_on(request, cut)
    assert again.prefixes
    found = await collect(engine, again)
    for c in again.prefixes:
        longer, num_old = found["r", c.index], len(c.token_ids)
        num_new = len(longer.token_ids) - num_old
        assert longer.weight_versions.tolist() == [before] * num_old + [after] * num_new
        for weights, mine in ((model.old, slice(num_old)), (model.new, slice(num_old, None))):
            expected = reference_log_probs(weights, request, longer.token_ids)
            np.testing.assert_allclose(
                longer.log_probs[mine], expected[mine], atol=TOLERANCE, rtol=0
            )


async def test_abort_of_some(subject: Subject) -> None:
    """By their ids, whichever call they came with; the rest does not notice."""
    engine = subject.engine
    requests = {
        name: make_request(name, 9, n=2, max_tokens=150, temperature=0.0) for name in "abcd"
    }
    whole = await collect(engine, *requests.values())
    calls = [
        asyncio.create_task(collect(engine, requests["a"], requests["b"])),
        asyncio.create_task(collect(engine, requests["c"], requests["d"])),
    ]
    await until_sampled(engine, 40)
    await engine.abort(["a", "d", "unknown"])
    found = (await calls[0]) | (await calls[1])
    assert found.keys() == whole.keys()
    for (name, index), c in found.items():
        expected = whole[name, index]
        if name in "ad":
            assert 0 < len(c.token_ids) < len(expected.token_ids)
            assert c.finish_reason == "abort"
            assert c.token_ids.tolist() == expected.token_ids[: len(c.token_ids)].tolist()
            assert max(errors(subject.model.old, [requests[name]], {(name, index): c})) < TOLERANCE
        else:
            assert_equal(c, expected, tolerance=2 * TOLERANCE)
    await until_idle(engine)


async def test_abort_of_waiting_samples(subject: Subject) -> None:
    """They come without tokens, or with those that they had when cut short, and can continue like the others."""
    engine = subject.engine
    request = make_request("r", 5, n=3 * MAX_NUM_SEQS, max_tokens=100)
    found = await interrupt(engine, request, after=5 * MAX_NUM_SEQS)
    assert sorted(found) == [("r", i) for i in range(request.n)]
    unstarted = [c for c in found.values() if len(c.token_ids) == 0]
    assert len(unstarted) >= MAX_NUM_SEQS
    for c in unstarted:
        assert c.finish_reason == "abort"
        assert c.token_ids.shape == c.log_probs.shape == c.weight_versions.shape == (0,)
        assert (c.token_ids.dtype, c.log_probs.dtype, c.weight_versions.dtype) == (
            np.int64,
            np.float32,
            np.int32,
        )

    again = go_on(request, found)
    await engine.pause()
    waiting = asyncio.create_task(collect(engine, again))
    await until(lambda: engine.stats().num_waiting == request.n)
    await engine.abort(["r"])
    held = await waiting
    await engine.resume()
    for c in again.prefixes:
        assert_equal(held["r", c.index], c, tolerance=0)
        assert held["r", c.index].weight_versions.tolist() == c.weight_versions.tolist()

    finished = await collect(engine, again)
    assert {c.finish_reason for c in finished.values()} <= {"stop", "length"}
    assert max(errors(subject.model.old, [request], finished)) < TOLERANCE


async def test_abort_of_nothing(subject: Subject) -> None:
    await subject.engine.abort()
    await subject.engine.abort([])
    request = make_request("r", 4)
    running = asyncio.create_task(collect(subject.engine, request))
    await until_sampled(subject.engine, 1)
    await subject.engine.abort([])
    assert "abort" not in {c.finish_reason for c in (await running).values()}


async def test_pause_holds(either_subject: Subject) -> None:
    """No token comes while paused; weights may change, and samples continue with the new ones."""
    engine, model = either_subject.engine, either_subject.model
    before = engine.weight_version
    request = make_request("r", 20, n=3, max_tokens=60, temperature=0.9)
    late = make_request("late", 7)
    running = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 25)
    await engine.pause()
    await engine.pause()
    waiting = asyncio.create_task(collect(engine, late))
    held = engine.stats()
    assert held.num_running
    await until(lambda: engine.stats().num_waiting == 1)
    await asyncio.sleep(0.04)
    assert engine.stats() == replace(held, num_waiting=1)
    after = await either_subject.update(model.new)
    await asyncio.sleep(0.04)
    assert engine.stats() == replace(held, num_waiting=1, weight_version=after)
    await engine.resume()
    await engine.resume()
    crossed = 0
    for c in (await running).values():
        num_old = int((c.weight_versions == before).sum())
        assert c.weight_versions.tolist() == [before] * num_old + [after] * (
            len(c.token_ids) - num_old
        )
        expected = reference_after_swap(model.old, model.new, request, c.token_ids, num_old)
        np.testing.assert_allclose(c.log_probs, expected, atol=TOLERANCE, rtol=0)
        crossed += num_old < len(c.token_ids)
    assert crossed
    assert max(errors(model.new, [late], await waiting)) < TOLERANCE


async def test_abandoned_while_paused(subject: Subject) -> None:
    running = asyncio.create_task(
        collect(subject.engine, make_request("r", 4, n=20, max_tokens=400))
    )
    await until_sampled(subject.engine, 5)
    await subject.engine.pause()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until_idle(subject.engine)
    await subject.engine.resume()


async def test_sleep_and_wake(either_subject: Subject) -> None:
    """Keys and values are gone, cached prefixes with them; calls made meanwhile wait."""
    engine, model = either_subject.engine, either_subject.model
    request = make_request("r", 300, n=2)
    await collect(engine, request)
    before = engine.stats()
    await engine.sleep()
    await engine.sleep()
    version = engine.weight_version
    with pytest.raises(RolloutError, match="asleep: wake it before update_weights"):
        await engine.update_weights(model.new.state_dict().items(), version=version + 1)
    assert engine.weight_version == version
    waiting = asyncio.create_task(collect(engine, request))
    await until(lambda: engine.stats().num_waiting == 2)
    await asyncio.sleep(0.04)
    assert engine.stats() == replace(before, num_waiting=2)
    await engine.wake()
    await engine.wake()
    assert max(errors(model.old, [request], await waiting)) < TOLERANCE
    await either_subject.update(model.new)
    assert max(errors(model.new, [request], await collect(engine, request))) < TOLERANCE


async def test_weights_wake_before_keys_and_values(either_subject: Subject) -> None:
    engine, model = either_subject.engine, either_subject.model
    request = make_request("r", 300, n=2)
    await collect(engine, request)
    await engine.sleep(keep_weights=False)
    with pytest.raises(
        RolloutError, match=r"weights are asleep: wake\(cache=False\) has to come before"
    ):
        await engine.wake(weights=False)
    with pytest.raises(
        RolloutError, match=r"weights were dropped by sleep\(keep_weights=False\): wake\(cache"
    ):
        await engine.wake()
    waiting = asyncio.create_task(collect(engine, request))
    await engine.wake(cache=False)
    await engine.wake(cache=False)
    with pytest.raises(RolloutError, match=r"weights were dropped by sleep\(keep_weights=False\)"):
        await engine.wake()
    await either_subject.update(model.new)
    await asyncio.sleep(0.01)
    assert engine.stats().num_waiting == 2, "keys and values are asleep"
    await engine.wake()
    assert max(errors(model.new, [request], await waiting)) < TOLERANCE
    # Kept weights, and back to sleep half-way.
    await engine.sleep()
    await engine.wake(cache=False)
    await engine.sleep()
    await engine.wake(cache=False)
    await engine.wake(weights=False)
    assert max(errors(model.new, [request], await collect(engine, request))) < TOLERANCE
    await either_subject.update(model.old)


async def test_sleep_while_paused(subject: Subject) -> None:
    engine = subject.engine
    request = make_request("r", 9)
    await engine.pause()
    await engine.sleep()
    waiting = asyncio.create_task(collect(engine, request))
    await engine.wake()
    await until(lambda: engine.stats().num_waiting == 1)
    await asyncio.sleep(0.04)
    assert engine.stats().num_running == 0
    with pytest.raises(
        RolloutError, match="0 samples are running and 1 are waiting: abort them or let them finish"
    ):
        await engine.sleep()
    await engine.resume()
    assert max(errors(subject.model.old, [request], await waiting)) < TOLERANCE


async def test_no_sleep_while_generating(subject: Subject) -> None:
    engine = subject.engine
    request = make_request("r", 9, n=MAX_NUM_SEQS + 3, max_tokens=100)
    running = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 5)
    with pytest.raises(
        RolloutError,
        match=r"samples are running and \d+ are waiting: abort them or let them finish",
    ):
        await engine.sleep()
    await engine.abort()
    await engine.sleep()
    await engine.wake()
    assert max(
        errors(
            subject.model.old,
            [request],
            {k: c for k, c in (await running).items() if c.token_ids.size},
        )
    ) < (TOLERANCE)


@pytest.mark.parametrize(
    ("detection", "temperature"),
    [
        (RepetitionDetection(max_pattern_size=1, min_count=2), 1.0),
        (RepetitionDetection(min_pattern_size=2, max_pattern_size=3, min_count=2), 0.5),
        (RepetitionDetection(max_pattern_size=40, min_count=3), 0.0),
    ],
)
async def test_repetition_ends_a_sample(
    subject: Subject, detection: RepetitionDetection, temperature: float
) -> None:
    """With the first token that makes it repeat itself, and alongside samples that may repeat themselves."""
    free = [
        make_request(f"r{i}", 4 + i, n=4, max_tokens=200, temperature=temperature) for i in range(5)
    ]
    guarded = [
        replace(r, sampling=replace(r.sampling, repetition_detection=detection)) for r in free
    ]
    found = await collect(subject.engine, *guarded[:3], *free[3:])
    for c in found.values():
        tokens = c.token_ids.tolist()
        if c.request_id in ("r3", "r4"):
            assert c.finish_reason != "repetition"
            continue
        assert not any(repeats(tokens[:end], detection) for end in range(1, len(tokens)))
        if c.finish_reason != "stop":
            assert repeats(tokens, detection) == (c.finish_reason == "repetition")
    assert "repetition" in {c.finish_reason for c in found.values()}
    assert max(errors(subject.model.old, free, found)) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.0])
async def test_stop_strings_end_a_sample(subject: Subject, temperature: float) -> None:
    """With the token that completes one, which stays; alongside samples that none ends, and after an abort."""
    tokenizer = AutoTokenizer.from_pretrained(subject.model.path)
    stop = ("ab", "dfe", "k<", "gh")
    free = [
        make_request(f"r{i}", 4 + i, n=4, max_tokens=120, temperature=temperature) for i in range(6)
    ]
    guarded = [replace(r, sampling=replace(r.sampling, stop=stop)) for r in free]
    found = await collect(subject.engine, *guarded[:5], free[5])
    for completion in found.values():
        pieces = tokenizer.convert_ids_to_tokens(completion.token_ids.tolist())
        ends = [
            i
            for i in range(1, len(pieces) + 1)
            if any(string in "".join(pieces[:i]) for string in stop)
        ]
        if completion.request_id == "r5":
            assert completion.finish_reason != "stop" or completion.token_ids[-1] in EOS_TOKEN_IDS
        elif ends:
            assert (ends, completion.finish_reason) == ([len(pieces)], "stop")
    is_stopped = [
        c.finish_reason == "stop" and c.token_ids[-1] not in EOS_TOKEN_IDS for c in found.values()
    ]
    assert sum(is_stopped) > 3
    assert max(errors(subject.model.old, free, found)) < TOLERANCE
    running = asyncio.create_task(collect(subject.engine, *guarded[:2]))
    await until_sampled(subject.engine, 20)
    await subject.engine.abort()
    partial = [c for c in (await running).values() if c.finish_reason == "abort"]
    for request in guarded[:2]:
        prefixes = tuple(c for c in partial if c.request_id == request.request_id)
        if prefixes and temperature == 0:
            indices = tuple(c.index for c in prefixes)
            rest = await collect(
                subject.engine, replace(request, indices=indices, prefixes=prefixes)
            )
            for key, completion in rest.items():
                assert completion.token_ids.tolist() == found[key].token_ids.tolist()


async def test_stats(subject: Subject) -> None:
    engine = subject.engine
    before = engine.stats()
    request = make_request("r", 10, n=MAX_NUM_SEQS, max_tokens=50)
    queued = [make_request(f"queued{i}", 20, max_tokens=5) for i in range(3)]
    running = asyncio.create_task(collect(engine, request, *queued))
    await until_sampled(engine, 1)
    during = engine.stats()
    assert (during.num_running, during.num_waiting) == (MAX_NUM_SEQS, 3)
    found = await running
    after = engine.stats()
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.prompt_tokens - before.prompt_tokens - 3 * 20 in [
        10 * n for n in range(1, subject.num_engines + 1)
    ]
    assert after.completion_tokens - before.completion_tokens == sum(
        len(c.token_ids) for c in found.values()
    )
    assert after.weight_version == engine.weight_version


async def test_closing(kind: str, tied: TinyModel) -> None:
    """A new engine has version 0; closing it ends what it generates and what it could."""
    engine = make_engine(kind, tied)
    assert engine.weight_version == 0
    found = await collect(engine, make_request("r", 4))
    assert set(found["r", 0].weight_versions) == {0}
    aborted = asyncio.create_task(collect(engine, make_request("aborted", 4, n=3, max_tokens=400)))
    await until_sampled(engine, 5)
    await engine.abort()
    running = asyncio.create_task(collect(engine, make_request("r", 4, n=3, max_tokens=400)))
    await until_sampled(engine, 5)
    await engine.pause()
    await engine.close()
    assert "abort" in {c.finish_reason for c in (await aborted).values()}
    with pytest.raises(RolloutError, match="closed while generating"):
        await running
    weights = tied.new.state_dict().items()
    for call in (
        collect(engine, make_request("r", 4)),
        engine.abort(),
        engine.pause(),
        engine.resume(),
        engine.sleep(),
        engine.wake(),
        engine.update_weights(weights, version=1),
    ):
        with pytest.raises(RolloutError, match="closed"):
            await call
    await engine.close()
