"""The embedded model: a character-level Qwen3 of 0.8 million parameters, as a real Hugging Face folder."""

import string
from pathlib import Path
from typing import Any

MAX_POSITION_EMBEDDINGS = 512
"""Most tokens that the embedded model takes."""


_CHAT_TEMPLATE = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[' + call.function.name + ' ' + call.function.arguments | tojson + ']' }}
        {%- endfor %}
        {{- '<eos>' }}
    {%- elif m.role != 'system' %}
        {{- m.content + '\n' }}
    {%- endif %}
{%- endfor %}"""
"""Messages follow each other, and only a turn has an end: a tiny model has no use for more, nor for instructions."""


def tiny_tokenizer(*, chats: bool = False) -> Any:
    """Return a tokenizer with one token for each printable character; with a chat template, if it ``chats``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *string.printable])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=_CHAT_TEMPLATE if chats else None,
    )


def make_tiny_model(path: Path, *, seed: int) -> None:
    """Write config, random weights and tokenizer to ``path``."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tiny_tokenizer().save_pretrained(path)
    # Not Qwen2: transformers replaces any pre-tokenizer with that family's own when it loads a folder.
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(path)
