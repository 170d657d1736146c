"""specctl data stats, verify: prompt sets and feature sets as they lie on disk."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson

if TYPE_CHECKING:
    from rich.console import Console

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="A prompt set or a feature set.", exists=True, file_okay=False)
]


def stats(directory: Directory, as_json: AsJson = False) -> None:
    """What a prompt set or a feature set holds, from its manifest."""
    from specfleet.ctl.output import emit
    from specfleet.ctl.sets import stats_of
    from specfleet.ctl.views import facts_table

    title, facts = stats_of(directory)
    emit(as_json, facts, lambda out: out.print(facts_table(title, facts)))


def verify(directory: Directory, as_json: AsJson = False) -> None:
    """Check every hash of a prompt set; of a feature set every hash, row and value. Exit code 1 when something is wrong."""
    from specfleet.ctl.output import emit
    from specfleet.ctl.sets import verify_set
    from specfleet.ctl.views import facts_table

    title, facts, problems = verify_set(directory)

    def render(out: "Console") -> None:
        out.print(facts_table(title, facts))
        for problem in problems:
            out.print(problem, markup=False, soft_wrap=True)
        out.print(f"[red]the {title} is NOT sound[/]" if problems else f"[green]the {title} is sound[/]")

    emit(as_json, facts | {"problems": problems}, render)
    if problems:
        raise typer.Exit(1)
