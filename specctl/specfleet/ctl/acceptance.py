"""The acceptance table: tokens committed per target pass, before and after training, beside an untrained n-gram lookup."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def acceptance_table(by_source: Mapping[str, Mapping[str, Any]]) -> Table:
    """by_source: the gate report's acceptance_length. All rows, then finished (finish = stop) rows only."""
    table = Table(
        title="acceptance length: tokens committed per target pass, held-out rows",
        caption="stop: rows whose answer the target ended itself; the others mostly loop, which flatters n-gram lookup",
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("source", no_wrap=True)
    for column in ("rows", "before", "after", "n-gram", "stop rows", "before (stop)", "after (stop)", "n-gram (stop)"):
        table.add_column(column, justify="right")
    for source, row in by_source.items():
        table.add_row(
            source,
            str(row.get("rows", "–")),
            _number(row.get("before")),
            f"[bold]{_number(row.get('after'))}[/]",
            _number(row.get("ngram")),
            str(row.get("stop_rows", "–")),
            _number(row.get("before_stop_rows")),
            f"[bold]{_number(row.get('after_stop_rows'))}[/]",
            _number(row.get("ngram_stop_rows")),
        )
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
