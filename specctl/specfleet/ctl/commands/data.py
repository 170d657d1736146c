"""specctl data prepare."""

from pathlib import Path
from typing import Annotated

import typer

from specfleet.ctl.options import AsJson


def prepare(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Conversations: JSON, JSON Lines or Parquet, also .gz.")
    ],
    target: Annotated[str, typer.Option("--target", help="Directory of the target: its tokenizer and chat template.")],
    out: Annotated[Path, typer.Option("--out", help="Prompt sets are written below this folder.")] = Path(
        "prompt-sets"
    ),
    max_length: Annotated[int, typer.Option("--max-length", min=1, help="Tokens per sample.")] = 2048,
    max_response_tokens: Annotated[
        int, typer.Option("--max-response-tokens", min=0, help="Cut answers; 0: no limit.")
    ] = 0,
    max_samples: Annotated[int, typer.Option("--max-samples", min=0, help="0: all.")] = 0,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", metavar="FIELD=A,B", help="Keep rows whose field has one of these values."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn conversations into a prompt set: chat template, token ids, loss masks, Parquet shards and a manifest."""
    from specfleet.ctl.output import emit
    from specfleet.ctl.prompts import describe, prepare_files
    from specfleet.ctl.views import facts_table

    prompt_set = prepare_files(
        files,
        target,
        out,
        max_length=max_length,
        max_response_tokens=max_response_tokens,
        max_samples=max_samples,
        where=parse_filters(where or []),
    )
    facts = describe(prompt_set)
    emit(as_json, facts, lambda console: console.print(facts_table("prompt set", facts)))


def parse_filters(items: list[str]) -> dict[str, list[str]]:
    filters = {}
    for item in items:
        name, equals, values = item.partition("=")
        if not (name and equals and values):
            raise typer.BadParameter(f"--where {item!r} is not FIELD=VALUE[,VALUE...], as in split=train")
        filters[name] = values.split(",")
    return filters
