"""The `vllm_server` engine, of a `vllm serve` that runs elsewhere."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from gcore_rollout.engines.protocol import Request
from gcore_rollout.engines.queueing import QueuedSample
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.engine import Controls, ServerEngine
from gcore_rollout.engines.servers.served import RunningSample, StreamPiece
from gcore_rollout.engines.vllm.process import FusedExperts, fused_experts
from gcore_rollout.engines.vllm.translation import check_temperature, sampling_settings
from gcore_rollout.errors import RolloutError, ServerRequestError
from gcore_rollout.weight_sync.digests import Digest, HeldTensor, HeldWeights

_WORKER = "gcore_rollout.TiedHeadWorker"


class VLLMServerEngine(ServerEngine):
    """Generates on a `vllm serve` (0.32), tokens in and tokens out.

    The server has to be started by the following command, on CPU with ``--no-enable-chunked-prefill`` in addition::

        VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs \\
            --generation-config vllm --skip-tokenizer-init

    on a GPU with ``--hf-overrides '{"head_dtype": "float32"}'``, so that logits are not rounded, and for `sleep` with
    ``--enable-sleep-mode``; on CPU, where vLLM frees nothing, `sleep` only stops it. vLLM's build for CPU starts with
    ``python -m vllm.entrypoints.openai.api_server --model MODEL`` instead of ``vllm serve MODEL``.

    For new weights of a model with a tied head or a mixture of experts, a server on CPU also needs this package on its
    import path, and ``--worker-extension-cls gcore_rollout.TiedHeadWorker``. vLLM alone would keep the old head, and
    read experts wrongly, so `update_weights` is refused without it. With it, on any device, the server's weights can be
    compared with the trainer's (`held_weights`).

    Temperatures, seeds and continued samples are as in `VLLMEngine`. The version of each token is the server's own
    record. Tokens come one by one, each in a message: a higher ``--stream-interval`` costs less.

    See `ServerEngine` for the loss of the server, and for its exclusive use.

    Example:
        >>> async def count_tokens(url: str, request: Request) -> int:
        ...     engine = VLLMServerEngine.connect(url, model_path="model", weights_dir="/dev/shm")
        ...     num_tokens = sum([completion.work async for completion in engine.generate([request])])
        ...     await engine.close()
        ...     return num_tokens
    """

    _GENERATE_PATH: ClassVar[str] = "/inference/v1/generate"
    _CONTROLS: ClassVar[Controls] = {
        "pause": ("/pause", {"params": {"mode": "keep", "clear_cache": "false"}}),
        "resume": ("/resume", {}),
        "sleep": ("/sleep", {"params": {"level": "1"}}),
        "discard": ("/sleep", {"params": {"level": "2"}}),
        "wake": ("/wake_up", {}),
        "wake_weights": ("/wake_up", {"params": {"tags": "weights"}}),
        "wake_cache": ("/wake_up", {"params": {"tags": "kv_cache"}}),
    }
    _ENDS_PAUSED_SAMPLES: ClassVar[bool] = True

    @classmethod
    def _ask(cls, client: ServerClient) -> dict[str, Any]:
        try:
            config = client.call_blocking("GET", "/server_info", params={"config_format": "json"})[
                "vllm_config"
            ]
        except ServerRequestError as error:
            if error.status != 404:
                raise
            raise RolloutError(
                f"the server at {client.url} does not report its configuration: start `vllm serve` with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from error
        mode = config["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise RolloutError(
                f"the server at {client.url} gives log-probs of the kind {mode!r}: "
                "start it with --logprobs-mode processed_logprobs"
            )
        paths = client.call_blocking("GET", "/openapi.json")["paths"]
        if cls._GENERATE_PATH not in paths:
            raise RolloutError(
                f"the server at {client.url} has no {cls._GENERATE_PATH}: start it with --enable-scale-out"
            )
        return {
            "model_path": config["model_config"]["model"],
            "max_length": config["model_config"]["max_model_len"],
            "max_num_seqs": config["scheduler_config"]["max_num_seqs"],
            "is_on_cpu": config["device_config"]["device"] == "cpu",
        }

    def _take_over(self) -> None:
        if self._client.call_blocking("GET", "/is_sleeping")["is_sleeping"]:
            self._client.call_blocking("POST", "/wake_up")
        self._client.call_blocking("POST", "/update_weight_version", body={"new_version": "0"})

    def _check_request(self, request: Request) -> None:
        super()._check_request(request)
        check_temperature(request)

    def _body(self, sample: QueuedSample, server_id: str) -> dict[str, Any]:
        return {
            "request_id": server_id,
            "token_ids": sample.start_token_ids,
            "stream": True,
            "cache_salt": self._cache_salt,
            "sampling_params": sampling_settings(sample, self._eos),
        }

    def _reader(self, running: RunningSample) -> Callable[[Any], StreamPiece]:  # noqa: ARG002 - each event says all
        return _read_piece

    async def _abort_on_server(self, server_ids: Sequence[str]) -> None:
        # Without ids vLLM would abort everything.
        if server_ids:
            ids = [f"generate-tokens-{server_id}" for server_id in server_ids]
            await self._client.call("POST", "/abort_requests", body={"request_ids": ids})

    async def _check_update_possible(self) -> None:
        if not (self._repacks_head or self._repacks_experts):
            return
        try:
            await self._call_worker("check_worker")
        except ServerRequestError as error:
            raise RolloutError(
                f"the server at {self._client.url} would load the new weights of its tied head or experts wrongly: "
                f"start it with --worker-extension-cls {_WORKER}"
            ) from error

    async def _load_on_server(self, folder: Path, version: int) -> None:
        if self._repacks_experts:
            await self._call_worker("forget_expert_kernels")
        await self._call_worker("reload_weights", kwargs={"weights_path": str(folder)})
        if self._repacks_head:
            await self._call_worker("repack_tied_head")
        await self._client.call(
            "POST", "/update_weight_version", body={"new_version": str(version)}
        )

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        """Have the server digest its weights, as `VLLMEngine.held_weights`; None: it has not this package's worker."""
        self._check_open()
        shapes, experts = self._layout
        arguments = {"shapes": shapes, "experts": experts, "is_tied": self._is_tied, "names": names}
        try:
            answer = await self._call_worker("digest_weights", kwargs=arguments)
        except ServerRequestError:
            return None
        label = await self._client.call("GET", "/weight_info")
        tensors: list[HeldTensor] = []
        # All ranks return the same.
        for fields in answer["results"][0]:
            fields["digest"] = Digest(*fields["digest"])
            tensors.append(HeldTensor(**fields))
        return HeldWeights(version=int(label["weight_version"]), tensors=tensors)

    @cached_property
    def _layout(self) -> tuple[dict[str, tuple[int, ...]], dict[str, FusedExperts]]:
        return fused_experts(self._model_path, self._shapes)

    async def _call_worker(self, method: str, **arguments: Any) -> Any:
        body = {"method": method, **arguments}
        return await self._client.call("POST", "/collective_rpc", body=body)


def _read_piece(event: Any) -> StreamPiece:
    (choice,) = event["choices"]
    content: list[Any] = (choice["logprobs"] or {}).get("content") or []
    return StreamPiece(
        token_ids=choice["token_ids"] or [],
        log_probs=[entry["logprob"] for entry in content],
        finish_reason=choice["finish_reason"],
        version_spans=choice["weight_versions"],
    )
