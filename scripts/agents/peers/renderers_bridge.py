"""bridge_to_next_turn of renderers, which prime-rl and verifiers use: ``renderers_bridge.py [--keep-thoughts]``."""

import re
import sys
from pathlib import Path
from typing import Any

import renderers
from continuations import TURNS, check, print_rows

from gcore_agents.conformance.templates import make_encoder, read_template
from gcore_agents.conformance.turns import TOOLS

CONFIGS: dict[str, Any] = {
    "qwen3": renderers.Qwen3RendererConfig,
    "qwen3_5_think": renderers.Qwen35RendererConfig,
    "qwen3_6": renderers.Qwen36RendererConfig,
    "qwen3_8": renderers.Qwen38RendererConfig,
    "qwen3_vl": renderers.Qwen3VLRendererConfig,
    "glm4moe": renderers.GLM45RendererConfig,
    "llama3_2": renderers.Llama3RendererConfig,
    "gemma4_v5": renderers.Gemma4RendererConfig,
    "nemotron_3_nano": renderers.Nemotron3RendererConfig,
    "nemotron_3_ultra": renderers.Nemotron3UltraRendererConfig,
    "nemotron_3_5_lightning": renderers.Nemotron35RendererConfig,
    "lfm2": renderers.DefaultRendererConfig,
}
"""Templates of TRL that renderers has a class for; the last one has none."""
SOURCES = Path(renderers.__file__).parent.glob("*.py")
MARKS = re.compile(r"<\|?[^<>|\s{}'\"\\]+\|?>|<[^\x00-\x7f][^<>\s]*>|\[gMASK\]")
FURTHER_MARKS = " ".join(sorted(set(MARKS.findall("".join(s.read_text() for s in SOURCES)))))
"""Tokens that renderers look for in a model's tokenizer."""


def check_template(template: str, *, keeps_thoughts: bool) -> dict[str, str]:
    text = read_template(template) + "{# " + FURTHER_MARKS + " #}"
    encoder = make_encoder(text)
    options = {"thinking_retention": "all"} if keeps_thoughts else {}
    try:
        config = CONFIGS[template](**options)
        renderer = renderers.create_renderer(encoder._tokenizer, config)
    except Exception as error:  # a library may fail in any way
        fault = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        return dict.fromkeys(TURNS, fault)

    def continue_(prompt, sampled, message, further):
        tools = [dict(tool) for tool in TOOLS] if "tool_calls" in message else None
        bridged = renderer.bridge_to_next_turn(prompt, sampled, further, tools=tools)
        return None if bridged is None else bridged.token_ids

    return {name: check(encoder, name, continue_) for name in TURNS}


if __name__ == "__main__":
    keeps = "--keep-thoughts" in sys.argv
    print_rows([(name, check_template(name, keeps_thoughts=keeps)) for name in CONFIGS])
