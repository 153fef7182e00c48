"""Reward models that classify sequences, or their steps. Shapes: B sequences, T tokens of the longest."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from gcore_rollout.errors import (
    EngineModelError,
    RewardConfigError,
    RewardError,
    require,
    require_one_of,
)
from gcore_rollout.rewards.batch import BatchReward
from gcore_rollout.rewards.reward import Scored
from gcore_rollout.rewards.steps import STEP_REDUCTIONS, StepReduction, score_steps, split_steps

Encode = Callable[[str, str], Sequence[int]]
"""The token ids of a prompt and its completion; for a model of steps, of one of them, where the other is empty."""
_TOKEN_CLASSIFIER = "ForTokenClassification"
_Sequences = Sequence[Sequence[int]]


@dataclass(eq=False)
class SequenceClassifierReward:
    """The logit of a reward model trained on preferences, P(a over b) = sigmoid(r_a - r_b) (arXiv 2203.02155, eq. 1).

    Calls that come within ``max_wait_s``, or while a batch is computed, go into the next batches together: sorted by
    length, padded on the right, as many as fit in ``max_batch_tokens``. The forward runs in a thread. A decoder scores
    the last token of each sequence, whatever the folder's padding token is: transformers looks for the last token that
    is not padding, which is one before the end where the token that ends a response is also the padding.

    A token classifier of two labels is a process reward model, such as TRL's ``PRMTrainer`` makes: the score of a step
    is the probability of label 1 at the last token of ``step_end``, which follows each step ("Let's Verify Step by
    Step", arXiv 2305.20050, section 2.6). The result has them as `Scored.steps`.

    Example:
        >>> from transformers import AutoConfig
        >>> config = AutoConfig.from_pretrained("model", num_labels=1)
        >>> model = AutoModelForSequenceClassification.from_config(config)
        >>> reward = SequenceClassifierReward(model, encode=lambda prompt, text: [ord(c) for c in prompt + text])
        >>> async def main():
        ...     scores = await asyncio.gather(*[reward("1 + 1 =", answer, {}) for answer in ("2", "3", "eleven")])
        ...     reward.close()
        ...     return len(scores)
        >>> asyncio.run(main()), reward.num_batches
        (3, 1)
    """

    model: Any
    """A transformers ``...ForSequenceClassification`` with ``num_labels=1``, or a ``...ForTokenClassification`` with 2;
    with a pad token unless it is a decoder."""
    _: KW_ONLY
    encode: Encode
    max_batch_tokens: int = 16384
    """B x T of a batch at most; a longer sequence is a batch of its own."""
    max_wait_s: float = 0.005
    """Time for which the first call of a batch waits for others."""
    max_length: int | None = None
    """Most tokens of a sequence; default: the model's ``max_position_embeddings``."""
    step_separator: str = "\n\n"
    """The text between steps; not empty."""
    step_end: str = ""
    """The text after each step, as the model reads it, such as ``<extra_0>``; empty: the separator."""
    step_reduction: StepReduction = "min"
    """How the scores of steps become one: min, product, last or mean."""

    def __post_init__(self) -> None:
        config = self.model.config
        self.scores_steps = type(self.model).__name__.endswith(_TOKEN_CLASSIFIER)
        """Whether the model is of steps."""
        num_labels = 1 + self.scores_steps
        if config.num_labels != num_labels:
            raise EngineModelError(
                f"the reward model has num_labels={config.num_labels}; expected {num_labels}"
            )
        require_one_of("step_reduction", self.step_reduction, STEP_REDUCTIONS)
        # What decoders score each token with; others, such as BERT, have heads of other forms.
        self._token_head: Any = getattr(self.model, "score", None)
        if config.pad_token_id is None and self._token_head is None:
            raise EngineModelError(
                "the reward model's config.json has no pad_token_id, which batches need: set it"
            )
        longest = self.max_length or getattr(config, "max_position_embeddings", None)
        if longest is None or longest < 1:
            raise RewardConfigError(
                f"max_length is {self.max_length} and the model names none; expected at least 1"
            )
        require("max_batch_tokens", self.max_batch_tokens, self.max_batch_tokens >= 1, "at least 1")
        self.model.eval().requires_grad_(False)
        self._longest: int = longest
        self._batches: Any = BatchReward(
            self._score, max_size=sys.maxsize, max_wait_s=self.max_wait_s
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward-model")
        self.num_batches = 0
        """Forward passes so far."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        encode: Encode | None = None,
        apply_chat_template: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **options: Any,
    ) -> Self:
        """Load a local Hugging Face folder; its tokenizer is the default of ``encode``. ``options`` are the class's."""
        kind: Any = AutoModelForSequenceClassification
        if _TOKEN_CLASSIFIER in str(AutoConfig.from_pretrained(path).architectures):
            kind = AutoModelForTokenClassification
        model = kind.from_pretrained(path, dtype=dtype)
        encode = encode or encoder(
            AutoTokenizer.from_pretrained(path), apply_chat_template=apply_chat_template
        )
        return cls(model.to(device), encode=encode, **options)

    async def __call__(
        self, prompt: str, completion: str, row: Mapping[str, Any]
    ) -> float | Scored:
        """Score one completion; `RewardError` if it has no token, or more than ``max_length``."""
        del row
        if self.scores_steps:
            return await self.score_steps(self.encode(prompt, ""), completion)
        return await self.score_tokens(self.encode(prompt, completion))

    async def score_steps(self, prompt_ids: Sequence[int], completion: str) -> Scored:
        """Score the steps of a completion after the tokens of its prompt; raises as a call."""
        steps = split_steps(completion, self.step_separator)
        end_ids = self.encode("", self.step_end or self.step_separator)
        token_ids = [*prompt_ids]
        places: list[int] = []
        for step in steps:
            token_ids += [*self.encode("", step.strip()), *end_ids]
            places.append(len(token_ids) - 1)
        return score_steps(steps, await self._call(token_ids, places), self.step_reduction)

    async def score_tokens(self, token_ids: Sequence[int]) -> float:
        """Score the tokens of a prompt and its completion; raises as a call."""
        [score] = await self._call(token_ids, ())
        return score

    async def _call(self, token_ids: Sequence[int], places: Sequence[int]) -> list[float]:
        """Return the scores of the tokens at some places, or that of the last token."""
        if not 1 <= len(token_ids) <= self._longest:
            raise RewardError(
                f"the text has {len(token_ids)} tokens; expected 1 to max_length={self._longest}"
            )
        scores = await self._batches(token_ids, places, {})
        if isinstance(scores, Exception):
            raise scores
        return scores

    def close(self) -> None:
        """Free the thread. Idempotent."""
        self._thread.shutdown(wait=False)

    async def _score(
        self, sequences: _Sequences, places: _Sequences, rows: Sequence[Any]
    ) -> list[list[float] | Exception]:
        """Return the scores of each sequence, or the error of the forward pass that it was in."""
        del rows
        values: list[list[float] | Exception] = [[] for _ in sequences]
        loop = asyncio.get_running_loop()
        for batch in batches_by_length(list(map(len, sequences)), max_tokens=self.max_batch_tokens):
            forward = partial(
                self._forward, [sequences[i] for i in batch], [places[i] for i in batch]
            )
            scores: Sequence[list[float] | Exception]
            try:
                scores = await loop.run_in_executor(self._thread, forward)
            except Exception as error:
                scores = [error] * len(batch)
            for i, value in zip(batch, scores, strict=True):
                values[i] = value
        return values

    @torch.inference_mode()
    def _forward(self, sequences: _Sequences, places: _Sequences) -> list[list[float]]:
        self.num_batches += 1
        device = self.model.device
        padding = self.model.config.pad_token_id or 0
        tokens = [torch.tensor(sequence, device=device) for sequence in sequences]
        tokens_BT = pad_sequence(tokens, batch_first=True, padding_value=padding)
        mask_BT = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
        if self._token_head is None or self.scores_steps:
            logits = self.model(input_ids=tokens_BT, attention_mask=mask_BT).logits
        else:
            hidden_BTH = self.model.base_model(
                input_ids=tokens_BT, attention_mask=mask_BT
            ).last_hidden_state
            rows_B = torch.arange(len(sequences), device=device)
            logits = self._token_head(hidden_BTH[rows_B, mask_BT.sum(1) - 1])
        if not self.scores_steps:
            return logits.float().tolist()
        probs_BT = logits.float().softmax(-1)[..., 1]
        return [probs_BT[i, [*row]].tolist() for i, row in enumerate(places)]


def encoder(tokenizer: Any, *, apply_chat_template: bool) -> Encode:
    """Return a function from texts to tokens; without the chat template prompt and completion are one text.

    A completion without a prompt is text alone, and a prompt without a completion is to be continued.
    """

    def encode(prompt: str, completion: str) -> Sequence[int]:
        if not (prompt and apply_chat_template):
            return tokenizer(prompt + completion, add_special_tokens=bool(prompt))["input_ids"]
        messages = [{"role": "user", "content": prompt}]
        if completion:
            messages.append({"role": "assistant", "content": completion})
        return tokenizer.apply_chat_template(
            messages, return_dict=True, add_generation_prompt=not completion
        )["input_ids"]

    return encode


def batches_by_length(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Return indices of sequences, shortest first, in batches of at most ``max_tokens`` with padding, or one longer."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The last one is the longest, so it sets what every row of the batch is padded to.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
