"""The pages of docs/reference that list every setting, from the dataclasses of the settings.

``uv run python scripts/docs/settings_pages.py`` writes them; a test holds that they are up to date.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tomli_w
import tyro

from gcore_diffusion.config import DiffusionConfig, DiffusionSimConfig
from gcore_llm.config import TrainConfig
from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from gcore_runs.settings.checks import conditional_settings
from gcore_runs.simulation.config import SimulateConfig

FOLDER = Path(__file__).parents[2] / "docs/reference"
PAGES: dict[str, tuple[str, Mapping[str, type]]] = {
    "settings-train": ("Settings of gcore-llm train", {"train": TrainConfig}),
    "settings-fine-tuning": (
        "Settings of gcore-llm sft, reward-model and dpo",
        {"sft": SFTRunConfig, "reward-model": RewardModelRunConfig, "dpo": DPORunConfig},
    ),
    "settings-simulate": (
        "Settings of simulate",
        {
            "gcore-llm simulate": SimulateConfig,
            "--sim of gcore-diffusion simulate train": DiffusionSimConfig,
        },
    ),
    "settings-images": ("Settings of gcore-diffusion train", {"train": DiffusionConfig}),
}
"""Title and configs, by command, of each page."""
NOTE = (
    "<!-- Written by `uv run python scripts/docs/settings_pages.py`: "
    "change the docstrings of the fields instead. -->"
)
CONDITIONS = """## What reads which settings

All other settings are always read. With other values than these, a setting of this table is refused if it differs from
its default; a recipe's value gives way to the default."""
WORDS = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "none",
}


@dataclass(frozen=True)
class Setting:
    """One row of a page."""

    section: str
    name: str
    kind: str
    default: str
    meaning: str


def settings(config: Any, section: str = "") -> Iterator[Setting]:
    """Yield the settings of a config, which has the defaults, and after them those of its sections."""
    hints = get_type_hints(type(config))
    annotated = get_type_hints(type(config), include_extras=True)
    sections: list[tuple[str, Any]] = []
    for name in (field.name for field in dataclasses.fields(config)):
        if tyro.conf.Suppress in getattr(annotated[name], "__metadata__", ()):
            # Written by the program, and no user's choice.
            continue
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            sections.append((f"{section}.{name}".lstrip("."), value))
            continue
        kind, limits = worded(hints[name]), ", ".join(limits_of(type(config), name))
        if "number" in limits:
            kind = re.sub(r"(list of )?number( or none)?", limits, kind)
        elif limits:
            kind += f", {limits}"
        yield Setting(section, name, kind, as_toml(value), meaning(type(config), name))
    for name, value in sections:
        yield from settings(value, name)


def worded(hint: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{value}`" if value else "nothing" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(worded(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {worded(arguments[0])}"
    if origin is dict:
        return "table"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def limits_of(config: type, name: str) -> list[str]:
    """The bounds of a field in words, as the class that declares them last has them."""
    for owner in config.__mro__:
        hint = inspect.get_annotations(owner).get(name)
        inner = get_args(hint)[0] if get_origin(hint) is tuple else hint
        bounds = getattr(inner, "__metadata__", ())
        if found := [
            getattr(bound, "expected", getattr(bound, "accepted", "")) for bound in bounds
        ]:
            return found
    return []


def as_toml(value: Any) -> str:
    """The value in TOML, empty where there is none."""
    if value in ("", (), None, {}):
        return ""
    text = tomli_w.dumps({"x": value}).removeprefix("x = ")
    return f"`{' '.join(text.split()).replace('[ ', '[').replace(', ]', ']')}`"


@cache
def _docstrings(owner: type) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(said))
            ):
                found[name] = " ".join(said.split())
            case _:
                pass
    return found


def meaning(config: type, name: str) -> str:
    """The docstring of a field, of the class that documents it last."""
    documented = (_docstrings(owner) for owner in config.__mro__ if dataclasses.is_dataclass(owner))
    return next((found[name] for found in documented if name in found), "")


def page(title: str, configs: Mapping[str, type]) -> str:
    """The text of a page; a setting that only some of its commands have says so."""
    owners: dict[Setting, list[str]] = {}
    for command, config in configs.items():
        for setting in settings(config()):
            owners.setdefault(setting, []).append(command)
    rows: dict[str, list[str]] = {}
    for setting, commands in owners.items():
        only = (
            ""
            if len(commands) == len(configs)
            else f" Of {' and '.join(f'`{each}`' for each in commands)}."
        )
        cells = (
            f"`{setting.name}`",
            setting.kind,
            setting.default,
            escaped(setting.meaning) + only,
        )
        rows.setdefault(setting.section, []).append(
            f"| {' | '.join(cells)} |".replace("|  |", "| |")
        )
    tables = [
        f"## {section or 'Top level'}\n\n| setting | value | default | meaning |\n|---|---|---|---|\n"
        + "\n".join(found)
        for section, found in rows.items()
    ]
    return "\n\n".join([f"# {title}", NOTE, *tables, *conditions(configs)]) + "\n"


def conditions(configs: Mapping[str, type]) -> list[str]:
    """The section that lists which settings only some values of others read; none without any."""
    commands_of: dict[tuple[str, str], list[str]] = {}
    for command, config in configs.items():
        for name, entry in conditional_settings(config):
            commands_of.setdefault((name, entry.readers), []).append(command)
    rows: dict[str, list[str]] = {}
    for (name, readers), commands in commands_of.items():
        only = (
            ""
            if len(commands) == len(configs)
            else f" (of {' and '.join(f'`{each}`' for each in commands)})"
        )
        rows.setdefault(f"`{name}`{only}", []).append(escaped(readers))
    if not rows:
        return []
    table = ["| setting | read with |", "|---|---|"]
    table += [f"| {setting} | {'; and '.join(readers)} |" for setting, readers in rows.items()]
    return [CONDITIONS, "\n".join(table)]


def escaped(text: str) -> str:
    """Text of a cell, in which only code is marked up."""
    prose_and_code = text.replace("``", "`").split("`")
    prose_and_code[::2] = [
        re.sub(r"([\\|<>*_\[\]])", r"\\\1", prose) for prose in prose_and_code[::2]
    ]
    return "`".join(prose_and_code)


if __name__ == "__main__":
    for name, (title, configs) in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page(title, configs))
