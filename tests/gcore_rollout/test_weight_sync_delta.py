"""Deltas give back every bit, and refuse weights that they were not made from."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_oracles import VLLM_IMPORT_WARNINGS, TinyModel, make_engine
from hypothesis import given, strategies as st
from weight_sync_oracles import check_behind, check_synced, make_trainer, train

from gcore_rollout import RolloutError
from gcore_rollout.weight_sync.layout import TensorSpec, host_copy
from gcore_rollout.weight_sync.updates import WeightMirror, apply_delta, make_delta

DTYPES = [
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64),
]
State = dict[str, torch.Tensor]


@st.composite
def versions_of_weights(draw: st.DrawFn) -> tuple[State, State]:
    """Two versions of random bits, of which any share is equal."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    old: State = {}
    new: State = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(st.lists(st.integers(0, 9), max_size=3))
        changed = torch.rand(shape, generator=generator) < draw(
            st.sampled_from([0.0, 0.02, 0.3, 1.0])
        )
        old[f"w{number}"], other = (_random(dtype, shape, generator) for _ in range(2))
        new[f"w{number}"] = torch.where(changed, other, old[f"w{number}"])
    return old, new


def _random(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    size = (*shape, dtype.itemsize)
    return (
        torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        .view(dtype)
        .reshape(shape)
    )


def as_bytes(state: State) -> dict[str, Any]:
    flat = {name: tensor.contiguous().view(-1) for name, tensor in state.items()}
    return {
        name: (TensorSpec.of(state[name]), bytes(t.view(torch.uint8).numpy()))
        for name, t in flat.items()
    }


@given(versions_of_weights())
def test_there_and_back_to_the_bit(versions: tuple[State, State]) -> None:
    old, new = versions
    state = {name: host_copy(tensor) for name, tensor in old.items()}
    delta = make_delta(old, new.items(), base_version=3, version=7)
    back = apply_delta(state, delta, version=3)
    assert as_bytes(state) == as_bytes(new)
    changed = {name for name in new if as_bytes({name: old[name]}) != as_bytes({name: new[name]})}
    assert delta.sparse.keys() | delta.dense.keys() == changed
    assert delta.size_bytes <= sum(new[name].nbytes for name in changed)
    assert (back.base_version, back.version) == (7, 3)
    apply_delta(state, back, version=7)
    assert as_bytes(state) == as_bytes(old)


def test_nan_is_unchanged_and_negative_zero_is_not() -> None:
    old = {"w": torch.tensor([float("nan"), 0.0, 1.0, 1.0])}
    new = {"w": torch.tensor([float("nan"), -0.0, 1.0, 1.0])}
    delta = make_delta(old, new.items(), base_version=0, version=1)
    assert delta.sparse["w"][0].tolist() == [1]
    assert delta.size_bytes == 8


def test_the_smaller_form_is_chosen() -> None:
    """A changed bfloat16 takes two bytes, and four more for its position: a third of them is the break-even."""
    old = {name: torch.zeros(3, 100, dtype=torch.bfloat16) for name in ("few", "many", "none")}
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["few"].view(-1)[:99] = 1
    new["many"].view(-1)[:100] = 1
    delta = make_delta(old, new.items(), base_version=0, version=1)
    assert (list(delta.sparse), list(delta.dense)) == (["few"], ["many"])
    assert delta.sparse["few"][0].dtype == torch.int32
    assert delta.size_bytes == 99 * 6 + 600


def test_a_delta_is_no_view_of_the_weights() -> None:
    old, new = (
        {"w": torch.zeros(50), "v": torch.zeros(2)},
        {"w": torch.zeros(50), "v": torch.ones(2)},
    )
    new["w"][7] = 1
    delta = make_delta(old, new.items(), base_version=0, version=1)
    for tensor in new.values():
        tensor.fill_(5)
    apply_delta(old, delta, version=0)
    assert (old["w"].sum(), old["v"].sum()) == (1, 2)
    old["v"].zero_()
    assert delta.dense["v"].sum() == 2


def test_strided_weights_are_compared_as_what_they_are() -> None:
    base = torch.arange(12.0).view(3, 4)
    strided = base.T.contiguous().T
    assert not strided.is_contiguous()
    assert make_delta({"w": base}, [("w", strided)], base_version=0, version=1).size_bytes == 0
    delta = make_delta({"w": base}, [("w", base + torch.eye(3, 4))], base_version=0, version=1)
    with pytest.raises(ValueError, match="weight 'w' is not contiguous"):
        apply_delta({"w": strided}, delta, version=0)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"w": torch.zeros(3)}, r"missing names \['v'\]"),
        ({"w": torch.zeros(3), "v": torch.zeros(2), "u": torch.zeros(1)}, r"unknown names \['u'\]"),
        (
            {"w": torch.zeros(4), "v": torch.zeros(2)},
            r"weight 'w' is float32 \[4\]; expected float32 \[3\]",
        ),
        (
            {"w": torch.zeros(3).half(), "v": torch.zeros(2)},
            r"weight 'w' is float16 \[3\]; expected float32 \[3\]",
        ),
    ],
)
def test_other_weights_are_refused_before_anything_changes(weights: State, message: str) -> None:
    base = {"w": torch.zeros(3), "v": torch.zeros(2)}
    with pytest.raises(ValueError, match=message):
        make_delta(base, weights.items(), base_version=0, version=1)
    delta = make_delta(weights, [(n, t + 1) for n, t in weights.items()], base_version=0, version=1)
    with pytest.raises(ValueError, match=r"weight|unknown names"):
        apply_delta(base, delta, version=0)
    assert all(not tensor.any() for tensor in base.values())


def test_another_version_is_refused() -> None:
    base = {"w": torch.zeros(3)}
    delta = make_delta(base, [("w", torch.ones(3))], base_version=4, version=5)
    with pytest.raises(
        RolloutError, match="changes version 4, but version 3 is here: send a full update"
    ):
        apply_delta(base, delta, version=3)
    assert not base["w"].any()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ((torch.tensor([0, 9]), torch.ones(2)), "an index outside its 9 elements"),
        ((torch.tensor([-1]), torch.ones(1)), "an index outside its 9 elements"),
        ((torch.tensor([0]), torch.ones(2)), r"indices \[1\] and values float32 \[2\]"),
        ((torch.tensor([0]), torch.ones(1).half()), "expected as many of both, of torch.float32"),
    ],
)
def test_a_damaged_delta_is_refused_before_anything_changes(
    part: tuple[torch.Tensor, torch.Tensor], message: str
) -> None:
    base = {"v": torch.zeros(9), "w": torch.zeros(9)}
    new = [("v", torch.eye(9)[0]), ("w", torch.eye(9)[0])]
    delta = make_delta(base, new, base_version=0, version=1)
    damaged = {"v": delta.sparse["v"], "w": part}
    with pytest.raises(ValueError, match=message):
        apply_delta(base, replace(delta, sparse=damaged), version=0)
    with pytest.raises(ValueError, match="changes 'x', which its layout does not have"):
        apply_delta(base, replace(delta, dense={"x": torch.zeros(1)}), version=0)
    assert not base["v"].any()


def test_elements_that_are_too_long_are_refused() -> None:
    base = {"w": torch.zeros(3, dtype=torch.complex128)}
    with pytest.raises(
        ValueError, match="complex128 has elements of 16 bytes; expected 8 or fewer"
    ):
        make_delta(base, base.items(), base_version=0, version=1)


def test_small_steps_of_bfloat16_weights_are_sparse(untied: TinyModel) -> None:
    """The premise: most elements do not move by half a unit in the last place."""
    trainer = make_trainer(untied.path, dtype=torch.bfloat16, lr=1e-5)
    old = {name: tensor.clone() for name, tensor in trainer.export_weights()}
    train(trainer)
    delta = make_delta(old, trainer.export_weights(), base_version=0, version=1)
    full_bytes = sum(tensor.nbytes for tensor in old.values())
    assert 0 < delta.size_bytes < full_bytes / 4


@pytest.mark.parametrize(
    "kind", ["hf", pytest.param("vllm", marks=[pytest.mark.slow, *VLLM_IMPORT_WARNINGS])]
)
async def test_an_engine_follows_a_trainer_by_deltas(kind: str, tied: TinyModel) -> None:
    """The same prompts after every step: nothing that the engine caches of them may stay."""
    engine, trainer = make_engine(kind, tied), make_trainer(tied.path)
    sent = {name: host_copy(tensor) for name, tensor in trainer.export_weights()}
    mirror = WeightMirror(engine, trainer.export_weights())
    for version in (1, 2):
        train(trainer, seed=version)
        await check_behind(engine, trainer)
        delta = make_delta(
            sent, trainer.export_weights(), base_version=version - 1, version=version
        )
        await mirror.apply(delta)
        await check_synced(engine, trainer, version=version)
        apply_delta(sent, delta, version=version - 1)
    await engine.close()
