"""The servers of `gcore-bench agents`, and their clients."""

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from gcore_agents import AgentServer, ChatEncoder, SampledTokens, Session, SessionBudget
from gcore_bench.agents import VLLM, AgentsOptions
from gcore_bench.harness.processes import Spec, cpu_seconds, timed
from gcore_bench.harness.report import Figures
from gcore_llm.tiny_model import make_tiny_model, tiny_tokenizer

_PATH = "/v1/chat/completions"
_SERVER = (
    "-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --disable-uvicorn-access-log --enforce-eager "
    '--hf-overrides {"max_position_embeddings":16384} --enable-auto-tool-choice --tool-call-parser hermes'
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "tool",
        "description": "d" * 200,
        "parameters": {"type": "object"},
    },
}


def run(spec: Spec) -> Figures:
    """Return the processor time of a contender's calls, in its process."""
    options: AgentsOptions = spec.options
    if spec.contender == VLLM:
        return asyncio.run(_measure_vllm(spec.folder / "model", options))
    return asyncio.run(_measure_endpoint(options))


async def _measure_vllm(folder: Path, options: AgentsOptions) -> Figures:
    """Return the processor time of a plain ``vllm serve`` on a CPU, without its engine's processes."""
    make_tiny_model(folder, seed=0)
    tiny_tokenizer(chats=True).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, *_SERVER.split(), "--model", str(folder), "--port", str(port)]
    process = psutil.Popen(command, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2"})
    url = f"http://127.0.0.1:{port}"
    try:
        while not await _is_well(f"{url}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with code {process.returncode}")
        start_s = cpu_seconds([process.pid])
        await _run_clients(url, list(map(str, range(options.sessions))), options)
        cpu_s = cpu_seconds([process.pid]) - start_s
    finally:
        process.terminate()
        process.wait()
    num_calls = options.sessions * options.calls
    return {"calls": num_calls, "total_ms": cpu_s / num_calls * 1e3}


async def _is_well(url: str) -> bool:
    await asyncio.sleep(0.5)
    with suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(url) as response:
            return response.ok
    return False


async def _measure_endpoint(options: AgentsOptions) -> Figures:
    engine = _Engine("word " * options.message_words)
    server = AgentServer()
    await server.start()
    keys = list(map(str, range(options.sessions)))
    for key in ("first", *keys):
        server.open(engine.make_session(key))
    # Imports and the first use of the template are no part of a call.
    await _run_clients(server.url, ["first"], options)
    engine.tokenization_s = 0.0
    with timed() as figures:
        await _run_clients(server.url, keys, options)
    num_calls = options.sessions * options.calls
    total_ms = figures["cpu_s"] / num_calls * 1e3
    call_ms = total_ms - engine.tokenization_s / num_calls * 1e3
    return {
        "calls": num_calls,
        "total_ms": total_ms,
        "call_ms": call_ms,
    }


async def _run_clients(url: str, keys: list[str], options: AgentsOptions) -> None:
    """Make the calls in another process, whose time does not count."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_client_process, args=(url, keys, options))
    process.start()
    await asyncio.to_thread(process.join)
    if process.exitcode:
        raise RuntimeError(f"the clients ended with code {process.exitcode}")


def _run_client_process(url: str, keys: list[str], options: AgentsOptions) -> None:
    asyncio.run(_play_sessions(url, keys, options))


async def _play_sessions(url: str, keys: list[str], options: AgentsOptions) -> None:
    """Play all sessions, so many at once: a system message and a question, turns and the results of their calls."""
    text = "word " * options.message_words
    tools = [_TOOL] * options.tools
    connector = aiohttp.TCPConnector(limit=options.at_once)
    at_once = asyncio.Semaphore(options.at_once)
    async with aiohttp.ClientSession(url, connector=connector, raise_for_status=True) as http:

        async def play(key: str) -> None:
            messages: list[Any] = [{"role": "system", "content": text * 5}]
            messages.append({"role": "user", "content": text})
            async with at_once:
                for _ in range(options.calls):
                    body = {
                        "messages": messages,
                        "tools": tools,
                        "max_tokens": 1,
                    }
                    async with http.post(_PATH, json=body, headers={"x-api-key": key}) as response:
                        reply = json.loads(await response.read())
                    turn = reply["choices"][0]["message"]
                    messages += [
                        turn,
                        {
                            "role": "tool",
                            "content": text,
                            "tool_call_id": "call",
                        },
                    ]

        await asyncio.gather(*map(play, keys))


class _Engine:
    """Answers each call with the same turn, and counts the processor time of tokenization."""

    def __init__(self, text: str) -> None:
        self.tokenization_s = 0.0
        self._encoder = ChatEncoder(tiny_tokenizer(chats=True))
        self._tokens = self._encoder.encode(text + '[tool {"query": 1}]<eos>')
        for name in ("first", "next", "read_turn"):
            setattr(self._encoder, name, self._count_time(getattr(self._encoder, name)))

    def _count_time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            result = function(*args, **kwargs)
            self.tokenization_s += time.thread_time() - start_s
            return result

        return call

    def make_session(self, key: str) -> Session:
        """Return a session of this engine."""
        budget = SessionBudget(max_tokens=1 << 30)
        return Session(
            session_id=key,
            key=key,
            sampler=self,
            encoder=self._encoder,
            budget=budget,
        )

    async def sample(self, prompt_ids: Sequence[int], **options: Any) -> SampledTokens:
        """Return the turn."""
        del prompt_ids, options
        size = len(self._tokens)
        return SampledTokens(
            token_ids=self._tokens,
            log_probs=[-0.5] * size,
            weight_versions=[0] * size,
            finish_reason="stop",
        )
