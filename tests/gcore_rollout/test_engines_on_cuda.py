"""Engines where they are on a GPU: fake tensors for kernels, and stand-ins for what is called of torch.cuda."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_oracles import TinyModel, collect, make_request
from tiny_pipelines import flow_pipeline
from torch._subclasses.fake_tensor import FakeTensorMode

from gcore_rollout import (
    DiffusersEngine,
    EngineModelError,
    HFEngine,
    RolloutError,
    visible_gpus,
)
from gcore_rollout.engines.diffusion import engine as diffusion_engine
from gcore_rollout.engines.hf import decoding
from gcore_rollout.engines.hf.decoding import Prefill, SlotCache
from gcore_rollout.engines.hf.plain_attention import Rule
from gcore_rollout.engines.hf.static import _Graphs  # pyright: ignore[reportPrivateUsage]  # recorded on CUDA alone
from gcore_rollout.engines.host_weights import HostWeights
from gcore_rollout.engines.vllm.options import OwnGenerators


@pytest.mark.parametrize(("dtype", "num_heads"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_prompts_in_float32_have_equal_heads(
    dtype: torch.dtype, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fused kernel of CUDA takes float32 and unequal heads."""
    found: list[tuple[int, bool]] = []

    def attend(q: Any, k: Any, v: Any, *, enable_gqa: bool, **options: Any) -> torch.Tensor:
        assert options["is_causal"]
        found.append((k.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(decoding, "scaled_dot_product_attention", attend)
    with FakeTensorMode(), torch.device("cuda"):
        cache = SlotCache(num_layers=1)
        cache.reserve(2, 8)
        places = torch.arange(10)
        plan = Prefill(
            cache=cache,
            num_prompts=2,
            max_length=5,
            padded_index=places,
            slots=torch.arange(2),
            prompts=torch.arange(2),
        )
        q, k = torch.zeros(1, 4, 10, 16, dtype=dtype), torch.zeros(1, 2, 10, 16, dtype=dtype)
        out = plan.attend(
            0, q, k, k, Rule(scale=0.25, sliding_window=None, softcap=None, sinks=None)
        )
    assert out.shape == (1, 10, 4, 16)
    assert found == [(num_heads, num_heads == 2)]


class Hosted:
    """Records when weights leave a device that there is not, and when they come back."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def offload(self, version: int) -> None:
        self._calls.append(f"offload {version}")

    def onload(self) -> None:
        self._calls.append("onload")


@pytest.fixture
def engine(tied: TinyModel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine that takes its device for a GPU once its model is checked; ``calls`` are those of the device."""
    made: Any = HFEngine.from_pretrained(
        tied.path, max_num_seqs=4, max_model_len=64, decode_mode="static"
    )
    made.calls = []
    made._device = made._decoder._device = torch.device("cuda:1")
    made._hosted = Hosted(made.calls)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: made.calls.append(f"synchronize {device}")
    )
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: made.calls.append("empty cache"))
    return made


async def test_sleep_gives_the_memory_to_other_processes(engine: Any) -> None:
    await engine.sleep()
    assert engine.calls == ["offload 0", "empty cache"]
    await engine.wake()
    assert engine.calls[2:] == ["onload"]


async def test_an_update_ends_before_its_tensors_may_change(engine: Any, tied: TinyModel) -> None:
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    assert engine.calls == ["synchronize cuda:1"]


def test_keys_and_values_that_do_not_fit_are_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the allocator has reserved and does not use is free, too."""
    decoder = engine._decoder
    wanted = 4 * 512 * decoder._cache.bytes_per_token
    sizes = {
        "mem_get_info": (wanted - 200, 1 << 40),
        "memory_reserved": 300,
        "memory_allocated": 101,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, size=size: size)
    before = decoder._cache.capacity
    with pytest.raises(
        RolloutError, match=rf"take {wanted:,} bytes, and {wanted - 1:,} bytes of cuda:1 are free"
    ):
        decoder.reserve(4, 512)
    assert decoder._cache.capacity == before
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 100)
    decoder.reserve(4, 512)
    assert decoder._cache.capacity >= 512


class Recording:
    """Stands for torch.cuda's streams and graphs: what runs while a graph is recorded runs again in each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.recorded: dict[Any, list[tuple[int, int, bool]]] = {}
        self._now: Any = None
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_: Stream(self, "own"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self, "current"))
        monkeypatch.setattr(torch.cuda, "stream", self.on_stream)
        monkeypatch.setattr(torch.cuda, "graph", self.record)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", partial(Graph, self))
        monkeypatch.setattr(
            torch.cuda, "graph_pool_handle", lambda: self.log.append("pool") or object()
        )
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: self.log.append("synchronize"))
        self.state = torch.zeros(2)

    def advance(self, size: int, length: int, truncates: bool) -> None:
        self.log.append(f"advance {size} {length}")
        if self._now is None:
            self.state += 1
        else:
            self.recorded[self._now].append((size, length, truncates))

    @contextmanager
    def on_stream(self, stream: "Stream") -> Generator[None]:
        self.log.append(f"on {stream.name}")
        yield

    @contextmanager
    def record(
        self, graph: Any, *, pool: Any, stream: "Stream", capture_error_mode: str
    ) -> Generator[None]:
        # Another thread of the process may use CUDA meanwhile.
        assert (stream.name, capture_error_mode) == ("own", "thread_local")
        assert pool is not None
        self.recorded[graph], self._now = [], graph
        try:
            yield
        finally:
            self._now = None


class Stream:
    def __init__(self, recording: Recording, name: str) -> None:
        self.name, self._log = name, recording.log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def replay(self) -> None:
        for arguments in self._recording.recorded[self]:
            self._recording.advance(*arguments)


def test_a_step_is_recorded_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass before the recording leaves no trace; graphs that are dropped have ended, and give up their pool."""
    recording = Recording(monkeypatch)
    graphs = _Graphs(recording.advance, recording.state)
    step = graphs.at((1, 2))
    recording.log.clear()
    for count in (1, 2, 3):
        step(4, 128, False)
        assert recording.state.tolist() == [count, count]
    warmed = ["own waits for current", "on own", "advance 4 128", "current waits for own"]
    assert recording.log == [*warmed, *4 * ["advance 4 128"]]
    recording.log.clear()
    assert graphs.at((1, 2)) == step
    assert recording.log == []
    graphs.at((1, 3))
    assert recording.log == ["synchronize", "pool"]


def test_a_step_that_waits_for_the_host_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording(monkeypatch)

    @contextmanager
    def refused(*args: Any, **options: Any) -> Generator[None]:
        yield
        raise error

    monkeypatch.setattr(torch.cuda, "graph", refused)
    graphs = _Graphs(recording.advance, recording.state)
    error: Exception = RuntimeError("operation not permitted when stream is capturing")
    with pytest.raises(EngineModelError, match=r"not permitted.*decode_mode 'static' may run it"):
        graphs.at((1,))(4, 128, False)
    error = torch.OutOfMemoryError("2 GB")
    with pytest.raises(torch.OutOfMemoryError):
        graphs.at((1,))(4, 128, False)


async def test_a_check_allows_rounding_of_tensor_cores(
    tied: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference that would be an error in float32 is none where products are rounded."""
    engine: Any = HFEngine.from_pretrained(tied.path)
    await collect(engine, make_request("r", 5))
    logits_of = engine._logits_of

    def rounded(*args: Any) -> list[torch.Tensor]:
        return [
            logits + 1e-2 * torch.linspace(-1, 1, logits.shape[-1]) for logits in logits_of(*args)
        ]

    class OnGPU:
        """The model, which says that it is on a GPU after its log-probabilities were computed."""

        def __init__(self) -> None:
            self.device = torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return getattr(engine._model, name)

        def __call__(self, **inputs: Any) -> Any:
            return engine._model(**inputs)

        @property
        def dtype(self) -> torch.dtype:
            self.device = torch.device("cuda")
            return torch.float32

    check = partial(decoding.check_logits, max_length=64, max_num_seqs=4)
    for model in (engine._model, OnGPU()):
        with pytest.raises(EngineModelError, match="differ from those of transformers"):
            check(model, rounded)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    check(OnGPU(), rounded)
    with pytest.raises(EngineModelError, match="differ from those of transformers"):
        check(engine._model, rounded)


@pytest.mark.parametrize("offloads", [False, True])
async def test_a_pipeline_gives_its_memory_to_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offloads: bool
) -> None:
    made: list[list[torch.nn.Module]] = []
    calls: list[str] = []

    def hosted(modules: list[torch.nn.Module], device: torch.device) -> Hosted:
        del device
        made.append(modules)
        return Hosted(calls)

    monkeypatch.setattr(diffusion_engine, "HostWeights", hosted)
    engine: Any = DiffusersEngine.from_pretrained(
        flow_pipeline(tmp_path), offload_text_encoders=offloads
    )
    [moved], parts = made, engine.pipeline
    engine._device = torch.device("cuda:0")
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("empty cache"))
    assert parts.transformer in moved
    assert [own in moved for own in (parts.text_encoder, parts.text_encoder_2)] == [
        not offloads
    ] * 2
    await engine.sleep()
    await engine.wake()
    assert calls == ["offload 0", "empty cache", "onload"]


def test_weights_in_host_memory_are_copied_once_a_version() -> None:
    """Here the device is the CPU itself, from whose tensors these copies are apart."""
    one, two = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(3)
    one.bias = two.bias  # shared
    hosted = HostWeights([one, two], torch.device("cpu"))
    tensors = [one.weight, *two.parameters(), *two.buffers()]
    values = [tensor.data.clone() for tensor in tensors]

    def are_same() -> bool:
        return all(
            torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True)
        )

    hosted.onload()
    assert are_same()
    hosted.offload(version=0)
    places = [tensor.data_ptr() for tensor in tensors]
    assert are_same()
    assert max(places) - min(places) < 64 * len(tensors), "one block"
    hosted.onload()
    assert {*places}.isdisjoint(tensor.data_ptr() for tensor in tensors)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.data.add_(1)
        value.add_(1)
    hosted.offload(version=1)
    assert are_same()
    assert [tensor.data_ptr() for tensor in tensors] == places, "the same memory"
    hosted.onload()
    one.weight.data.add_(1)
    hosted.offload(version=1)
    assert are_same(), "of the same version, and not copied"


def test_generators_of_the_gpu_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    state = ["caller's"]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: state[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new: state.__setitem__(0, new))
    monkeypatch.setattr(
        torch.cuda, "manual_seed", lambda seed: state.__setitem__(0, f"seed {seed}")
    )
    own = OwnGenerators(on_cpu=False)
    with own.in_use(7):
        assert state == ["seed 7"]
        state[0] = "later"
    assert state == ["caller's"]
    with own.in_use():
        assert state == ["later"]


def test_gpus_are_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus("cuda") == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    assert visible_gpus("cuda:1") == ["4", "GPU-7"]
    assert visible_gpus("cpu") == []
