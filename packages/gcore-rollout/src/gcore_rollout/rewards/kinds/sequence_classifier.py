"""A Bradley-Terry reward model: a sequence classifier of one logit.

Shapes: B sequences of a batch, T tokens of the longest.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from gcore_rollout.errors import RewardConfigError, RewardError, UnsupportedModelError

Encode = Callable[[str, str], Sequence[int]]
"""The token ids of a prompt and its completion."""
_Waiting = tuple[Sequence[int], "asyncio.Future[float]"]
"""The token ids of a call, and its score to come."""


class SequenceClassifierReward:
    """The logit of a reward model trained on preferences, P(a over b) = sigmoid(r_a - r_b) (arXiv 2203.02155, eq. 1).

    Calls that come within ``max_wait_s``, or while a batch is computed, go into the next batches together: sorted by
    length, padded on the right, as many as fit in ``max_batch_tokens``. The forward runs in a thread.

    Args:
        model: a transformers ``...ForSequenceClassification`` with ``num_labels=1`` and a pad token.
        encode: from texts to token ids.
        max_batch_tokens: B x T of a batch at most; a longer sequence is a batch of its own.
        max_wait_s: how long the first call of a batch waits for others.
        max_length: most tokens of a sequence; default: the model's ``max_position_embeddings``.
    """

    def __init__(
        self,
        model: Any,
        *,
        encode: Encode,
        max_batch_tokens: int = 16384,
        max_wait_s: float = 0.005,
        max_length: int | None = None,
    ) -> None:
        if model.config.num_labels != 1:
            raise UnsupportedModelError(f"the reward model has num_labels={model.config.num_labels}; expected 1")
        if model.config.pad_token_id is None:
            raise UnsupportedModelError(
                "the reward model's config.json has no pad_token_id, which batches need: set it"
            )
        longest = max_length or getattr(model.config, "max_position_embeddings", None)
        if longest is None or longest < 1:
            raise RewardConfigError(f"max_length is {max_length} and the model names none; expected at least 1")
        if max_batch_tokens < 1:
            raise RewardConfigError(f"max_batch_tokens is {max_batch_tokens}; expected at least 1")
        if not max_wait_s >= 0:
            raise RewardConfigError(f"max_wait_s is {max_wait_s}; expected 0 or more")
        self._model = model.eval().requires_grad_(False)
        self._encode = encode
        self._max_batch_tokens = max_batch_tokens
        self._max_wait_s = max_wait_s
        self._max_length: int = longest
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
        """Load a local Hugging Face folder with a tokenizer, which is used without ``encode``; see `encoder`.

        ``options`` are further arguments of the class.
        """
        model: Any = AutoModelForSequenceClassification.from_pretrained(path, dtype=dtype)
        encode = encode or encoder(AutoTokenizer.from_pretrained(path), apply_chat_template=apply_chat_template)
        return cls(model.to(device), encode=encode, **options)

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Score one completion; `RewardError` if it has no token, or more than ``max_length``."""
        del row
        token_ids = self._encode(prompt, completion)
        if not 1 <= len(token_ids) <= self._max_length:
            raise RewardError(f"the text has {len(token_ids)} tokens; expected 1 to max_length={self._max_length}")
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
        await asyncio.sleep(self._max_wait_s)
        while taken := [one for one in self._waiting if not one[1].done()]:
            self._waiting.clear()
            lengths = [len(token_ids) for token_ids, _ in taken]
            for batch in batches_by_length(lengths, max_tokens=self._max_batch_tokens):
                await self._score([taken[i] for i in batch])
        self._waiting.clear()

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, self._forward, [token_ids for token_ids, _ in batch])
        except Exception as error:
            for _, score in batch:
                if not score.done():
                    score.set_exception(error)
            return
        for (_, score), value in zip(batch, found, strict=True):
            # Its caller may have given up.
            if not score.done():
                score.set_result(value)

    @torch.inference_mode()
    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.num_batches += 1
        device, padding = self._model.device, self._model.config.pad_token_id
        tokens = [torch.tensor(sequence, device=device) for sequence in sequences]
        tokens_BT = pad_sequence(tokens, batch_first=True, padding_value=padding)
        mask_BT = pad_sequence([torch.ones_like(own) for own in tokens], batch_first=True)
        logits_B1 = self._model(input_ids=tokens_BT, attention_mask=mask_BT).logits
        return logits_B1[:, 0].float().tolist()


def encoder(tokenizer: Any, *, apply_chat_template: bool) -> Encode:
    """Return a function from texts to tokens; without the chat template prompt and completion are one text."""

    def encode(prompt: str, completion: str) -> Sequence[int]:
        if not apply_chat_template:
            return tokenizer(prompt + completion)["input_ids"]
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
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
