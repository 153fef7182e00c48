"""The `hf` engine with static shapes: the same tokens as without, on CPU; and the operations of its CUDA steps."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from engine_oracles import (
    TinyModel,
    assert_equal,
    collect,
    errors,
    in_parts,
    make_request,
    reference_after_swap,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from gcore_rollout import (
    EngineModelError,
    HFEngine,
    RepetitionDetection,
    Request,
    RequestError,
)
from gcore_rollout.engines.hf import static_engine
from gcore_rollout.engines.hf.decoding import ATTENTION_NAME, SlotCache
from gcore_rollout.engines.hf.static import StaticDecoder, _Graphs, uniforms_on_device  # pyright: ignore[reportPrivateUsage]  # recorded on CUDA alone
from gcore_rollout.engines.hf.static_engine import StaticHFEngine, engine_of_mode
from gcore_rollout.engines.queueing import uniforms

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def _crowd() -> list[Request]:
    """Prompts up to 326 tokens, so that keys are rounded up to two sizes, and ends by length, stop and repetition."""
    detection = RepetitionDetection(max_pattern_size=6, min_count=2)
    crowd = [
        make_request(
            f"c{i}",
            1 + 65 * (i % 6),
            n=1 + i % 3,
            max_tokens=1 + 9 * i,
            temperature=0.5 * (i % 4),
            seed=i,
        )
        for i in range(9)
    ]
    return [
        replace(r, sampling=replace(r.sampling, repetition_detection=detection)) for r in crowd[::2]
    ] + crowd[1::2]


@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.slow), 5, 12, 64])
async def test_tokens_are_those_of_dynamic_shapes(tied: TinyModel, max_num_seqs: int) -> None:
    """Slots are filled again while others run, and every completion is the same."""
    expected = await collect(
        HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs), *_crowd()
    )
    engine = HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs, decode_mode="static")
    assert isinstance(engine, StaticHFEngine)
    found = await collect(engine, *_crowd())
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert_equal(found[key], completion, tolerance=1e-5)
    assert {c.finish_reason for c in found.values()} == {"stop", "length", "repetition"}
    assert engine.stats().completion_tokens == sum(len(c.token_ids) for c in found.values())


def _reading_late(path: Path, **options: Any) -> Any:
    """Return an engine that reads a block of tokens after the next one is launched, as on CUDA."""
    engine: Any = HFEngine.from_pretrained(path, decode_mode="static", **options)
    engine._reads_late = True
    return engine


@pytest.mark.parametrize("max_num_seqs", [pytest.param(1, marks=pytest.mark.slow), 5, 12, 64])
async def test_blocks_read_late_are_the_same(tied: TinyModel, max_num_seqs: int) -> None:
    """A block is read once the next one is launched: samples that end meanwhile leave, others move and join."""
    expected = await collect(
        HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs), *_crowd()
    )
    engine = _reading_late(tied.path, max_num_seqs=max_num_seqs)
    events: list[tuple[str, int]] = []
    launch = engine._decoder.launch

    def noted_launch(*arguments: Any, **options: Any) -> Any:
        block = launch(*arguments, **options)
        if block is not None:
            number = sum(event == "launch" for event, _ in events)
            events.append(("launch", number))
            read = block.read
            block.read = lambda: (events.append(("read", number)), read())[1]
        return block

    engine._decoder.launch = noted_launch
    found = await collect(engine, *_crowd())
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert_equal(found[key], completion, tolerance=1e-5)
    assert engine.stats().completion_tokens == sum(len(c.token_ids) for c in found.values())
    read_late = [
        events.index(("launch", n)) < events.index(("read", n - 1)) for _, n in events if n
    ]
    assert sum(read_late) > 8
    for i, (event, number) in enumerate(events):
        ahead = sum(e == "launch" for e, _ in events[:i]) - sum(e == "read" for e, _ in events[:i])
        assert ahead <= (1 if event == "launch" else 2), "at most one block late"
        assert event == "launch" or number == sum(e == "read" for e, _ in events[:i]), "in order"


class _LateStream:
    """Does the copies of its context as late as CUDA may: when the host waits for an event after them."""

    queue: list[Callable[[], object]]

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.queue = []
        self.waited = 0

    def wait_stream(self, other: object) -> None:
        assert other == f"current stream of {self.device}"
        self.waited += 1

    @contextmanager
    def as_current(self) -> Generator[None]:
        stream = self

        class Late(TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func is not torch.Tensor.copy_:
                    return func(*args, **(kwargs or {}))
                assert (kwargs or {}) == {"non_blocking": True}
                stream.queue.append(partial(func, *args))
                return args[0]

        with Late():
            yield


class _LateEvent:
    def __init__(self, *, blocking: bool) -> None:
        assert blocking
        self._before: list[Callable[[], object]] = []

    def record(self, stream: _LateStream) -> None:
        assert stream.waited, "the copies start after the tokens were drawn"
        self._before, stream.queue = stream.queue, []

    def synchronize(self) -> None:
        for copy in self._before:
            copy()


async def test_tokens_are_copied_on_a_stream_of_its_own(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's branch with a stand-in for its streams, which copies at the last moment: nothing was overwritten."""
    pinned: list[torch.Size] = []
    zeros = torch.zeros

    def noting_zeros(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = zeros(*size, **options)
        if pin_memory:
            pinned.append(tensor.shape)
        return tensor

    cuda = {"Stream": _LateStream, "Event": _LateEvent, "stream": _LateStream.as_current}
    for name, value in {**cuda, "current_stream": "current stream of {}".format}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "zeros", noting_zeros)
    expected = await collect(HFEngine.from_pretrained(tied.path, max_num_seqs=5), *_crowd())
    engine = _reading_late(tied.path, max_num_seqs=5)
    for drawn in (engine._decoder._drawn, engine._decoder._next_drawn):
        drawn._is_cuda = True
    found = await collect(engine, *_crowd())
    assert found.keys() == expected.keys()
    for key, completion in expected.items():
        assert_equal(found[key], completion, tolerance=1e-5)
    assert len(pinned) == 4, "tokens and log-probabilities of two blocks"


async def test_calls_find_the_tokens_of_blocks_in_flight(tied: TinyModel) -> None:
    """An update, an abort and a sleep: every token is recorded first, under the weights that it was drawn with."""
    engine = _reading_late(tied.path, max_num_seqs=5)
    request = make_request("r", 20, n=3, max_tokens=60, temperature=1.0)
    running = asyncio.create_task(collect(engine, request))
    while engine.stats().completion_tokens < 30:
        await asyncio.sleep(0)
    assert engine._in_flight is not None
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    assert engine._in_flight is None
    found = await running
    for completion in found.values():
        num_old = int((completion.weight_versions == 0).sum())
        expected = reference_after_swap(tied.old, tied.new, request, completion.token_ids, num_old)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-5, rtol=0)
    assert {0, 1} <= {v for c in found.values() for v in c.weight_versions.tolist()}
    # All samples have left, and a block that none of them needs may be on its way.
    await engine.sleep()
    assert engine._in_flight is None
    await engine.wake()
    found, num_aborts = await in_parts(engine, request, num_tokens=40)
    assert num_aborts > 1
    whole = await collect(engine, request)
    for key, completion in whole.items():
        assert_equal(found[key], completion, tolerance=1e-5)
    # A caller that leaves takes its samples along.
    async with aclosing(engine.generate([request, replace(request, request_id="s")])) as samples:
        await anext(samples)
    assert engine.stats().num_running == 0
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5
    await engine.close()


async def test_free_slots_stay_finite(tied: TinyModel) -> None:
    """Free slots are computed along, and what they leave in the cache must not spoil the samples that follow there."""
    engine = _reading_late(tied.path, max_num_seqs=8)
    await collect(engine, make_request("long", 300, n=8, max_tokens=20))
    requests = [make_request(f"r{i}", 3 + i, n=1, max_tokens=5 + 9 * i) for i in range(6)]
    assert max(errors(tied.old, requests, await collect(engine, *requests))) < 1e-5
    assert all(bool(b.isfinite().all()) for b in (*engine._cache.keys, *engine._cache.values))


async def test_interrupted_equals_uninterrupted(tied: TinyModel) -> None:
    expected = await collect(HFEngine.from_pretrained(tied.path), *_crowd())
    engine = HFEngine.from_pretrained(tied.path, max_num_seqs=5, decode_mode="static")
    found, num_aborts = await in_parts(engine, *_crowd(), num_tokens=60)
    assert num_aborts > 2
    for key, completion in expected.items():
        assert_equal(found[key], completion, tolerance=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(
            **SIZES,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            attn_logit_softcapping=0.5,
            query_pre_attn_scalar=4,
        ),
        GptOssConfig(
            **SIZES,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=8,
            num_experts_per_tok=2,
            num_local_experts=4,
        ),
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ],
    ids=lambda config: config.model_type,
)
async def test_architectures(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Windows, caps, sinks, and experts: the log-probs are those of transformers."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    requests = [
        make_request(f"r{i}", 3 + 10 * i, n=2, temperature=0.7, max_tokens=20) for i in range(4)
    ]
    engine = HFEngine.from_pretrained(tmp_path, max_num_seqs=4, decode_mode="static")
    assert max(errors(model, requests, await collect(engine, *requests))) < 1e-5


async def test_weights_stay_where_they_are(tied: TinyModel) -> None:
    """Graphs read them there, so that weights given in place are copied; and keys and values while nothing grows."""
    engine = cast(Any, HFEngine.from_pretrained(tied.path, max_model_len=64, decode_mode="static"))
    request = make_request("r", 20, n=2, max_tokens=40)
    await collect(engine, request)
    before = engine._decoder._addresses()
    assert await engine.update_weights_in_place(tied.new.state_dict().items(), version=1) is False
    found = await collect(engine, request, make_request("s", 3, n=30, max_tokens=7))
    assert engine._decoder._addresses() == before
    assert max(errors(tied.new, [request], {k: c for k, c in found.items() if k[0] == "r"})) < 1e-5


async def test_sleep_frees_and_wake_computes_again(tied: TinyModel) -> None:
    engine = cast(Any, HFEngine.from_pretrained(tied.path, decode_mode="static"))
    request = make_request("r", 20, n=2, max_tokens=40)
    before = await collect(engine, request)
    await engine.sleep()
    assert [b for b in engine._cache.keys if b is not None] == []
    await engine.wake()
    after = await collect(engine, request)
    for key, completion in before.items():
        assert_equal(after[key], completion, tolerance=0)


class RecordedSteps(_Graphs):
    """In place of CUDA graphs, steps that note where everything lay when they were recorded, and must find it there."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self._graphs, self._addresses = decoder, {}, ()
        self.num_recorded = self.num_drops = 0

    def drop(self) -> None:
        self._graphs.clear()
        self.num_drops += 1

    def _record(self, size: int, length: int, truncates: bool) -> Any:
        addresses, decoder = self._decoder._addresses(), self._decoder
        self.num_recorded += 1

        class Step:
            def replay(self) -> None:
                assert decoder._addresses() == addresses
                decoder._advance(size, length, truncates)

        return Step()


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_graphs_are_recorded_again_after_a_sleep(tied: TinyModel, keep_weights: bool) -> None:
    """The memory that they read was freed; after an update without a sleep it is where it was."""
    engine = cast(Any, HFEngine.from_pretrained(tied.path, max_model_len=64, decode_mode="static"))
    decoder = engine._decoder
    graphs = decoder._graphs = RecordedSteps(decoder)
    request = make_request("r", 20, n=2, max_tokens=40)
    await collect(engine, request)
    assert graphs.num_recorded == 1
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    expected, drops, old = await collect(engine, request), graphs.num_drops, decoder._addresses()
    assert graphs.num_recorded == 1
    await engine.sleep(keep_weights=keep_weights)
    assert graphs.num_drops == drops + 1
    assert decoder._addresses() != old
    await engine.wake(cache=False)
    if not keep_weights:
        await engine.update_weights(tied.new.state_dict().items(), version=2)
    await engine.wake()
    found = await collect(engine, request)
    assert graphs.num_recorded == 2
    for key, completion in expected.items():
        assert_equal(found[key], completion, tolerance=0)
    # Should weights ever move in another way, no graph reads them where they were.
    parameter = next(engine._model.parameters())
    parameter.data = parameter.data.clone()
    await collect(engine, request)
    assert graphs.num_recorded == 3


@pytest.mark.parametrize("mode", ["dynamic", "static"])
async def test_memory_for_keys_and_values_limits_the_samples_that_run(
    tied: TinyModel, mode: Any
) -> None:
    """Of two layers, two heads of 32 numbers in float32, keys and values take 1 KiB a token."""
    options: Any = {"max_model_len": 256, "decode_mode": mode}
    engine: Any = HFEngine.from_pretrained(
        tied.path, kv_cache_bytes=(3 * 256 + 255) << 10, **options
    )
    plan = engine.memory_plan
    assert (plan.num_slots, plan.slot_length, plan.bytes_per_token) == (3, 256, 1024)
    assert plan.kv_cache_bytes == 3 * 256 << 10
    request = make_request("r", 200, n=7, max_tokens=56)
    running: list[int] = []
    step = engine._step

    def counted() -> None:
        step()
        running.append(engine.stats().num_running)
        stored = [b for b in (*engine._cache.keys, *engine._cache.values) if b is not None]
        assert sum(b.nbytes for b in stored) <= plan.kv_cache_bytes

    engine._step = counted
    assert max(errors(tied.old, [request], await collect(engine, request))) < 1e-5
    assert max(running) == 3
    with pytest.raises(RequestError, match="257; expected at most 256"):
        await collect(engine, make_request("r", 200, max_tokens=57))
    with pytest.raises(
        ValueError,
        match=r"^kv_cache_bytes is 1,000; expected at least 262,144, the keys and values of",
    ):
        HFEngine.from_pretrained(tied.path, kv_cache_bytes=1000, **options)


async def test_prompts_are_computed_in_parts(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_engine, "_PREFILL_TOKENS", 100)
    engine = HFEngine.from_pretrained(tied.path, decode_mode="static")
    requests = [make_request(f"r{i}", 5 + 29 * i, n=1 + i % 2, max_tokens=3) for i in range(6)]
    assert max(errors(tied.old, requests, await collect(engine, *requests))) < 1e-5


def test_a_mode_that_cannot_be_is_refused(tied: TinyModel) -> None:
    for_mode: Any = HFEngine.from_pretrained
    with pytest.raises(
        ValueError, match=r"^decode_mode is 'fast'; expected auto, dynamic, static, cuda_graphs$"
    ):
        for_mode(tied.path, decode_mode="fast")
    with pytest.raises(
        ValueError, match=r"^decode_mode is 'cuda_graphs' on cpu; expected a CUDA device"
    ):
        HFEngine.from_pretrained(tied.path, decode_mode="cuda_graphs")
    with pytest.raises(
        EngineModelError,
        match=r"^decode_mode is 'static'; expected auto or dynamic for a vision",
    ):
        engine_of_mode("static", tied.old, is_dynamic=True)


@pytest.mark.parametrize(
    ("config", "is_dynamic", "expected"),
    [
        (Qwen2Config(**SIZES), False, True),
        (Qwen3MoeConfig(**SIZES), False, False),
        (
            Qwen2Config(
                **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            False,
            False,
        ),
        (Qwen2Config(**SIZES), True, None),
    ],
    ids=["dense", "experts", "dynamic rope", "vision"],
)
def test_models_whose_steps_wait_for_the_host_are_not_recorded(
    config: PreTrainedConfig, is_dynamic: bool, expected: bool | None
) -> None:
    """Whether graphs are used; None: shapes are dynamic."""

    class Model:
        device = torch.device("cuda")

    model: Any = Model()
    model.config = config
    make: Any = engine_of_mode("auto", model, is_dynamic=is_dynamic)
    if expected is None:
        assert make is HFEngine
    else:
        assert make.func is StaticHFEngine
        assert make.keywords == {"use_graphs": expected}


def test_uniforms_on_the_device_are_those_of_the_host() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 1000, np.uint64)
    positions = rng.integers(0, 2**31, 1000)
    found = uniforms_on_device(torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions))
    assert found.numpy().tolist() == uniforms(seeds, positions).tolist()


class _Operations(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_step_on_cuda_does_not_wait_for_the_host(dtype: torch.dtype) -> None:
    """By fake tensors, which have no values to wait for; shapes, types and arguments are checked as on CUDA."""
    config: Any = Qwen2Config(**SIZES)
    config._attn_implementation = ATTENTION_NAME
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with FakeTensorMode(), torch.inference_mode():
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                        tensors[name] = torch.nn.Parameter(fake, requires_grad=False)
        cache = SlotCache(num_layers=2)
        decoder: Any = StaticDecoder(model, cache, max_num_seqs=16, use_graphs=False)
        cache.reserve(16, 512)
        with _Operations() as operations:
            decoder._advance(16, 512)
        assert cache.bytes_per_token == 4 * 2 * 16 * dtype.itemsize
        assert {b.device.type for b in cache.keys if b is not None} == {"cuda"}
    assert operations.names.isdisjoint(
        {"_local_scalar_dense", "nonzero", "is_pinned", "_pin_memory"}
    )
    assert {"searchsorted", "cumsum", "index_put_", "embedding"} <= operations.names
