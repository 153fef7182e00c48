"""One setting of another library: its settings here, or why there is none."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Key:
    """A setting of another library, or with a name that ends in ``.*`` a section of them."""

    ours: tuple[str, ...] = ()
    """Settings here that follow from it; of several that mean the same in different commands, each has its own."""
    default: Any = None
    """Its value in the other library if it is not set."""
    why: str = ""
    """Why there is no setting here, in a few words."""
    off: tuple[Any, ...] | None = None
    """None: it has no meaning here. Otherwise the values with which nothing is missing; with others something is."""


def to(*ours: str, default: Any = None) -> Key:
    """Return a key that settings here follow from."""
    return Key(ours=ours, default=default)


def nothing(why: str) -> Key:
    """Return a key that has no meaning here."""
    return Key(why=why)


def lacks(why: str, *off: Any) -> Key:
    """Return a key of a feature that gcore lacks; with the values ``off``, or unset, nothing is missing."""
    return Key(why=why, off=(None, *off))


def find_key(keys: Mapping[str, Key], name: str) -> Key | None:
    """Return the key of this name, or else of the innermost section that it is in; None: it is not known."""
    if name in keys:
        return keys[name]
    section = name
    while "." in section:
        section = section.rpartition(".")[0]
        if f"{section}.*" in keys:
            return keys[f"{section}.*"]
    return None
