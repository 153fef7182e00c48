"""What MkDocs calls while it builds the site: pages of the public names, and links to files that are not pages."""

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(((?:\.\./)[^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each package, which mkdocstrings fills from the docstrings of its public names."""
    for stub in sorted(ROOT.glob("packages/*/src/*/__init__.pyi")):
        files.append(
            File.generated(config, f"reference/api/{stub.parent.name}.md", content=api_page(stub))
        )
    return files


def api_page(stub: Path) -> str:
    """The names that a package exports, sorted, with the description of the package."""
    package = stub.parent.name
    exported = [
        node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)
    ]
    names = sorted(
        (alias.name, f"{package}.{node.module}") for node in exported for alias in node.names
    )
    about = ast.get_docstring(ast.parse(stub.with_suffix(".py").read_text())) or ""
    parts = [f"::: {module}.{name}" for name, module in names]
    return "\n\n".join([f"# {package}", about, *parts]) + "\n"


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links to files outside of docs/ be, which on a disk lead from site/ to the same files."""
    folder = Path("docs", page.file.src_uri).parent

    def kept(match: re.Match[str]) -> str:
        target = os.path.normpath(folder / match[2])
        is_page = target.startswith("docs/")
        return match[0] if is_page else f'<a href="{match[2]}">{match[1]}</a>'

    return LINK.sub(kept, markdown)
