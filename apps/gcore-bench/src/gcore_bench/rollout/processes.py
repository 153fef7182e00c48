"""Processes of engines, all forked from one server that has imported vLLM and transformers once."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gcore_bench.harness.models import make_model
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.processes import environment, stderr_to
from gcore_bench.rollout.local import as_engine
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import SYNC_MAX_LENGTH, generation_shape, max_length, sync_shape
from gcore_rollout import PRELOAD_HF, PRELOAD_VLLM, Engine, EngineProcess, Request

_ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"


class Processes:
    """Starts processes with one engine each."""

    def __init__(self, *, threads: int, with_vllm: bool) -> None:
        self._threads = threads
        self._preload = (*PRELOAD_VLLM, "vllm.entrypoints.llm", _QWEN2) if with_vllm else (*PRELOAD_HF, _QWEN2)

    async def start(self, name: str, factory: Callable[[], Engine]) -> EngineProcess:
        """Start a process whose engine ``factory`` makes.

        Raises:
            BenchError: the engine could not be made.
        """
        try:
            return await EngineProcess.start(factory, num_threads=self._threads, preload=self._preload)
        except Exception as error:
            raise BenchError(f"{name} could not be started: {error}") from error


@contextmanager
def quiet_surroundings(log: Path, *, threads: int) -> Generator[None]:
    """Set the environment of all processes, and send their stderr and that of this process to ``log``."""
    with environment(**_ENVIRONMENT, OMP_NUM_THREADS=str(threads)), stderr_to(log):
        yield


class _NoGenerator:
    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        raise AssertionError(f"{len(requests)} requests for the process that makes models")


def make_models(folder: Path, options: RolloutOptions) -> Engine:
    """Write ``model`` and ``sync-model`` to ``folder``, in an engine's process; the engine generates nothing."""
    if "generation" in options.parts:
        make_model(folder / "model", generation_shape(options), max_length=max_length(options), seed=options.seed)
    if "sync" in options.parts:
        make_model(folder / "sync-model", sync_shape(options), max_length=SYNC_MAX_LENGTH, seed=options.seed)
    return as_engine(_NoGenerator(), folder / "nothing.json")
