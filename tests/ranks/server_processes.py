"""Servers of other projects, started for tests."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_SERVE_SGLANG = Path(__file__).parents[2] / "scripts" / "sglang-cpu" / "serve"


def free_port() -> int:
    """Return a port for a server that binds it much later: below those that connections get meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("found no free port from 20000 to 31999")


@contextmanager
def served(
    command: Sequence[str], *, port: int, env: Mapping[str, str], log: Path, timeout_s: float
) -> Generator[str]:
    """Run a server and yield its URL once it says that it is well."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _until_well(process, url, log, timeout_s)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=300)
        # What it has started is in its session, too, and must not outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def served_by_vllm(
    model: Path, *options: str, log: Path, env: Mapping[str, str] | None = None
) -> Generator[str]:
    """vLLM with the weights of a model, which may be replaced."""
    port = free_port()
    command = [
        # The `vllm` command asks for a distribution of that name, which vLLM's build for CPU is not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--enable-scale-out", "--generation-config", "vllm"),
        *("--logprobs-mode", "processed_logprobs"),
        *("--skip-tokenizer-init", "--no-enable-chunked-prefill"),
        *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
        *options,
    ]
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        # One process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Else the first log-probs wait for a compiler.
        "TORCH_COMPILE_DISABLE": "1",
        **(env or {}),
    }
    with served(command, port=port, env=variables, log=log, timeout_s=1800) as url:
        yield url


@contextmanager
def served_by_sglang(python: str, model: Path, *, log: Path) -> Generator[str]:
    """SGLang in an environment of its own."""
    port = free_port()
    with served(
        [str(_SERVE_SGLANG), python, str(model), str(port)],
        port=port,
        env={},
        log=log,
        timeout_s=1800,
    ) as url:
        yield url


def _until_well(process: "subprocess.Popen[bytes]", url: str, log: Path, timeout_s: float) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    end = time.monotonic() + timeout_s
    while True:
        with suppress(OSError), opener.open(f"{url}/health", timeout=5):
            return
        if process.poll() is not None or time.monotonic() > end:
            tail = "\n".join(log.read_text().splitlines()[-30:])
            raise RuntimeError(
                f"the server at {url} did not come up (exit status {process.returncode}):\n{tail}"
            )
        time.sleep(0.2)
