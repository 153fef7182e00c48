"""The `sglang_server` engine, of an SGLang server that runs elsewhere."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gcore_rollout.engines.protocol import FinishReason, Request
from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.engines.repetition import extend_runs, is_repetitive, runs_at_end
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.engine import Controls, ServerEngine
from gcore_rollout.engines.servers.served import RunningSample, StreamPiece
from gcore_rollout.errors import RequestError, RolloutError

# Below this SGLang takes the most probable token.
_MIN_TEMPERATURE = 1e-6


class SGLangServerEngine(ServerEngine):
    """Generates on an SGLang server (0.5.23), tokens in and tokens out.

    The server has to be started by::

        python -m sglang.launch_server --model-path MODEL --skip-tokenizer-init --incremental-streaming-output \\
            --disable-overlap-schedule

    for `sleep` to free memory with ``--enable-memory-saver``, and to keep the weights then with
    ``--enable-weights-cpu-backup``. With overlapped scheduling, a token sampled with old
    weights may come out after an update, and would carry the new version. Seeds count only with
    ``--enable-deterministic-inference``, which SGLang does not offer on CPU.

    A completion ends at every token that the model's generation config declares as an end, in any case. SGLang detects
    no repetitions: this class does, and ends the sample; tokens in flight are dropped. It answers no abort while it is
    paused: a sample aborted then has the tokens that came until `pause` returned. The version of each token is the
    server's own record; in these two cases, it is the one seen from here.

    See `ServerEngine` for the loss of the server, and for its exclusive use.

    Example:
        >>> async def count_tokens(url: str, request: Request) -> int:
        ...     engine = SGLangServerEngine.connect(url, model_path="model", weights_dir="/dev/shm")
        ...     num_tokens = sum([completion.work async for completion in engine.generate([request])])
        ...     await engine.close()
        ...     return num_tokens
    """

    _GENERATE_PATH: ClassVar[str] = "/generate"
    _CONTROLS: ClassVar[Controls] = {
        "pause": ("/pause_generation", {"body": {"mode": "in_place"}}),
        "resume": ("/continue_generation", {"body": {}}),
        "sleep": ("/release_memory_occupation", {"body": {}}),
        "discard": ("/release_memory_occupation", {"body": {}}),
        "wake": ("/resume_memory_occupation", {"body": {}}),
        "wake_weights": ("/resume_memory_occupation", {"body": {"tags": ["weights"]}}),
        "wake_cache": ("/resume_memory_occupation", {"body": {"tags": ["kv_cache", "cuda_graph"]}}),
    }
    _ENDS_PAUSED_SAMPLES: ClassVar[bool] = False

    @classmethod
    def _ask(cls, client: ServerClient) -> dict[str, Any]:
        info = client.call_blocking("GET", "/server_info")
        if not info["disable_overlap_schedule"]:
            raise RolloutError(
                f"the server at {client.url} overlaps its steps, so tokens would carry wrong versions: "
                "start it with --disable-overlap-schedule"
            )
        # SGLang cuts a longer completion short without saying so.
        return {
            "model_path": info["model_path"],
            "max_length": info["max_req_input_len"],
            "max_num_seqs": 256,
        }

    def _take_over(self) -> None:
        missing = sorted(set(self._declared_eos) - set(self._eos))
        if missing:
            raise ValueError(
                f"eos_token_ids is {self._eos}; expected {missing}, too, where SGLang ends anyway"
            )
        self._client.call_blocking("POST", "/continue_generation", body={})
        label = {"new_version": "0", "abort_all_requests": False}
        self._client.call_blocking("POST", "/update_weight_version", body=label)

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        temperature = request.sampling.temperature
        if 0 < temperature < _MIN_TEMPERATURE:
            raise RequestError(
                f"request {request.request_id!r} has temperature {temperature}: "
                f"SGLang takes 0 (greedy) or {_MIN_TEMPERATURE} and above"
            )

    def _body(self, sample: QueuedSample, server_id: str) -> dict[str, Any]:
        sampling = sample.request.sampling
        return {
            # An abort ends all requests whose id starts with the given one: these ids all have one length.
            "rid": server_id,
            "input_ids": sample.start_token_ids,
            "stream": True,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": self._cache_salt,
            "sampling_params": {
                "max_new_tokens": sampling.max_tokens - sample.prefix_length,
                "temperature": sampling.temperature,
                "sampling_seed": sample.generator_seed,
                "stop_token_ids": self._eos,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                # The model's own generation config may hold others.
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
        }

    def _reader(self, running: RunningSample) -> Callable[[Any], StreamPiece]:
        sampling = running.sample.request.sampling
        detection = sampling.repetition_detection
        if detection is None:
            return partial(self._read_piece, running)
        prefix = running.sample.prefix.token_ids
        sizes = np.array(
            [[detection.min_pattern_size], [detection.max_pattern_size], [detection.min_count]]
        )
        tokens_1T = np.zeros((1, sampling.max_tokens), np.int64)
        length = prefix.size
        tokens_1T[0, :length] = prefix
        runs_1P = runs_at_end(prefix, detection.max_pattern_size)[None]

        def read(event: Any) -> StreamPiece:
            nonlocal length
            piece = self._read_piece(running, event)
            for end, token in enumerate(piece.token_ids, start=1):
                tokens_1T[0, length] = token
                extend_runs(runs_1P, tokens_1T, np.array([length]))
                length += 1
                is_stop = end == len(piece.token_ids) and piece.finish_reason == "stop"
                if is_repetitive(runs_1P, *sizes)[0] and not is_stop:
                    return StreamPiece(
                        token_ids=piece.token_ids[:end],
                        log_probs=piece.log_probs[:end],
                        finish_reason="repetition",
                        ended_here=True,
                    )
            return piece

        return read

    def _read_piece(self, running: RunningSample, event: Any) -> StreamPiece:
        meta = event["meta_info"]
        end: dict[str, Any] | None = meta["finish_reason"]
        if end is not None and end["type"] == "abort" and end.get("status_code"):
            raise self._failure(
                running.sample, status=int(end["status_code"]), answer=end["message"]
            )
        # Only new tokens come, except with some aborts: then all do.
        num_new = meta["completion_tokens"] - len(running.token_ids)
        entries: list[Any] = (meta.get("output_token_logprobs") or [])[-num_new:] if num_new else []
        return StreamPiece(
            token_ids=[entry[1] for entry in entries],
            log_probs=[entry[0] for entry in entries],
            finish_reason=None
            if end is None
            else self._finish_reason(end["type"], running, entries),
            version_spans=meta.get("weight_versions"),
        )

    def _finish_reason(
        self, reason: str, running: RunningSample, entries: list[Any]
    ) -> FinishReason:
        match reason:
            case "stop" | "length":
                return reason
            case "abort":
                # SGLang does not look at the token that it samples while it takes notice of an abort.
                if entries and entries[-1][1] in self._eos:
                    return "stop"
                sample = running.sample
                num_tokens = sample.prefix_length + len(running.token_ids) + len(entries)
                return "length" if num_tokens == sample.request.sampling.max_tokens else "abort"
            case _:
                raise RolloutError(
                    f"SGLang ended a sample for the reason {reason!r}; expected stop, length or abort"
                )

    async def _abort_on_server(self, server_ids: Sequence[str]) -> None:
        calls = (
            self._client.call("POST", "/abort_request", body={"rid": server_id})
            for server_id in server_ids
        )
        await asyncio.gather(*calls)

    async def _settle(self) -> None:
        # The pause was only queued: this call is answered after the last step.
        await self._client.call("GET", "/server_info")
        await super()._settle()

    async def _load_on_server(self, folder: Path, version: int) -> None:
        # Flushing would fail while samples run; what is cached has the older version in its key.
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": False}
        await self._client.call("POST", "/update_weights_from_disk", body=body)
