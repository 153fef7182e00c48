"""Engines whose weights are compared with the trainer's: planted faults, and how much is compared when."""

import os
import pickle
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    collect,
    errors,
    make_engine,
    make_request,
)
from faulty_engines import EXPECTED, EXPERTS, FAULTS, TENSOR, make_faulty
from hypothesis import given, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gcore_rollout import (
    EngineProcess,
    EngineReplicas,
    HFEngine,
    SharedWeights,
    VLLMEngine,
    WrongWeightsError,
)
from gcore_rollout.engines.instrumented import (
    InstrumentedEngine,
    WeightRecord,
    choose_tensors,
    note_costs,
)
from gcore_rollout.engines.registry import PRELOAD_HF, PRELOAD_VLLM
from gcore_rollout.engines.vllm import process as vllm_process
from gcore_rollout.weight_sync import digests as digests_module
from gcore_rollout.weight_sync.digests import (
    DeviceReads,
    Digest,
    DigestedWeights,
    Digests,
    HeldTensor,
    Promised,
    all_digests,
    check_weights,
    digest,
)

pytestmark = VLLM_IMPORT_WARNINGS

CLASSES = {"hf": HFEngine, "vllm": VLLMEngine}
OPTIONS: dict[str, dict[str, Any]] = {"hf": {}, "vllm": {"kv_cache_memory_bytes": 64 << 20}}


def published(model: Any, *, dtype: torch.dtype = torch.float32) -> DigestedWeights:
    """The weights of a model as a trainer exports them: a tied head is left out."""
    return DigestedWeights(model.named_parameters(), dtypes=[torch.float32, dtype])


def between(model: TinyModel, part: float) -> Any:
    """Another version of the weights."""
    return _Weights({n: p + part * (q - p) for (n, p), (_, q) in _pairs(model)})


class _Weights:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()


def _pairs(model: TinyModel) -> Iterator[Any]:
    return zip(model.old.named_parameters(), model.new.named_parameters(), strict=True)


@pytest.mark.parametrize(
    ("folder", "dtype"),
    [
        ("tied", torch.float32),
        ("untied", torch.bfloat16),
        ("mixture", torch.float32),
        ("mixture", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
async def test_sound_engines_pass(
    kind: str, folder: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    """Everything is compared, in whatever layout the engine keeps it."""
    model: TinyModel = request.getfixturevalue(folder)
    engine = InstrumentedEngine(
        make_engine(kind, model, dtype=dtype), name="engine 0", record=WeightRecord()
    )
    held = await engine.held_weights()
    assert held is not None
    published_names = {name for name, _ in model.old.named_parameters()}
    assert {tensor.source for tensor in held.tensors} == published_names
    assert {tensor.name for tensor in held.tensors} == published_names | {"lm_head.weight"}
    await check_weights(engine, all_digests(published(model.old, dtype=dtype)))
    for version, weights in enumerate([model.new, model.old], start=1):
        await engine.update_weights(published(weights, dtype=dtype), version=version)
    with pytest.raises(
        WrongWeightsError, match=r"engine 0 does not have the trainer's weights of version 2: '"
    ):
        await check_weights(engine, all_digests(published(model.new, dtype=dtype)))
    await engine.close()


@pytest.mark.slow
async def test_quantized_weights_are_not_compared(
    tied: TinyModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Made in FP8 of each update, as keys and values are: the rest is compared, and log-probs are near the model's."""
    options: dict[str, Any] = {"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}
    dtype = torch.bfloat16
    vllm = make_engine("vllm", tied, dtype=dtype, engine_args=options)
    engine = InstrumentedEngine(vllm, name="engine 0", record=WeightRecord())
    request = make_request("r", 20, n=4, max_tokens=30)
    for version, model, other in ((1, tied.new, tied.old), (2, tied.old, tied.new)):
        await engine.update_weights(published(model, dtype=dtype), version=version)
        found = await collect(engine, request)
        assert 0.1 < max(errors(model, [request], found)) < 1
        assert max(errors(other, [request], found)) > 3
    held = await engine.held_weights()
    assert held is not None
    names = {tensor.name for tensor in held.tensors}
    linear = {name for name in tied.old.state_dict() if name.endswith("_proj.weight")}
    assert names == tied.old.state_dict().keys() - linear
    assert f"engine 0: {len(linear)} of 26 tensors cannot be compared" in caplog.text
    await engine.close()


@pytest.mark.parametrize("fault", [*FAULTS, "expert"])
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
async def test_planted_faults(kind: str, fault: str, request: pytest.FixtureRequest) -> None:
    model: TinyModel = request.getfixturevalue("mixture" if fault == "expert" else "tied")
    made = make_faulty(CLASSES[kind], model.path, fault, **OPTIONS[kind])
    engine = InstrumentedEngine(made, name="engine 0", record=WeightRecord())
    await check_weights(engine, all_digests(published(model.old)))
    await engine.update_weights(published(between(model, 0.5)), version=1)
    with pytest.raises(WrongWeightsError, match="engine 0 ") as error:
        await engine.update_weights(published(model.new), version=2)
    assert EXPECTED[fault] in str(error.value)
    wrong = {"version": (), "expert": (EXPERTS,)}
    assert error.value.tensors == wrong.get(fault, (TENSOR,))
    await engine.close()


@pytest.mark.slow
async def test_a_tied_head_that_vllm_leaves_packed_as_it_was(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters are right, and the forward uses something else."""
    engine = InstrumentedEngine(make_engine("vllm", tied), name="engine 0", record=WeightRecord())
    await check_weights(engine, all_digests(published(tied.old)))
    monkeypatch.setattr(vllm_process, "repack_head", lambda _: None)
    with pytest.raises(
        WrongWeightsError, match=r"'lm_head.weight' has the values of version 0 \(1 of 27"
    ):
        await engine.update_weights(published(tied.new), version=1)
    await engine.close()


@pytest.mark.slow
async def test_experts_that_vllm_loads_as_another_layout(
    mixture: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernels take packed matrices, and its loader puts others there (as in SkyRL#1680)."""
    engine = InstrumentedEngine(
        make_engine("vllm", mixture), name="engine 0", record=WeightRecord()
    )
    await check_weights(engine, all_digests(published(mixture.old)))
    monkeypatch.setattr(vllm_process, "forget_expert_kernels", lambda _: None)
    with pytest.raises(
        WrongWeightsError, match=r"experts.gate_up_proj' has other values.*\(4 of 25 comp"
    ):
        await engine.update_weights(published(mixture.new), version=1)
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
async def test_faults_in_processes(
    kind: str, tied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica of two has a fault: the update fails as a whole."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    sound = partial(CLASSES[kind].from_pretrained, tied.path, **OPTIONS[kind])
    unsound = partial(make_faulty, CLASSES[kind], tied.path, "permuted", **OPTIONS[kind])
    preload = PRELOAD_VLLM if kind == "vllm" else PRELOAD_HF
    engines = [
        InstrumentedEngine(
            await EngineProcess.start(make, num_threads=1, preload=preload),
            name=f"engine {place}",
            record=WeightRecord(),
        )
        for place, make in enumerate([sound, unsound])
    ]
    replicas = EngineReplicas(engines)
    await check_weights(replicas, all_digests(published(tied.old)))
    await replicas.update_weights(published(between(tied, 0.5)), version=1)
    with pytest.raises(
        WrongWeightsError, match=f"engine 1 .*'{TENSOR}' has its values in another order"
    ):
        await replicas.update_weights(published(tied.new), version=2)
    await replicas.close()


@pytest.mark.slow
async def test_a_replacement_with_other_weights(tied: TinyModel, tmp_path: Any) -> None:
    """It makes no samples: calls that wait for it, and later ones, say what is wrong."""
    tied.new.save_pretrained(tmp_path)

    async def restart() -> InstrumentedEngine:
        return InstrumentedEngine(
            HFEngine.from_pretrained(tmp_path), name="engine 0", record=WeightRecord()
        )

    process: EngineProcess = await EngineProcess.start(
        partial(HFEngine.from_pretrained, tied.path), num_threads=1
    )
    said: list[str] = []
    engines = [InstrumentedEngine(process, name="engine 0", record=WeightRecord())]
    replicas: EngineReplicas[Any, Any] = EngineReplicas(
        engines, restart=restart, announce=said.append
    )
    await check_weights(replicas, all_digests(published(tied.old)))
    os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(
            WrongWeightsError, match="engine 0 does not have the trainer's weights of version 0"
        ):
            await collect(replicas, make_request("r", 5))
    died, refused = said
    pid = process.pid
    expected = f"engine 0 is gone: engine process {pid} was killed by SIGKILL; a replacement is being started"
    assert died == expected
    assert refused.startswith(
        "the replacement of engine 0 could not be used: engine 0 does not have the trainer's"
    )
    await replicas.close()


@given(
    costs=st.lists(st.tuples(st.integers(1, 10 << 20), st.floats(0, 1e-3)), min_size=1, max_size=40)
)
def test_what_is_checked_after_a_step(costs: list[tuple[int, float]]) -> None:
    """Within 1 % of the step but for the least that is checked, and every tensor in its turn."""
    tensors = {
        str(i): held_tensor(str(i), size, seconds) for i, (size, seconds) in enumerate(costs)
    }
    costs_by_name: dict[str, tuple[int, float]] = {}
    note_costs(costs_by_name, list(tensors.values()))
    step_s, seen = 0.1, set[str]()
    for _ in costs:
        names = choose_tensors(costs_by_name, step_s)
        if names is None:
            seen |= tensors.keys()
            break
        assert len(names) >= 4
        if len(names) > 4 and sum(tensors[n].size_bytes for n in names) > 8 << 20:
            assert sum(tensors[n].seconds for n in names[:-1]) <= 0.01 * step_s + 1e-9
        note_costs(costs_by_name, [tensors[name] for name in names])
        seen |= set(names)
    assert seen == tensors.keys()


def held_tensor(name: str, size_bytes: int, seconds: float) -> HeldTensor:
    return HeldTensor(
        name=name,
        source=name,
        dtype="float32",
        size_bytes=size_bytes,
        digest=Digest(0, 0),
        seconds=seconds,
    )


SIZES = [1, 3, 2**16 + 1, 2**18 + 5]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
@pytest.mark.parametrize("size", SIZES)
def test_a_digest_depends_on_every_value_and_on_its_place(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = (100 * torch.randn(size, generator=generator)).to(dtype)
    expected = digest(tensor)
    # Out of another tensor, at a place that is no multiple of eight bytes.
    assert digest(torch.cat([tensor[:1], tensor, tensor])[1 : size + 1]) == expected
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] += 1
        assert digest(changed) != expected
    if size > 1:
        swapped = tensor.clone()
        swapped[0], swapped[-1] = 1, 2
        others = swapped.clone()
        others[0], others[-1] = 2, 1
        assert digest(swapped) != digest(others)


def test_a_digest_does_not_depend_on_how_much_is_read_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices with more memory bandwidth read several blocks at once."""
    tensors = [torch.randn(size) for size in (5, 2**17, 2**17 + 3, 9 * 2**17 + 3)]
    expected = [digest(tensor) for tensor in tensors]
    for num_blocks in (2, 128):
        monkeypatch.setattr(digests_module, "_BLOCKS_AT_ONCE", num_blocks)
        assert [digest(tensor) for tensor in tensors] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_digests_on_an_accelerator_are_the_same(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same operations on CPU, several blocks at a time; the host reads them once, when the first is asked for."""
    words = 1 << 16
    tensors = [
        (100 * torch.randn(size)).to(dtype)
        for size in (0, 1, 7, 5000, 8 * words, 9 * words + 3, 40 * words)
    ]
    expected = [digest(tensor) for tensor in tensors]
    monkeypatch.setattr(digests_module, "_BLOCKS_AT_ONCE", 3)
    reads, sums = DeviceReads(), digests_module.__dict__["_sums"]
    as_digest = digests_module.__dict__["_digest_of"]
    made = [reads.add(sums(tensor), partial(as_digest, tensor.numel())) for tensor in tensors]
    assert [read() for read in made] == expected
    later = Promised({"float32": reads.add(sums(tensors[3]), partial(as_digest, 5000))})
    assert pickle.loads(pickle.dumps(later)) == later == {"float32": expected[3]}


def test_digesting_on_cuda_does_not_wait() -> None:
    """By fake tensors, which have no values to wait for."""
    digests_module.__dict__["_multipliers"].cache_clear()
    try:
        with FakeTensorMode():
            weights = {
                "w": torch.empty(3000, 700, dtype=torch.bfloat16, device="cuda"),
                "b": torch.empty(5, device="cuda"),
            }
            digested = DigestedWeights(weights.items(), dtypes=[torch.float32, torch.bfloat16])
            assert [name for name, _ in digested] == [*digested.digests] == ["w", "b"]
            assert {*digested.digests["w"]} == {"float32", "bfloat16"}
            sums = digests_module.__dict__["_sums"](weights["w"])
            assert (sums.dtype, list(sums.shape), sums.device.type) == (torch.int64, [2], "cuda")
    finally:
        digests_module.__dict__["_multipliers"].cache_clear()


def test_a_digest_of_equal_values() -> None:
    matrix = torch.randn(64, 64)
    assert digest(matrix.t()) == digest(matrix.t().contiguous()) != digest(matrix)
    assert digest(matrix.flip(0)) != digest(matrix)
    assert digest(matrix.flip(0)).unordered == digest(matrix).unordered
    # What a product with the identity makes of a zero.
    assert digest(torch.tensor([-0.0, 1.0])) == digest(torch.tensor([0.0, 1.0]))
    assert digest(torch.zeros(4)) != digest(torch.zeros(5))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_digests_come_with_shared_weights() -> None:
    weights = {"a": torch.randn(5), "b": torch.randn(2, 3)}
    shared = SharedWeights()
    shared.write(DigestedWeights(weights.items(), dtypes=[torch.bfloat16]))
    expected: Digests = {name: {"bfloat16": digest(t.bfloat16())} for name, t in weights.items()}
    assert shared.digests == expected
    shared.write(weights.items())
    assert shared.digests == {}
    shared.close()


async def test_the_next_version_may_be_written_during_an_update(tied: TinyModel) -> None:
    """As when a replacement takes the present weights while the trainer publishes newer ones."""
    shared = SharedWeights()

    class Slow(HFEngine):
        async def update_weights(self, weights: Any, *, version: int) -> None:
            await super().update_weights(weights, version=version)
            shared.write(published(between(tied, 1.0)))

    engine = InstrumentedEngine(
        Slow.from_pretrained(tied.path), name="engine 0", record=WeightRecord()
    )
    shared.write(published(between(tied, 0.5)))
    await engine.update_weights(shared, version=1)
    assert engine.weight_version == 1
    await engine.close()
    shared.close()
