"""How large and how dense the sources are; formatting changes none of the figures but code lines.

``python tests/workspace/density.py`` prints them for each distribution and for all.
"""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

from house import DISTRIBUTIONS, Distribution, parse

EMPTY_NAME = re.compile(
    "asked|both|each|found|given|held|kept|kind|known|left|made|most|named|others?|own|places?|said|shown|some|taken|wanted|"
    "whole"
)
"""Names of variables and arguments that do not say what is in them."""
PARTICIPLE = re.compile(
    r"_?(?:[a-z]{2,}(?:ed|en)|again|built|drawn|found|held|kept|left|made|meant|said|sent|shown|told|whole|within)"
)
VERBS = {"seed", "need", "feed", "speed", "embed", "open", "children"}
"""Names of functions that end as participles do."""
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
AIMS = {
    "nodes": 235_000.0,
    "tokens a code line": 8.5,
    "nodes a statement": 7.2,
    "comprehensions": 30.0,
    "comprehensions with two for": 0.5,
    "conditional expressions": 15.0,
    "tuple assignments": 3.0,
    "empty names per 10,000 lines": 10.0,
    "participles in 100 functions": 0.5,
    "classes": 620.0,
    "protocols and ABCs": 30.0,
    "public names": 380.0,
    "nodes of gcore-bench": 20_000.0,
    "nodes of apps in 100": 30.0,
    "repeated class names": 0.0,
}
PER_1000_LINES = (
    "comprehensions",
    "comprehensions with two for",
    "conditional expressions",
    "tuple assignments",
)


def count_file(path: Path) -> Counter[str]:
    """Count what one file holds; code lines are without comments, docstrings, imports and blank lines."""
    text = path.read_text()
    counts: Counter[str] = Counter(lines=len(text.splitlines()))
    no_code: set[int] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.stmt) and not _is_computed(node):
            no_code.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        counts[_construct(node)] += 1
        counts["empty names"] += EMPTY_NAME.fullmatch(_name_stored(node)) is not None
    counts["nodes"], counts["statements"] = count_nodes(parse(path))
    code: set[int] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.strip().startswith("#") and number not in no_code:
            code.add(number)
    counts["code"] = len(code)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        counts["tokens"] += token.type not in LAYOUT and token.start[0] in code
    return counts


def count_nodes(tree: ast.AST) -> tuple[int, int]:
    """Count expressions and statements without annotations, and the statements among them without imports."""
    num_nodes = 0
    num_statements = 0
    pending = [tree]
    while pending:
        node = pending.pop()
        num_nodes += isinstance(node, ast.expr | ast.stmt)
        num_statements += isinstance(node, ast.stmt) and _is_computed(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            children = value if isinstance(value, list) else [value]
            pending += [child for child in children if isinstance(child, ast.AST)]
        if isinstance(node, ast.AnnAssign) and node.value is None:
            num_nodes += 1  # a declaration counts as an assignment of a constant
    return num_nodes, num_statements


def _is_computed(node: ast.stmt) -> bool:
    """Return whether a statement is neither an import nor a docstring."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
            return False
        case _:
            return True


def _name_stored(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return name
        case _:
            return ""


def _construct(node: ast.AST) -> str:
    match node:
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return "comprehensions" if len(node.generators) == 1 else "comprehensions with two for"
        case ast.IfExp():
            return "conditional expressions"
        case ast.Assign(targets=[ast.Tuple(), *_], value=ast.Tuple()):
            return "tuple assignments"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            is_participle = PARTICIPLE.fullmatch(name) and name.strip("_") not in VERBS
            return "participles" if is_participle else "functions"
        case ast.ClassDef():
            return "protocols and ABCs" if _is_abstract(node) else "classes"
        case _:
            return "other nodes"


def _is_abstract(node: ast.ClassDef) -> bool:
    names: set[str] = set()
    for base in node.bases:
        names.add(ast.unparse(base).partition("[")[0].rpartition(".")[2])
    return not names.isdisjoint({"Protocol", "ABC"})


@cache
def count_distribution(distribution: Distribution) -> Counter[str]:
    """Count the files of a distribution together, and its public names."""
    counts = Counter({"public names": len(distribution.exports())})
    for path in distribution.files():
        counts += count_file(path)
    return counts


def rates(counts: Counter[str]) -> dict[str, float]:
    """Return the figures of counts, with rates instead of numbers where sizes differ."""
    num_comprehensions = counts["comprehensions"] + counts["comprehensions with two for"]
    num_functions = counts["participles"] + counts["functions"]
    figures = {
        "nodes": float(counts["nodes"]),
        "tokens a code line": counts["tokens"] / counts["code"],
        "nodes a statement": counts["nodes"] / counts["statements"],
        "comprehensions": 1_000 * num_comprehensions / counts["code"],
    }
    for name in PER_1000_LINES[1:]:
        figures[name] = 1_000 * counts[name] / counts["code"]
    figures["empty names per 10,000 lines"] = 10_000 * counts["empty names"] / counts["lines"]
    figures["participles in 100 functions"] = 100 * counts["participles"] / num_functions
    figures["classes"] = counts["classes"] + counts["protocols and ABCs"]
    figures["protocols and ABCs"] = counts["protocols and ABCs"]
    figures["public names"] = counts["public names"]
    return figures


def repeated_classes() -> dict[str, list[str]]:
    """Return the public classes whose name another module has, too, by name."""
    modules: dict[str, list[str]] = {}
    for distribution in DISTRIBUTIONS:
        for path in distribution.files():
            for node in parse(path).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    module = path.relative_to(distribution.source.parent).with_suffix("")
                    modules.setdefault(node.name, []).append(".".join(module.parts))
    return {name: places for name, places in sorted(modules.items()) if len(places) > 1}


def density() -> dict[str, float]:
    """Return the figures of the whole repository."""
    counts: Counter[str] = Counter()
    nodes: dict[str, int] = {}
    num_app_nodes = 0
    for distribution in DISTRIBUTIONS:
        counts += count_distribution(distribution)
        num_nodes = count_distribution(distribution)["nodes"]
        nodes[distribution.name] = num_nodes
        if not distribution.is_package:
            num_app_nodes += num_nodes
    figures = rates(counts)
    figures["nodes of gcore-bench"] = nodes["gcore-bench"]
    figures["nodes of apps in 100"] = 100 * num_app_nodes / counts["nodes"]
    figures["repeated class names"] = len(repeated_classes())
    return figures


def main() -> None:
    for distribution in DISTRIBUTIONS:
        print(distribution.name, _as_text(rates(count_distribution(distribution))))
    print("all", _as_text(density()))
    for name, modules in repeated_classes().items():
        print(f"class {name}: {', '.join(modules)}")


def _as_text(figures: dict[str, float]) -> str:
    return "; ".join(
        f"{name} {value:,.0f}" if value > 100 else f"{name} {value:.1f}"
        for name, value in figures.items()
    )


if __name__ == "__main__":
    main()
