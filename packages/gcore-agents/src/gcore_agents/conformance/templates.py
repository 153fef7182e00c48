"""Chat templates of the cases, and tokenizers for them.

The package has six that are small, with the habits of the templates of models that make continuations hard. Those of
models come with TRL, if it is installed, or are files.
"""

import re
import string
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gcore_agents.chat.encoder import ChatEncoder

_MARK = re.compile(r"</?\|?[^<>|\s{}'\"]+\|?>|<[^\x00-\x7f][^<>]*>|\[/?g?[A-Z_]{3,}\]")
_PAIRS = ("th", "he", "in", "er", "an", "re", "on", "st", "or", "ti")
_OWN = files("gcore_agents.conformance") / "templates"


def list_templates() -> list[str]:
    """Return the names of this package's templates."""
    names = [file.name for file in _OWN.iterdir() if file.name.endswith(".jinja")]
    return sorted(name.removesuffix(".jinja") for name in names)


def list_model_templates() -> list[str]:
    """Return the names of the templates of models that come with TRL; none if it is not installed."""
    folder = _find_model_templates()
    if folder is None:
        return []
    names = [file.stem for file in folder.glob("*.jinja")]
    return sorted(name for name in names if not name.endswith("_training"))


def read_template(name: str) -> str:
    """Return a template by its name here or in TRL, or the path of a file.

    Raises:
        ValueError: there is none.
    """
    if name in list_templates():
        return (_OWN / f"{name}.jinja").read_text()
    folder = _find_model_templates()
    if folder is not None and (folder / f"{name}.jinja").is_file():
        return (folder / f"{name}.jinja").read_text()
    if Path(name).is_file():
        return Path(name).read_text()
    hint = "" if folder is not None else "; templates of models need `pip install trl`"
    raise ValueError(
        f"the template is {name!r}; expected one of {', '.join(list_templates())}, or the path of a file{hint}"
    )


def _find_model_templates() -> Path | None:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "chat_templates"
    return folder if folder.is_dir() else None


def make_encoder(template: str) -> ChatEncoder:
    """Return an encoder of a template, with a tokenizer of characters, some pairs of them, and the template's marks.

    A text of pairs has several tokenizations: an endpoint that tokenizes a turn again gets others than were sampled.
    """
    return ChatEncoder(make_tokenizer(template))


def make_tokenizer(template: str) -> Any:
    """Return the tokenizer of `make_encoder`."""
    vocabulary: dict[str, int] = {}
    for token in ("<eos>", "<unk>", *string.printable, *_PAIRS):
        vocabulary[token] = len(vocabulary)
    merges = [(pair[0], pair[1]) for pair in _PAIRS]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    for mark in sorted(set(_MARK.findall(template))):
        tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=template,
    )


def split_pairs(encoder: ChatEncoder, token_ids: list[int]) -> list[int]:
    """Return tokens of the same text in which pairs of characters are two tokens."""
    split: list[int] = []
    for token in token_ids:
        text = encoder.turn_text([token], is_ended=False)
        if text in _PAIRS:
            split.extend(encoder.encode(text[0]) + encoder.encode(text[1]))
        else:
            split.append(token)
    return split
