"""A Bradley-Terry reward model: a sequence classifier of one logit. Shapes: B sequences, T tokens of the longest."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gcore_rollout.errors import EngineModelError, RewardConfigError, RewardError, require
from gcore_rollout.rewards.reward import finish_call

Encode = Callable[[str, str], Sequence[int]]
"""The token ids of a prompt and its completion."""
_Waiting = tuple[Sequence[int], "asyncio.Future[float]"]
"""The token ids of a call, and its score to come."""


@dataclass(eq=False)
class SequenceClassifierReward:
    """The logit of a reward model trained on preferences, P(a over b) = sigmoid(r_a - r_b) (arXiv 2203.02155, eq. 1).

    Calls that come within ``max_wait_s``, or while a batch is computed, go into the next batches together: sorted by
    length, padded on the right, as many as fit in ``max_batch_tokens``. The forward runs in a thread. A decoder scores
    the last token of each sequence, whatever the folder's padding token is: transformers looks for the last token that
    is not padding, which is one before the end where the token that ends a response is also the padding.

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
    """A transformers ``...ForSequenceClassification`` with ``num_labels=1``, and a pad token unless it is a decoder."""
    _: KW_ONLY
    encode: Encode
    max_batch_tokens: int = 16384
    """B x T of a batch at most; a longer sequence is a batch of its own."""
    max_wait_s: float = 0.005
    """Time for which the first call of a batch waits for others."""
    max_length: int | None = None
    """Most tokens of a sequence; default: the model's ``max_position_embeddings``."""

    def __post_init__(self) -> None:
        config = self.model.config
        if config.num_labels != 1:
            raise EngineModelError(
                f"the reward model has num_labels={config.num_labels}; expected 1"
            )
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
        require("max_wait_s", self.max_wait_s, self.max_wait_s >= 0, "0 or more")
        self.model.eval().requires_grad_(False)
        self._longest: int = longest
        self._waiting: list[_Waiting] = []
        self._driver: asyncio.Task[None] | None = None
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
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        encode = encode or encoder(
            AutoTokenizer.from_pretrained(path), apply_chat_template=apply_chat_template
        )
        return cls(model.to(device), encode=encode, **options)

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Score one completion; `RewardError` if it has no token, or more than ``max_length``."""
        del row
        return await self.score_tokens(self.encode(prompt, completion))

    async def score_tokens(self, token_ids: Sequence[int]) -> float:
        """Score the tokens of a prompt and its completion; raises as a call."""
        if not 1 <= len(token_ids) <= self._longest:
            raise RewardError(
                f"the text has {len(token_ids)} tokens; expected 1 to max_length={self._longest}"
            )
        score: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, score))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
        return await score

    def close(self) -> None:
        """Free the thread. Idempotent."""
        self._thread.shutdown(wait=False)

    async def _drive(self) -> None:
        """Score waiting sequences until there are none."""
        await asyncio.sleep(self.max_wait_s)
        while self._waiting:
            calls = [(token_ids, score) for token_ids, score in self._waiting if not score.done()]
            self._waiting.clear()
            lengths = [len(token_ids) for token_ids, _ in calls]
            for batch in batches_by_length(lengths, max_tokens=self.max_batch_tokens):
                await self._score([calls[i] for i in batch])

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        sequences = [token_ids for token_ids, _ in batch]
        values: Sequence[float | Exception]
        try:
            values = await asyncio.get_running_loop().run_in_executor(
                self._thread, self._forward, sequences
            )
        except Exception as error:
            values = [error] * len(batch)
        for (_, score), value in zip(batch, values, strict=True):
            finish_call(score, value)

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.num_batches += 1
        device = self.model.device
        padding = self.model.config.pad_token_id or 0
        tokens = [torch.tensor(sequence, device=device) for sequence in sequences]
        tokens_BT = pad_sequence(tokens, batch_first=True, padding_value=padding)
        mask_BT = pad_sequence(list(map(torch.ones_like, tokens)), batch_first=True)
        if self._token_head is None:
            logits_B1 = self.model(input_ids=tokens_BT, attention_mask=mask_BT).logits
        else:
            hidden_BTH = self.model.base_model(
                input_ids=tokens_BT, attention_mask=mask_BT
            ).last_hidden_state
            rows_B = torch.arange(len(sequences), device=device)
            logits_B1 = self._token_head(hidden_BTH[rows_B, mask_BT.sum(1) - 1])
        return logits_B1[:, 0].float().tolist()


def encoder(tokenizer: Any, *, apply_chat_template: bool) -> Encode:
    """Return a function from texts to tokens; without the chat template prompt and completion are one text."""

    def encode(prompt: str, completion: str) -> Sequence[int]:
        if not apply_chat_template:
            return tokenizer(prompt + completion)["input_ids"]
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": completion},
        ]
        return tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]

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
