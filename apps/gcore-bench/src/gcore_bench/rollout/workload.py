"""Requests that every engine generates for, and the shapes of the models. Importing this module imports no torch."""

from dataclasses import replace

import numpy as np

from gcore_bench.harness.models import small_shape
from gcore_bench.rollout.options import RolloutOptions
from gcore_placement import TransformerWorkload
from gcore_rollout import Request, SamplingParams

_LAYERS = 4
_HEADS = 4
_SYNC_HIDDEN_SIZE = 768
_SYNC_HEADS = 12
SYNC_MAX_LENGTH = 1024
_WARMUP_TOKENS = 4
_FLOAT32_BYTES = 4


def make_requests(options: RolloutOptions) -> list[Request]:
    """Make prompts with long-tailed lengths of samples, which all samples reach: there is no end-of-sequence token."""
    rng = np.random.default_rng(options.seed)
    requests: list[Request] = []
    for number in range(options.prompts):
        shortest = -(-options.max_prompt_length // 3)
        prompt = rng.integers(1, options.vocab_size, int(rng.integers(shortest, options.max_prompt_length + 1)))
        length = round(options.median_length * float(np.exp(options.sigma * rng.normal())))
        requests.append(
            Request(
                request_id=f"prompt-{number}",
                prompt_token_ids=tuple(prompt.tolist()),
                sampling=SamplingParams(max_tokens=min(max(length, 1), options.max_response_length)),
                n=options.n,
                seed=options.seed + number,
            )
        )
    return requests


def warmup_requests(options: RolloutOptions) -> list[Request]:
    """Make the same requests with a few tokens each."""
    return make_requests(replace(options, max_response_length=min(options.max_response_length, _WARMUP_TOKENS)))


def num_tokens(options: RolloutOptions) -> int:
    """Return the number of tokens of all samples."""
    return sum(r.n * r.sampling.max_tokens for r in make_requests(options))


def max_length(options: RolloutOptions) -> int:
    """Return the length of the longest prompt with the longest sample."""
    return options.max_prompt_length + options.max_response_length


def sync_request(options: RolloutOptions) -> Request:
    """Make the request whose samples run during an update of weights, until they are aborted."""
    return Request(
        request_id="running",
        prompt_token_ids=(1, 2, 3, 4),
        sampling=SamplingParams(max_tokens=SYNC_MAX_LENGTH - 4),
        # Two engines divide them.
        n=max(2, options.n),
        seed=options.seed,
    )


def generation_shape(options: RolloutOptions) -> TransformerWorkload:
    """Return the shape of the model that generates."""
    return small_shape(options.hidden_size, layers=_LAYERS, heads=_HEADS, vocab_size=options.vocab_size)


def sync_shape(options: RolloutOptions) -> TransformerWorkload:
    """Return the shape of the model whose weights are updated, with the layers that come closest to ``sync_mb``."""
    hidden = _SYNC_HIDDEN_SIZE
    # Queries and outputs; keys and values of half as many heads; three matrices of three times the hidden size.
    layer_bytes = (2 + 1 + 9) * hidden**2 * _FLOAT32_BYTES
    rest_bytes = options.sync_mb * 2**20 - options.vocab_size * hidden * _FLOAT32_BYTES
    return small_shape(
        hidden, layers=max(1, round(rest_bytes / layer_bytes)), heads=_SYNC_HEADS, vocab_size=options.vocab_size
    )
