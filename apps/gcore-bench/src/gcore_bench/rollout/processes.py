"""Processes of contenders, all forked from one server that has imported vLLM and transformers once."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from gcore_bench.environment import QUIET
from gcore_bench.grpo.errors import BenchError
from gcore_rollout import PRELOAD_HF, PRELOAD_VLLM, Engine, EngineProcess

_ENVIRONMENT = {
    **QUIET,
    # What VLLMEngine sets for itself, for bare vLLM too: in this process, without telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"


class Processes:
    """Starts processes, each of which makes one engine."""

    def __init__(self, *, threads: int, with_vllm: bool) -> None:
        self._threads = threads
        self._preload = (*PRELOAD_VLLM, "vllm.entrypoints.llm", _QWEN2) if with_vllm else (*PRELOAD_HF, _QWEN2)

    async def start(self, name: str, factory: Callable[[], Engine]) -> EngineProcess:
        """A process whose engine is made by ``factory``.

        Raises:
            BenchError: it could not be made.
        """
        try:
            return await EngineProcess.start(factory, num_threads=self._threads, preload=self._preload)
        except Exception as error:
            raise BenchError(f"{name} could not be started: {error}") from error


@contextmanager
def quiet_surroundings(log: Path, *, threads: int) -> Generator[None]:
    """The environment of all processes; what they say on stderr goes to ``log``, with what is said here."""
    before = os.environ.copy()
    os.environ.update(_ENVIRONMENT, OMP_NUM_THREADS=str(threads))
    stderr = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
        os.environ.clear()
        os.environ.update(before)
