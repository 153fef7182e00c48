"""The `sglang` engine: an SGLang server that this process starts, in an environment of its own."""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from gcore_rollout.engines.servers.local_server import LocalServer
from gcore_rollout.engines.servers.sglang import SGLangServerEngine
from gcore_rollout.errors import RolloutError
from gcore_rollout.weight_sync.shared_weights import without_expandable_segments

_SHARED_MEMORY = Path("/dev/shm")
_NOT_PASSED_ON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this environment that would have the server import from it."""
_ON_CPU = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
)


class SGLangEngine(SGLangServerEngine):
    """Generates on an SGLang server (0.5.23) that `from_pretrained` starts, and `close` ends.

    SGLang and this package need not be installed together: the server runs in the environment of another Python. It
    listens on 127.0.0.1 alone. New weights go to it through a folder in shared memory, which holds them once. The
    server ends with this process, even if that is killed; if the server dies, so does the engine.

    See `SGLangServerEngine` for what SGLang does otherwise than other engines.

    Example:
        >>> def load(path: str) -> SGLangEngine:
        ...     options = ["--enable-deterministic-inference"]
        ...     return SGLangEngine.from_pretrained(path, server_python="sglang/bin/python", server_args=options)
        >>> async def count_tokens(engine: SGLangEngine, request: Request) -> int:
        ...     return sum([completion.work async for completion in engine.generate([request])])
    """

    _server: LocalServer | None = None
    _folder: Path | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        server_python: str = "",
        server_args: Sequence[str] = (),
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        eos_token_ids: Sequence[int] | None = None,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float | None = None,
        enable_sleep_mode: bool = False,
        start_timeout_s: float = 1800.0,
    ) -> Self:
        """Start a server with the weights of a local Hugging Face folder, and connect to it.

        Args:
            device: cpu, or cuda or cuda:N: the first GPU of the server among those that this process sees.
            server_python: the Python of an environment with SGLang.
            server_args: further options of ``python -m sglang.launch_server``.
            max_model_len: longest prompt and completion in tokens; None: the model's.
            max_num_seqs: largest number of running samples.
            eos_token_ids: tokens that end a completion, those of the model among them; None: those.
            tensor_parallel_size: GPUs over which each layer is split.
            gpu_memory_utilization: share of a GPU's memory for weights, keys and values; None: SGLang's choice.
            enable_sleep_mode: have `sleep` free memory, and keep the weights on the host; on a CPU it frees nothing.

        Raises:
            RolloutError: ``server_python`` is no file that can be run, or the server does not start.
        """
        python = Path(server_python).expanduser()
        if not os.access(python, os.X_OK) or not python.is_file():
            raise RolloutError(
                f"server_python is {server_python!r}; expected the Python of an environment with SGLang, such as "
                "~/sglang/bin/python"
            )
        command = [str(python), "-m", "sglang.launch_server"]
        command += [
            "--model-path",
            str(path),
            "--host",
            "127.0.0.1",
            "--dtype",
            str(dtype).removeprefix("torch."),
        ]
        command += [
            "--skip-tokenizer-init",
            "--incremental-streaming-output",
            "--disable-overlap-schedule",
        ]
        command += ["--max-running-requests", str(max_num_seqs)]
        settings: dict[str, Any] = {
            "--context-length": max_model_len,
            "--tp": tensor_parallel_size if tensor_parallel_size > 1 else None,
            "--mem-fraction-static": gpu_memory_utilization,
            "--base-gpu-id": torch.device(device).index,
        }
        for name, value in settings.items():
            if value is not None:
                command += [name, str(value)]
        env = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
        env["HF_HUB_OFFLINE"] = "1"
        if device == "cpu":
            command += _ON_CPU
            env["SGLANG_USE_CPU_ENGINE"] = "1"
        else:
            # Logits are not rounded, as the trainer's are not.
            command.append("--enable-fp32-lm-head")
            if enable_sleep_mode:
                command += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
                # Its memory saver refuses expandable ones.
                for name in env.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
                    env[name] = without_expandable_segments(env[name])
        command += server_args
        folder = Path(
            tempfile.mkdtemp(
                prefix="gcore-sglang-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
            )
        )
        server: LocalServer | None = None
        try:
            server = LocalServer.start(
                lambda port: [*command, "--port", str(port)],
                env=env,
                log=folder / "server.log",
                timeout_s=start_timeout_s,
            )
            engine = cls.connect(
                server.url,
                weights_dir=folder,
                model_path=path,
                max_num_seqs=max_num_seqs,
                eos_token_ids=eos_token_ids,
            )
        except BaseException:
            if server is not None:
                server.stop()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        engine._server = server
        engine._folder = folder
        return engine

    async def close(self) -> None:
        """End the server; calls still generating get a `RolloutError`."""
        await super().close()
        if self._server is not None:
            self._server.stop()
            self._server = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
