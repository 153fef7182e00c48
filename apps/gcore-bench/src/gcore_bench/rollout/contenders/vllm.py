"""Bare vLLM: `vllm.LLM.generate` with the settings of `VLLMEngine`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_rollout import Request, sample_seeds

_KV_CACHE_BYTES = 1 << 30


class VLLM:
    """Bare vLLM in this process."""

    def __init__(self, model: Path, *, max_num_seqs: int) -> None:
        from vllm import LLM

        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        options: dict[str, Any] = {
            "kv_cache_memory_bytes": _KV_CACHE_BYTES if not torch.cuda.is_available() else None,
            "max_num_seqs": max_num_seqs,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "async_scheduling": False,
            "enable_chunked_prefill": False,
        }
        self._llm = LLM(str(model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **options)
        # vLLM sets as many threads as there are cores, and then replaces torch's function by one that does nothing.
        torch.set_num_threads = set_num_threads
        set_num_threads(num_threads)

    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Make one vLLM request for each sample, with the seeds that gcore's engine uses."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts: list[Any] = []
        sampling: list[SamplingParams] = []
        for request in requests:
            for seed in sample_seeds(request.seed, np.arange(request.n)).tolist():
                prompts.append(TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)))
                sampling.append(
                    SamplingParams(
                        max_tokens=request.sampling.max_tokens,
                        temperature=request.sampling.temperature,
                        seed=seed >> 1,
                        ignore_eos=True,
                        detokenize=False,
                        logprobs=0,
                        flat_logprobs=True,
                    )
                )
        found: list[Any] = [output.outputs[0] for output in self._llm.generate(prompts, sampling, use_tqdm=False)]
        return sum(len(o.token_ids) for o in found), float(sum(sum(o.logprobs.logprobs) for o in found))
