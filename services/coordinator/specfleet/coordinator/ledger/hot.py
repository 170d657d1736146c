"""Hand-written SQL for the statements every sample passes through, where building an expression costs more than running it.

Written once with `?` for a value and `IN ?list` for a list of integers; each dialect gets its own form, with a text that does
not depend on the list's length, so that it is parsed and prepared once.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, CursorResult


class Ids(list[int]):
    """Integers for an `IN ?list`."""


@lru_cache(maxsize=512)
def _text(sql: str, sqlite: bool) -> str:
    if sqlite:
        return sql.replace("IN ?list", "IN (SELECT value FROM json_each(?))")
    return sql.replace("IN ?list", "= ANY(?)").replace("?", "%s")


def execute(conn: Connection, sql: str, *values: Any) -> CursorResult[Any]:
    """One statement with its values in order."""
    sqlite = conn.dialect.name == "sqlite"
    given = tuple(json.dumps(v) if sqlite and isinstance(v, Ids) else v for v in values)
    return conn.exec_driver_sql(_text(sql, sqlite), given)


def execute_many(conn: Connection, sql: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """One statement for each row of values; nothing for no rows."""
    if rows:
        conn.exec_driver_sql(_text(sql, conn.dialect.name == "sqlite"), list(rows))


def insert_many(conn: Connection, table: str, columns: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """columns: names separated by commas, in the order of each row's values."""
    marks = ", ".join("?" * (columns.count(",") + 1))
    execute_many(conn, f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows)
