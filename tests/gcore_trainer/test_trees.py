"""Responses that are trees: one row gives what their paths give one by one, by packing and by transformers."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray
from rank_pool import RankServer
from trainer_oracles import (
    SIZES,
    VOCAB_SIZE,
    Group,
    deviation,
    groups,
    load_padded,
    make_samples,
    off_policy,
    packed_gradients,
    routed,
    save_model,
)
from transformers import (
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from gcore_trainer import (
    BatchError,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    scored_at_end,
)
from gcore_trainer.packing import row
from gcore_trainer.packing.layout import pack

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "gemma2": Gemma2Config(
        **SIZES,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=11,
        head_dim=16,
        attn_logit_softcapping=2.0,
    ),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "qwen3_next": Qwen3NextConfig(
        **SIZES,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
}
LOSS = PolicyLossConfig(loss_agg_mode="token-mean", kl_loss_coef=0.1)
OBJECTIVE = PolicyObjective(LOSS)
STILL = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))
PER_TOKEN = ("response_ids", "response_mask", "advantages", "old_log_probs", "ref_log_probs")


def session() -> Sample:
    """An agent: a first turn that was sampled twice, a sub-agent with a prompt of its own, and later turns.

    Of 30 tokens, 0-5 and 6-10 are the first turns; the second one is followed by a tool's answer (11-13), a turn
    (14-18) and, from its middle on, another one (19-21). 22-26 is the sub-agent, and 27-29 goes on after 18.
    """
    forks = [[6, -1], [19, 16], [22, -2], [27, 18]]
    rng = np.random.default_rng(0)
    return Sample(
        prompt_ids=rng.integers(0, VOCAB_SIZE, 7),
        response_ids=rng.integers(0, VOCAB_SIZE, 30),
        response_mask=~np.isin(np.arange(30), [11, 12, 13, 22, 23]),
        advantages=rng.normal(size=30).astype(np.float32),
        forks=np.array(forks),
    )


def path_to(sample: Sample, token: int) -> tuple[NDArray[np.int64], bool]:
    """The response tokens on the path that ends with a token, first to last, and whether it follows the prompt."""
    previous = {} if sample.forks is None else dict(sample.forks.tolist())
    path: list[int] = []
    while token >= 0:
        path.append(token)
        token = previous.get(token, token - 1)
    return np.array(path[::-1]), token == -1


def on_path(sample: Sample, token: int, counted: NDArray[np.bool_]) -> Sample | None:
    """The path that ends with a token, without forks; None: it predicts nothing.

    Args:
        counted: [R] tokens that count.
    """
    path, follows_prompt = path_to(sample, token)
    prompt_ids = sample.prompt_ids
    if not follows_prompt:
        prompt_ids = sample.response_ids[path[:1]]
        path = path[1:]
    if not path.size:
        return None
    marked = replace(sample, response_mask=counted, forks=None)
    fields: dict[str, Any] = {}
    for name in PER_TOKEN:
        values = getattr(marked, name)
        fields[name] = None if values is None else values[path]
    return Sample(prompt_ids=prompt_ids, **fields)


def leaf_rows(sample: Sample) -> list[Sample]:
    """A sample of each path from first to last token; a token counts in the first that it is on."""
    size = sample.response_ids.size
    is_new = np.ones(size, np.bool_)
    rows: list[Sample] = []
    for leaf in np.setdiff1d(np.arange(size), sample.parents):
        linear = on_path(sample, int(leaf), sample.mask & is_new)
        is_new[path_to(sample, int(leaf))[0]] = False
        if linear is not None:
            rows.append(linear)
    return rows


def turns(sample: Sample) -> list[Sample]:
    """A sample of each run of tokens that count, whose prompt is all that it follows."""
    size = sample.response_ids.size
    is_start = np.append(True, sample.mask[1:] != sample.mask[:-1])
    is_start |= sample.parents != np.arange(size) - 1
    rows: list[Sample] = []
    for start, stop in pairwise([*np.flatnonzero(is_start), size]):
        if not sample.mask[start]:
            continue
        is_turn = (np.arange(size) >= start) & (np.arange(size) < stop)
        linear = on_path(sample, int(stop) - 1, is_turn)
        assert linear is not None
        context = linear.response_ids.size - (stop - start)
        fields: dict[str, Any] = {}
        for name in PER_TOKEN:
            values = getattr(linear, name)
            fields[name] = None if values is None else values[context:]
        prompt_ids = np.append(linear.prompt_ids, linear.response_ids[:context])
        rows.append(Sample(prompt_ids=prompt_ids, **fields))
    return rows


def load(path: Path, dtype: torch.dtype = torch.float64, **options: Any) -> PackedModel:
    packed = PackedModel.from_pretrained(path, **options)
    if dtype == torch.float64:
        if hasattr(packed.model.config, "num_experts"):
            packed.model.set_experts_implementation("eager")  # the grouped kernel has no float64
        packed.model.double()
        packed.compute_dtype = dtype
    return packed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("trees")
    return {name: save_model(CONFIGS[name], root / name, seed=3) for name in CONFIGS}


@pytest.mark.parametrize("num_short", [512, 0], ids=["mask", "tiles"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_session_is_learned_as_its_paths_and_as_its_turns(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, num_short: int
) -> None:
    """Loss and gradients of the tree in one row, of its paths, and of every turn alone."""
    monkeypatch.setattr(row, "NUM_SHORT", num_short)
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-5)):
        packed = load(models[name], dtype)
        [tree] = off_policy([session()], packed, seed=1)
        loss, found = packed_gradients(packed, [[tree]], LOSS)
        assert packed.num_computed_tokens == 2 * tree.num_inputs == 2 * (7 + 30 - 4)
        for samples in (leaf_rows(tree), turns(tree)):
            assert sum(s.mask.sum() for s in samples) == tree.mask.sum()
            for micro_batches in ([samples], [[s] for s in samples]):
                expected_loss, expected = packed_gradients(packed, micro_batches, LOSS)
                assert loss == pytest.approx(expected_loss, rel=tolerance)
                assert deviation(found, expected) < tolerance


@settings(max_examples=12)
@given(lengths=groups, seed=st.integers(0, 10**6), share_prefix=st.booleans())
@pytest.mark.parametrize("num_short", [512, 0], ids=["mask", "tiles"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_log_probs_are_those_of_transformers(
    models: dict[str, Path],
    name: str,
    num_short: int,
    lengths: list[Group],
    seed: int,
    share_prefix: bool,
) -> None:
    """Trees and linear responses that share prompts, against each path alone."""
    packed = load(models[name], share_prefix=share_prefix)
    plain = load_padded(models[name], dtype=torch.float64)
    plain.set_attn_implementation("eager")
    samples = make_samples(lengths[:2], seed=seed, num_forks=5)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(row, "NUM_SHORT", num_short)
        scores = packed.score(samples).log_probs.split([s.response_ids.size for s in samples])
        for sample, log_probs in zip(samples, scores, strict=True):
            for leaf in np.setdiff1d(np.arange(sample.response_ids.size), sample.parents):
                path, follows_prompt = path_to(sample, int(leaf))
                ids = sample.response_ids[path]
                if follows_prompt:
                    ids = np.append(sample.prompt_ids, ids)
                targets = torch.from_numpy(ids)[1:]
                logits = plain(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1]
                expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
                num_predicted = len(path) - int(not follows_prompt)
                torch.testing.assert_close(
                    log_probs[path[len(path) - num_predicted :]],
                    expected[len(targets) - num_predicted :],
                    rtol=1e-5,
                    atol=1e-5,
                )


@settings(max_examples=60)
@given(lengths=groups, share_prefix=st.booleans(), seed=st.integers(0, 10**6))
def test_a_row_has_each_token_once_and_each_path_in_order(
    lengths: list[Group], share_prefix: bool, seed: int
) -> None:
    samples = make_samples(lengths, seed=seed, num_forks=6)
    batch = pack(samples, share_prefix=share_prefix)
    prompts = {s.prompt_key: s.prompt_ids.size for s in samples}
    num_tokens = sum(s.num_inputs for s in samples)
    if share_prefix:
        num_tokens += sum(prompts.values()) - sum(s.prompt_ids.size for s in samples)
    assert batch.input_ids.size == num_tokens
    assert all(
        len(x) == s.num_inputs for x, s in zip(batch.input_places(samples), samples, strict=True)
    )
    sequence_of = {
        s.start + i: s.sequence[: s.context_length + i + 1]
        for s in batch.segments
        for i in range(s.length)
    }
    sources = iter(batch.predict_index[batch.target_place].tolist())
    for sample in samples:
        for token in range(sample.response_ids.size):
            source = next(sources)
            path, follows_prompt = path_to(sample, token)
            ids = sample.response_ids[path[:-1]]
            if follows_prompt:
                ids = np.append(sample.prompt_ids, ids)
            if ids.size:
                assert batch.input_ids[sequence_of[source]].tolist() == ids.tolist()
                assert batch.positions[sequence_of[source]].tolist() == list(range(ids.size))


def test_branches_that_continue_are_one_segment() -> None:
    batch = pack([session()])
    assert [(s.length, s.context_length) for s in batch.segments] == [
        (7, 0),
        (5, 7),
        (11, 7),
        (4, 18),
        (2, 18),
        (4, 0),
    ]


def test_experts_of_a_tree_are_recorded_and_imposed(models: dict[str, Path]) -> None:
    packed = load(models["qwen3_moe"], torch.float32)
    tree = session()
    trainer = TorchTrainer(packed, optimizer=STILL, objective=OBJECTIVE)
    [[(_, experts)]] = trainer.log_probs_and_routing([[tree]])
    assert experts.shape == (tree.num_inputs, 2, 2)
    [random] = routed([replace(tree, forks=None)], (2, 4, 2), seed=0)
    assert random.routed_experts is not None
    is_input = np.append(
        np.ones(tree.prompt_ids.size, np.bool_), np.isin(np.arange(30), tree.parents)
    )
    imposed = replace(tree, routed_experts=random.routed_experts[is_input[:-1]])
    [[(log_probs, found)]] = trainer.log_probs_and_routing([[imposed]])
    assert (found == imposed.routed_experts).all()
    for leaf in (5, 21, 29):
        path, _ = path_to(tree, leaf)
        index = np.append(np.arange(7), path[:-1] + 7)
        linear = on_path(tree, leaf, tree.mask)
        assert linear is not None
        alone = replace(linear, routed_experts=random.routed_experts[index])
        [[expected]] = packed.log_probs([[alone]])
        np.testing.assert_allclose(log_probs[path], expected, atol=1e-5)


def test_values_are_those_of_each_path(models: dict[str, Path]) -> None:
    critic = PackedValueModel.from_pretrained(models["llama"])
    torch.nn.init.normal_(critic.model.score.weight)
    tree = session()
    [[values]] = critic.values([[tree]])
    for leaf in (5, 21, 29):
        linear = on_path(tree, leaf, tree.mask)
        assert linear is not None
        np.testing.assert_allclose(
            values[path_to(tree, leaf)[0]], critic.values([[linear]])[0][0], rtol=1e-5, atol=1e-5
        )


def test_only_the_longest_path_has_to_fit(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = load(models["llama"])
    for longest in (22, 21):
        monkeypatch.setattr(packed, "_longest", longest)
        if longest == 22:
            packed.log_probs([[session()]])
            continue
        with pytest.raises(BatchError, match="a sample has 22 input tokens; expected at most"):
            packed.log_probs([[session()]])


RING = ParallelConfig(context_parallel_size=2)


def check_alone(path: Path, samples: list[Sample], results: list[Any]) -> None:
    """The metrics of one step are those of one process."""
    trainer = TorchTrainer(load(path, torch.float32), optimizer=STILL, objective=OBJECTIVE)
    expected = trainer.train_step([samples])
    for [metrics], *_ in results:
        assert metrics["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-5)
        assert metrics["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-6)


def step_samples(path: Path) -> list[Sample]:
    samples = [session(), *make_samples([Group(7, [9, 20])], seed=0, num_forks=3)]
    return off_policy(samples, load(path, torch.float32), seed=1)


@pytest.mark.slow
def test_ranks_that_exchange_heads_learn_the_same(
    rank_server: RankServer, models: dict[str, Path]
) -> None:
    path = models["qwen3_moe"]
    samples = step_samples(path)
    parallel = ParallelConfig(context_parallel_size=2, ulysses_sequence_parallel_size=2)
    arguments = str(path), OBJECTIVE, STILL, parallel, [[[samples]]], {}
    check_alone(path, samples, rank_server.shared(2).run("train", *arguments, size=2))


@pytest.mark.slow
def test_a_ring_computes_sequences_of_their_own_and_refuses_branches(
    rank_server: RankServer, models: dict[str, Path]
) -> None:
    path = models["llama"]
    separate = replace(session(), forks=np.array([[22, -2], [27, 21]]))
    [sample] = off_policy([separate], load(path, torch.float32), seed=1)
    pool = rank_server.shared(2)
    arguments = str(path), OBJECTIVE, STILL, RING
    check_alone(path, [sample], pool.run("train", *arguments, [[[[sample]]]], {}, size=2))
    branched = replace(sample, forks=session().forks)
    for error in pool.errors("train", *arguments, [[[[branched]]]], {}, size=2):
        assert re.search("BatchError: forks of a sample share tokens, .* expected ulysses_", error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
    ],
    ids=str,
)
def test_megatron_learns_the_same(
    rank_server: RankServer, models: dict[str, Path], layout: dict[str, Any]
) -> None:
    path = models["llama"]
    samples = step_samples(path)
    options = {"optimizer": STILL, "objective": OBJECTIVE}
    arguments = str(path), layout, options, [[[samples]]]
    check_alone(path, samples, rank_server.shared(2).run("megatron_trains", *arguments, size=2))


@pytest.mark.parametrize(
    ("forks", "message"),
    [
        (np.array([3, 1]), "forks has shape (2,); expected (forks, 2)"),
        (np.array([[3, 1]], np.int32), "forks has dtype int32; expected int64"),
        (np.array([[0, -1]]), "forks[0] is [0, -1]; expected a token from 1 to 4, and an earlier"),
        (np.array([[2, 1], [2, 0]]), "forks[1] is [2, 0]; expected a token from 3 to 4, and"),
        (np.array([[5, 1]]), "forks[0] is [5, 1]; expected a token from 1 to 4, and"),
        (np.array([[3, 3]]), "forks[0] is [3, 3]; expected a token from 1 to 4, and"),
        (np.array([[3, -3]]), "forks[0] is [3, -3]; expected a token from 1 to 4, and"),
        (np.array([[3, -2]]), "forks[0] is [3, -2] and the mask of token 3 is True; expected"),
    ],
    ids=str,
)
def test_forks_that_make_no_tree_are_refused(forks: NDArray[Any], message: str) -> None:
    with pytest.raises(BatchError, match=f"^{re.escape(message)}"):
        Sample(prompt_ids=np.array([1]), response_ids=np.arange(5), forks=forks)


def test_a_reward_at_the_end_needs_one_end() -> None:
    with pytest.raises(BatchError, match=r"^forks is .*; expected None for a reward at the end"):
        scored_at_end(session())
