"""How benches print figures."""

from rich.table import Table


def figures_table(title: str, *columns: str) -> Table:
    """A table whose first column names contenders, and whose others are numbers."""
    shown = Table(title=title, title_justify="left", caption_justify="left")
    shown.add_column("", no_wrap=True)
    for column in columns:
        shown.add_column(column, justify="right")
    return shown
