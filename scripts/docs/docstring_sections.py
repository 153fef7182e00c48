"""What griffe does with docstrings as it reads them for the site."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Shows a section ``Example:`` as code, which griffe knows by its plural alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
