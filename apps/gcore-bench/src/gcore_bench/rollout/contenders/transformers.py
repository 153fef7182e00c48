"""transformers' own `generate` on one batch, padded on the left, that ends with its longest sample.

Shapes: B samples, T tokens of the longest, P tokens of the longest prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from gcore_rollout import Request


class _LengthsReached(StoppingCriteria):
    """Stops each sample at its own length, as an end-of-sequence token would."""

    def __init__(self, lengths_B: torch.Tensor) -> None:
        self._lengths_B = lengths_B

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        del scores, kwargs
        return input_ids.shape[1] >= self._lengths_B


class Transformers:
    """A model of transformers in this process."""

    def __init__(self, model: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._model.generation_config.eos_token_id = None

    @torch.inference_mode()
    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Generate all samples in one batch, with the log-probabilities of the sampled tokens."""
        rows = [torch.tensor(r.prompt_token_ids) for r in requests for _ in range(r.n)]
        lengths_B = torch.tensor([r.sampling.max_tokens for r in requests for _ in range(r.n)])
        input_ids_BP = pad_sequence(rows, batch_first=True, padding_side="left")
        mask_BP = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        torch.manual_seed(requests[0].seed)
        output = self._model.generate(
            input_ids_BP,
            attention_mask=mask_BP,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=int(lengths_B.max()),
            stopping_criteria=StoppingCriteriaList([_LengthsReached(input_ids_BP.shape[1] + lengths_B)]),
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens_BT = output.sequences[:, input_ids_BP.shape[1] :]
        # The result of `compute_transition_scores`, but step by step, which takes a fraction of the time.
        steps = zip(output.scores, tokens_BT.unbind(1), strict=True)
        log_probs_BT = torch.cat([s.log_softmax(-1).gather(1, tokens_B[:, None]) for s, tokens_B in steps], dim=1)
        is_sampled_BT = torch.arange(log_probs_BT.shape[1]) < lengths_B[:, None]
        return int(is_sampled_BT.sum()), float(log_probs_BT[is_sampled_BT].sum())
