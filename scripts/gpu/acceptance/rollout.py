"""Parts 6 to 8 and 13: the `hf` engine's speed, weights for one in another process, and memory that is given back."""

import asyncio
import gc
import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from acceptance.models import compute_dtype, load_trainer, model_config, model_folder, vocab_size
from acceptance.trial import Trial
from gcore_rollout import Completion, EngineProcess, HFEngine, Request, SamplingParams
from gcore_rollout.weight_sync.shared_weights import SharedCudaWeights, open_weights

_NUM_UPDATES = 4
_START_TIMEOUT_S = 120


def generation(trial: Trial) -> None:
    """Measure the tokens a second of 256 sequences of 512 new tokens each."""
    num_prompts, n, length = (4, 2, 16) if trial.is_small else (32, 8, 512)
    engine = _engine(trial, "0.5B", max_num_seqs=num_prompts * n)

    def sample() -> None:
        asyncio.run(
            generate_all(
                engine, make_requests(trial, num_prompts=num_prompts, n=n, max_tokens=length)
            )
        )

    first = trial.measure_seconds(sample)
    second = trial.measure_seconds(sample)
    num_tokens = num_prompts * n * length
    trial.figure("tokens a second", num_tokens / second, at_least=30_000)
    trial.figure("tokens a second, the first time", num_tokens / first)
    trial.figure("time of a decoding step", 1000 * second / length, "ms")
    if trial.device.startswith("cuda"):
        trial.figure("peak memory", torch.cuda.max_memory_allocated() / 1e9, "GB")
    asyncio.run(engine.close())


def weights(trial: Trial) -> None:
    """Measure how long the weights of 1.5B take to an engine in another process, and over CUDA IPC alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_folder(trial, "1.5B"), dtype=compute_dtype(trial)
    )
    # A tied head is left out.
    state = {
        name: parameter.detach() for name, parameter in model.to(trial.device).named_parameters()
    }
    trial.figure("weights", sum(t.nbytes for t in state.values()) / 1e9, "GB")
    if trial.device.startswith("cuda"):
        with trial.attempt("CUDA IPC"):
            seconds = _over_ipc(state)
            trial.figure("CUDA IPC: handles, copy and reply, first", 1000 * seconds[0], "ms")
            trial.figure(
                "CUDA IPC: later, median", 1000 * float(np.median(seconds[1:])), "ms", at_most=100
            )
    else:
        trial.note("CUDA IPC: only on a GPU.")
    with trial.attempt("an engine in another process"):
        seconds = asyncio.run(_to_engine_process(trial, state))
        trial.figure("engine in another process: first update", 1000 * seconds[0], "ms")
        trial.figure(
            "engine in another process: later, median",
            1000 * float(np.median(seconds[1:])),
            "ms",
            at_most=100,
        )


def sleep(trial: Trial) -> None:
    """Measure what an engine and a trainer that sleep leave on the device, and check that they wake as they were."""
    with trial.attempt("the engine"):
        engine = _engine(trial, "1.5B", max_num_seqs=16)
        requests = make_requests(trial, num_prompts=4, n=2, max_tokens=8)
        before = asyncio.run(generate_all(engine, requests))
        _report_memory(trial, "engine awake")
        _measure_swap(trial, "engine", asyncio.run, engine)
        after = asyncio.run(generate_all(engine, requests))
        trial.count(
            "engine: tokens that differ after waking", _num_different(before, after), at_most=0
        )
        asyncio.run(engine.close())
        del engine
    with trial.attempt("the trainer"):
        trainer: Any = load_trainer(trial, "0.5B", gradient_checkpointing=True)
        before = {name: tensor.cpu() for name, tensor in trainer.export_weights()}
        _report_memory(trial, "trainer awake")
        _measure_swap(trial, "trainer", lambda call: call, trainer)
        after = {name: tensor.cpu() for name, tensor in trainer.export_weights()}
        different = sum(not torch.equal(before[name], after[name]) for name in before)
        trial.count("trainer: tensors that differ after waking", different, at_most=0)


def large_swaps(trial: Trial) -> None:
    """Measure swaps of engines of 7B, a fourth of 32B, and of 32B where it fits; their weights are in memory alone."""
    for size, needed_gb in (("7B", 20), ("32B", 70)):
        if trial.device.startswith("cuda") and torch.cuda.mem_get_info()[0] < needed_gb * 1e9:
            trial.note(f"{size}: needs a device with {needed_gb} GB of free memory.")
            continue
        with trial.attempt(size):
            _swap(trial, size)
        gc.collect()
        if trial.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _swap(trial: Trial, size: str) -> None:
    with torch.device(trial.device):
        model: Any = AutoModelForCausalLM.from_config(
            model_config(trial, size), dtype=compute_dtype(trial)
        )
    engine = HFEngine(model, eos_token_ids=(), max_num_seqs=1)
    trial.figure(
        f"{size}: weights", sum(parameter.nbytes for parameter in model.parameters()) / 1e9, "GB"
    )
    for time, version in (("first", 1), ("with new weights", 2), ("with the same weights", None)):
        if version is not None:
            asyncio.run(engine.update_weights(model.named_parameters(), version=version))
        trial.figure(
            f"{size}: to sleep, {time}",
            trial.measure_seconds(lambda: asyncio.run(engine.sleep())),
            "s",
        )
        trial.figure(
            f"{size}: to wake, {time}",
            trial.measure_seconds(lambda: asyncio.run(engine.wake())),
            "s",
        )


def _measure_swap(trial: Trial, name: str, call: Any, owner: Any) -> None:
    """Put an engine or a trainer to sleep and wake it, twice; ``call`` runs what its methods return."""
    for time in ("the first time", "again"):
        seconds = trial.measure_seconds(lambda: call(owner.sleep()))
        if time == "the first time":
            _report_memory(trial, f"{name} asleep", at_most=0.5)
        trial.figure(f"{name}: to sleep, {time}", seconds, "s")
        trial.figure(
            f"{name}: to wake, {time}", trial.measure_seconds(lambda: call(owner.wake())), "s"
        )


def _report_memory(trial: Trial, name: str, **bounds: float) -> None:
    if trial.device.startswith("cuda"):
        trial.figure(
            f"{name}: memory of the allocator", torch.cuda.memory_reserved() / 1e9, "GB", **bounds
        )
        free, whole = torch.cuda.mem_get_info()
        trial.figure(
            f"{name}: memory in use on the device, contexts included", (whole - free) / 1e9, "GB"
        )


def _engine(trial: Trial, size: str, *, max_num_seqs: int) -> HFEngine:
    """Load an engine whose samples never end by a token."""
    path = model_folder(trial, size)
    return HFEngine.from_pretrained(
        path, max_num_seqs=max_num_seqs, eos_token_ids=(), **_placed(trial)
    )


def _placed(trial: Trial) -> dict[str, Any]:
    return {"dtype": compute_dtype(trial), "device": trial.device}


def make_requests(trial: Trial, *, num_prompts: int, n: int, max_tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=max_tokens)
    prompts = rng.integers(0, vocab_size(trial), (num_prompts, max_tokens // 4 + 1))
    return [
        Request(request_id=str(i), prompt_token_ids=tuple(prompt), sampling=sampling, n=n, seed=i)
        for i, prompt in enumerate(prompts.tolist())
    ]


async def generate_all(
    engine: HFEngine, requests: list[Request]
) -> dict[tuple[str, int], Completion]:
    return {(c.request_id, c.index): c async for c in engine.generate(requests)}


def _num_different(before: dict[Any, Completion], after: dict[Any, Completion]) -> int:
    return sum(int((before[key].token_ids != after[key].token_ids).sum()) for key in before)


async def _to_engine_process(trial: Trial, state: dict[str, torch.Tensor]) -> list[float]:
    """Return the seconds of updates of an engine in another process, which must hold the new weights afterwards."""
    factory = partial(HFEngine.from_pretrained, model_folder(trial, "1.5B"), **_placed(trial))
    engine: EngineProcess = await EngineProcess.start(factory, num_threads=1)
    seconds: list[float] = []
    loop = asyncio.get_running_loop()
    try:
        for version in range(1, _NUM_UPDATES + 1):
            trial.synchronize()
            begin = loop.time()
            await engine.update_weights(state.items(), version=version)
            seconds.append(loop.time() - begin)
        held = await engine.held_weights()
        if held is None or held.version != _NUM_UPDATES:
            trial.error(
                f"the engine's weights are of version {held and held.version}; expected {_NUM_UPDATES}"
            )
    finally:
        await engine.close()
    return seconds


def _over_ipc(state: dict[str, torch.Tensor]) -> list[float]:
    """Return the seconds of transfers to a process that copies the weights and replies."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs,))
    process.start()
    seconds: list[float] = []
    try:
        if not mine.poll(_START_TIMEOUT_S):
            raise TimeoutError("the other process did not start")
        mine.recv()
        loop = asyncio.new_event_loop()
        for _ in range(_NUM_UPDATES):
            begin = loop.time()
            shared = SharedCudaWeights(state.items())
            mine.send_bytes(shared.handles())
            if not mine.poll(_START_TIMEOUT_S):
                raise TimeoutError("the other process did not reply")
            error = mine.recv()
            seconds.append(loop.time() - begin)
            shared.close()
            if error:
                raise RuntimeError(error)
        loop.close()
        mine.send_bytes(b"")
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
    return seconds


def _receive(connection: Connection) -> None:
    """Copy weights into memory of this process until an empty message comes; reply with an error or nothing."""
    held: dict[str, torch.Tensor] = {}
    torch.cuda.init()
    connection.send("ready")
    while handles := connection.recv_bytes():
        error = ""
        try:
            opened = open_weights(handles)
            for name, tensor in opened:
                held.setdefault(name, torch.empty_like(tensor)).copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
            del opened
        except (RuntimeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        connection.send(error)
