"""Processes of engines, all forked from one server that has imported vLLM and transformers once."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from gcore_bench.harness.options import BenchError
from gcore_bench.rollout.options import RolloutOptions
from gcore_rollout import EngineProcess, engine_kind

ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of all processes."""
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"


async def start_engine(
    name: str, factory: Callable[[], Any], options: RolloutOptions, stack: AsyncExitStack
) -> EngineProcess[Any, Any]:
    """Start a process whose engine ``factory`` makes, and which ends with ``stack``; `BenchError` if that fails."""
    with_vllm = "generation" in options.parts and any("vllm" in contender for contender in options.contenders)
    preload = (*engine_kind("vllm").preload, "vllm.entrypoints.llm") if with_vllm else engine_kind("hf").preload
    preload += (_QWEN2,)
    try:
        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            factory, num_threads=options.threads, preload=preload
        )
    except Exception as error:
        raise BenchError(f"{name} could not be started: {error}") from error
    stack.push_async_callback(engine.close)
    return engine
