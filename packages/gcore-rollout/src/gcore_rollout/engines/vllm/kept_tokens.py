"""The tokens that top-k and top-p keep in vLLM, which its second model runner returns."""

from typing import Any

import numpy as np
import torch

from gcore_rollout.engines.kept_tokens import list_kept


def record_kept_tokens(engine: Any) -> None:
    """Have the model runner that vLLM has on CPU, its first one, return the tokens among which each one is drawn.

    There are none where all can be drawn. From the runner's output on they take vLLM's own way.
    """
    engine.engine_core.engine_core.scheduler.return_sampling_mask = True
    engine.collective_rpc(_record_in_sampler)


def _record_in_sampler(worker: Any) -> None:
    from vllm.v1.outputs import SamplingMaskLists

    runner = worker.model_runner
    sample = runner.sampler.sample
    sample_tokens = runner.sample_tokens
    masks: list[SamplingMaskLists] = []

    def sample_and_record(logits_BV: Any, metadata: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sampled_B, log_probs_BV = sample(logits_BV, metadata)
        sets = list_kept(log_probs_BV)
        ends = np.cumsum([0, *map(len, sets)])
        masks.append(SamplingMaskLists(np.concatenate(sets), ends))
        return sampled_B, log_probs_BV

    def sample_and_collect(grammar_output: Any) -> Any:
        output = sample_tokens(grammar_output)
        if masks:
            output.sampling_masks = masks.pop()
        return output

    runner.sampler.sample = sample_and_record
    runner.sample_tokens = sample_and_collect
