"""Turns of a vLLM server that runs elsewhere, by its API of completions: tokens in, and tokens with log-probs out."""

import json
from collections.abc import Sequence
from typing import Any

import aiohttp

from gcore_agents.errors import CallError, SamplerError
from gcore_agents.sampler import SampledTokens

_CONNECT_TIMEOUT_S = 30.0
_PLAIN_SAMPLING = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Nothing but the temperature changes the distribution, whatever defaults the server has of its model."""


class ServerSampler:
    """A `TokenSampler` on a plain ``vllm serve MODEL`` (0.32).

    The server's log-probs are of the distribution that is sampled from at a temperature of 1. For another one start it
    with ``--logprobs-mode processed_logprobs``.

    Args:
        base_url: such as http://127.0.0.1:8000/v1.
        model: name of the model on the server.
        temperature: more than 0.
        api_key: the key that the server was started with, if any.
        timeout_s: longest time of a turn.

    Raises a `SamplerError` if the server refuses a prompt, cannot be reached, or does not report tokens.

    Example:
        >>> sampler = ServerSampler("http://127.0.0.1:8000/v1", "Qwen/Qwen3-8B", temperature=0.7)
        >>> sampler.weight_version
        0
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        temperature: float = 1.0,
        api_key: str = "",
        timeout_s: float = 3600.0,
    ) -> None:
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; expected more than 0")
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; expected http://HOST:PORT/v1")
        self.weight_version = 0
        """Version of the server's weights, which later turns get: set it when they change."""
        self._url = f"{base_url.rstrip('/')}/completions"
        self._model = model
        self._temperature = temperature
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        stop: Sequence[str] = (),
        images: Sequence[bytes] = (),
        image_starts: Sequence[int] = (),
    ) -> SampledTokens:
        """Continue a prompt of tokens; see `TokenSampler`. A `CallError` if it has images."""
        del image_starts
        if images:
            raise CallError(
                f"messages have {len(images)} images; expected text: the completions of {self._url} take tokens alone",
                field="messages",
            )
        version = self.weight_version
        body = {
            "model": self._model,
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": self._temperature,
            **_PLAIN_SAMPLING,
            "seed": seed,
            "stop": list(stop),
            "include_stop_str_in_output": True,
            "logprobs": 0,
            "return_token_ids": True,
            "session_id": session,
        }
        choice = (await self._post(body))["choices"][0]
        token_ids = choice.get("token_ids")
        if token_ids is None:
            raise SamplerError(f"{self._url} returned no token_ids; expected those of vLLM 0.32")
        return SampledTokens(
            token_ids=token_ids,
            log_probs=choice["logprobs"]["token_logprobs"],
            weight_versions=[version] * len(token_ids),
            finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
        )

    async def _post(self, body: dict[str, Any]) -> Any:
        try:
            async with (
                # A connection for each turn: the server may close a kept one at the moment of its use.
                aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as client,
                client.post(self._url, json=body) as response,
            ):
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise SamplerError(f"{self._url} cannot be asked for a turn: {reason}") from error
        if response.status != 200:
            raise SamplerError(f"{self._url} refused a prompt: {response.status} {text:.300}")
        return json.loads(text)
