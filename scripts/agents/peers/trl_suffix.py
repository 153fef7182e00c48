"""TRL's continuation by a suffix (GRPOTrainer._get_tool_suffix_ids): ``python trl_suffix.py [TEMPLATE ...]``.

With TRL's own patched templates, where it has one. TRL continues turns with results of tools alone.
"""

import sys
from types import SimpleNamespace
from typing import Any

from continuations import TURNS, check, print_rows
from trl import GRPOTrainer
from trl.chat_template_utils import (
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    supports_tool_calling,
)

from gcore_agents.conformance.templates import list_model_templates, make_encoder, read_template

EOS_TOKENS = {"glm4moe": "<|endoftext|>", "gptoss": "<|return|>", "diffusion_gemma": "<eos>"}
EOS_TOKENS |= dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), "<eos>")
"""Of models whose turns end with another token."""


def check_template(template: str) -> dict[str, str]:
    text = read_template(template)
    encoder = make_encoder(text)
    tokenizer: Any = encoder._tokenizer
    if not supports_tool_calling(tokenizer):
        return dict.fromkeys(TURNS, "-")
    patched = None
    if not is_chat_template_prefix_preserving(tokenizer):
        try:
            patched = get_training_chat_template(tokenizer)
        except ValueError as error:
            return dict.fromkeys(TURNS, f"refused: {str(error)[:60]}")
    # TRL trims at the model's eos_token, which ends turns in most templates.
    end = encoder.next([{"role": "user", "content": "a"}], last_token=encoder.encode("a")[-1])[0]
    tokenizer.eos_token = EOS_TOKENS.get(template, encoder.turn_text([end], is_ended=False))
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=patched or text,
        chat_template_kwargs={},
    )

    def continue_(prompt, sampled, message, further):
        del message
        suffix = GRPOTrainer._get_tool_suffix_ids(trainer, further)
        return [*prompt, *sampled, *suffix]

    cells = dict.fromkeys(TURNS, "-")
    for name, turn in TURNS.items():
        if turn.calls:
            cells[name] = check(encoder, name, continue_)
    return cells


if __name__ == "__main__":
    names = sys.argv[1:] or list_model_templates()
    print_rows([(name, check_template(name)) for name in names])
