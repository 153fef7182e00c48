"""Router replay against transformers, whose routers are made to choose by hand, one sequence at a time."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankServer
from trainer_oracles import (
    SIZES,
    Group,
    deviation,
    gradients,
    load_padded,
    make_samples,
    off_policy,
    routed,
    save_model,
)
from transformers import (
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from gcore_trainer import (
    BatchError,
    MicroBatch,
    OptimizerConfig,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    TrainerError,
    ValueLossConfig,
    ValueObjective,
)

NUM_EXPERTS, TOP_K = 6, 2
SHAPE = (SIZES["num_hidden_layers"], NUM_EXPERTS, TOP_K)
EXPERTS: dict[str, Any] = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 32,
}
QWEN3: dict[str, Any] = EXPERTS | {"head_dim": 16}
OLMOE: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
CONFIGS: dict[str, PreTrainedConfig] = {
    "normalised": Qwen3MoeConfig(**SIZES, **QWEN3, norm_topk_prob=True),
    "raw": Qwen3MoeConfig(**SIZES, **QWEN3, norm_topk_prob=False),
    "shared expert": Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=32),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K),
    "olmoe": OlmoeConfig(**SIZES, **OLMOE),
}
GROUPS = [Group(12, [20, 1, 9]), Group(25, [7, 7]), Group(3, [25])]
OBJECTIVE = PolicyObjective(PolicyLossConfig())


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(CONFIGS["normalised"], tmp_path_factory.mktemp("moe"), seed=1)


def trainer_of(path: Path, **options: Any) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, **options)
    return TorchTrainer(packed, optimizer=OptimizerConfig(lr=1e-2), objective=OBJECTIVE)


def plain_log_probs(model: Any, sample: Sample, chosen: list[torch.Tensor]) -> torch.Tensor:
    """[R] by transformers, whose routers choose the sample's experts where it has any; notes what they chose."""
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    for layer, router in enumerate(routers):

        def forward(hidden: torch.Tensor, router: Any = router, layer: int = layer) -> Any:
            logits = torch.nn.functional.linear(hidden, router.weight)
            probs = logits.softmax(-1)
            indices = probs.topk(TOP_K).indices
            if sample.routed_experts is not None:
                indices = torch.from_numpy(sample.routed_experts[:, layer]).long()
            chosen.append(indices)
            weights = probs.gather(-1, indices)
            if getattr(router, "norm_topk_prob", False):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights, indices

        router.forward = forward
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids[:-1]]))[None]
    logits_RV = model(input_ids=ids).logits[0, sample.prompt_ids.size - 1 :]
    return logits_RV.log_softmax(-1).gather(1, torch.from_numpy(sample.response_ids)[:, None])[:, 0]


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize("name", ["normalised", "raw"])
def test_experts_and_log_probs_are_those_of_transformers(
    tmp_path: Path, name: str, share_prefix: bool
) -> None:
    """What is recorded, and what imposed experts give."""
    path = save_model(CONFIGS[name], tmp_path, seed=3)
    model = load_padded(path)
    trainer = trainer_of(path, share_prefix=share_prefix)
    samples = make_samples(GROUPS, seed=0)
    for batch in (samples, routed(samples, SHAPE, seed=0)):
        [found] = trainer.log_probs_and_routing([batch])
        for sample, (log_probs, experts) in zip(batch, found, strict=True):
            chosen: list[torch.Tensor] = []
            with torch.no_grad():
                expected = plain_log_probs(model, sample, chosen)
            np.testing.assert_allclose(log_probs, expected, atol=1e-4)
            assert np.array_equal(experts, torch.stack(chosen, dim=1).numpy())


def test_gradients_are_those_of_transformers(moe: Path) -> None:
    """Through the experts imposed, the router's weights included."""
    model = load_padded(moe)
    samples = routed(make_samples(GROUPS, seed=5), SHAPE, seed=5)
    for gradient_checkpointing in (False, True):
        packed = PackedModel.from_pretrained(moe, gradient_checkpointing=gradient_checkpointing)
        packed.model.zero_grad()
        packed.score(samples).log_probs.sum().backward()
        actual = gradients(packed.model)
        model.zero_grad()
        torch.stack([plain_log_probs(model, s, []).sum() for s in samples]).sum().backward()
        assert deviation(actual, gradients(model)) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_imposing_what_was_chosen_changes_nothing(tmp_path: Path, name: str) -> None:
    path = save_model(CONFIGS[name], tmp_path, seed=3)
    samples = make_samples(GROUPS, seed=0)
    free, bound = trainer_of(path), trainer_of(path)
    [found] = free.log_probs_and_routing([samples])
    replayed = [
        replace(s, routed_experts=experts) for s, (_, experts) in zip(samples, found, strict=True)
    ]
    assert replayed[0].routed_experts is not None
    assert replayed[0].routed_experts.shape == (samples[0].num_inputs, SHAPE[0], TOP_K)
    assert bound.train_step([replayed]) == free.train_step([samples])
    for name_of, weights in free.state()["model"].items():
        assert torch.equal(bound.state()["model"][name_of], weights)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_routers_choose_where_no_experts_are_known(moe: Path, share_prefix: bool) -> None:
    """As an engine returns them that does not know the experts of some tokens; those of a shared prompt are merged."""
    trainer = trainer_of(moe, share_prefix=share_prefix)
    samples = make_samples(GROUPS, seed=0)
    partly: list[Sample] = []
    for i, sample in enumerate(routed(samples, SHAPE, seed=0)):
        experts = sample.routed_experts
        assert experts is not None
        experts[i % 3 :: 3] = -1
        partly.append(replace(sample, routed_experts=experts))
    [found] = trainer.log_probs_and_routing([partly])
    completed = [
        replace(s, routed_experts=experts) for s, (_, experts) in zip(partly, found, strict=True)
    ]
    [again] = trainer.log_probs_and_routing([completed])
    for sample, (log_probs, experts), (expected, _) in zip(partly, found, again, strict=True):
        imposed = sample.routed_experts
        assert imposed is not None
        is_known = imposed >= 0
        assert (experts[is_known] == imposed[is_known]).all()
        assert (experts >= 0).all()
        np.testing.assert_array_equal(log_probs, expected)
    size = samples[0].prompt_ids.size
    whole = routed(samples, SHAPE, seed=0)[0].routed_experts
    assert whole is not None
    assert np.array_equal(found[0][1][:size], whole[:size]) == share_prefix


def test_experts_stay_when_weights_move(moe: Path) -> None:
    """After updates routers would choose others; replayed tokens still pass through those recorded."""
    trainer = trainer_of(moe)
    samples = make_samples(GROUPS, seed=0)
    [recorded] = trainer.log_probs_and_routing([samples])
    replayed = [
        replace(s, old_log_probs=x, routed_experts=experts)
        for s, (x, experts) in zip(samples, recorded, strict=True)
    ]
    for _ in range(3):
        trainer.train_step([replayed])
    [free] = trainer.log_probs_and_routing([samples])
    [bound] = trainer.log_probs_and_routing([replayed])
    assert not all(np.array_equal(a, b) for (_, a), (_, b) in zip(free, recorded, strict=True))
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(bound, recorded, strict=True))


def micro_batches_of(samples: list[Sample]) -> list[MicroBatch]:
    return [samples[:2], samples[2:3], samples[3:]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "parallel"),
    [
        (2, ParallelConfig()),
        (2, ParallelConfig(context_parallel_size=2, ulysses_sequence_parallel_size=2)),
        (2, ParallelConfig(context_parallel_size=2)),
    ],
    ids=["fsdp2", "ulysses2", "ring2"],
)
def test_ranks_record_and_replay_as_one_process(
    rank_server: RankServer, moe: Path, size: int, parallel: ParallelConfig
) -> None:
    optimizer = OptimizerConfig(lr=1e-3)
    alone = TorchTrainer(PackedModel.from_pretrained(moe), optimizer=optimizer, objective=OBJECTIVE)
    samples = off_policy(make_samples(GROUPS, seed=2), PackedModel.from_pretrained(moe), seed=2)
    [recorded] = alone.log_probs_and_routing([samples])
    steps = [routed(samples, SHAPE, seed=i) for i in range(3)]
    expected = [alone.train_step([s]) for s in steps]
    num_replicas = parallel.data_parallel_size(size)
    dealt = [
        [micro_batches_of(s)[r::num_replicas] for r in range(num_replicas)]
        for s in [samples, *steps]
    ]
    found = rank_server.shared(size).run(
        "record_and_train", str(moe), OBJECTIVE, optimizer, parallel, dealt, size=size
    )
    for rank, (routing, metrics) in enumerate(found):
        replica = rank * num_replicas // size
        own = [
            recorded[[s is t for t in samples].index(True)][1] for m in dealt[0][replica] for s in m
        ]
        assert all(np.array_equal(a, b) for a, b in zip(routing, own, strict=True))
        for a, b in zip(metrics, expected, strict=True):
            assert a["actor/grad_norm"] == pytest.approx(b["actor/grad_norm"], rel=1e-4)
            assert a["actor/pg_loss"] == pytest.approx(b["actor/pg_loss"], abs=1e-5)


def test_a_critic_has_experts_of_its_own(moe: Path) -> None:
    """The policy's routing is not imposed on it."""
    samples = make_samples(GROUPS, seed=0)
    packed = PackedValueModel.from_pretrained(moe)
    torch.nn.init.normal_(packed.model.score.weight)
    critic = TorchTrainer(
        packed, optimizer=OptimizerConfig(), objective=ValueObjective(ValueLossConfig())
    )
    for a, b in zip(
        critic.values([samples])[0], critic.values([routed(samples, SHAPE, seed=0)])[0], strict=True
    ):
        assert np.array_equal(a, b)


def test_a_model_without_routers_records_nothing(qwen2: Path) -> None:
    trainer = trainer_of(qwen2)
    assert trainer.num_routers == 0
    with pytest.raises(TrainerError, match="the model has no routers"):
        trainer.log_probs_and_routing([make_samples(GROUPS, seed=0)])


def test_wrong_routing_is_refused(moe: Path, qwen2: Path) -> None:
    samples = make_samples(GROUPS, seed=0)
    replayed = routed(samples, SHAPE, seed=0)
    first = replayed[0]
    assert first.routed_experts is not None
    size = (first.num_inputs, first.prompt_ids.size, first.response_ids.size)
    message = f"routed_experts has shape ({size[0] - 1}, 2, 2); expected ({size[0]}, layers, experts), for {size[1]} "
    with pytest.raises(BatchError, match=re.escape(message)):
        replace(first, routed_experts=first.routed_experts[1:])
    with pytest.raises(BatchError, match=r"\[\(2, 2\), None\]; expected the same"):
        trainer_of(moe).log_probs([[first, *samples[1:]]])
    with pytest.raises(BatchError, match=r"\(1, 2\): the model has \(2, 2\)"):
        trainer_of(moe).log_probs([[replace(first, routed_experts=first.routed_experts[:, :1])]])
    with pytest.raises(BatchError, match=r"\(2, 2\): the model has \(0,\)"):
        trainer_of(qwen2).log_probs([[first]])
