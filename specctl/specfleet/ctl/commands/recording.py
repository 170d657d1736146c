"""specctl data capture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specfleet.ctl.options import AsJson, CoordinatorAddress, Overrides, StateDir

if TYPE_CHECKING:
    from rich.console import Console

# \b: the lines of this paragraph stay as they are.
EXAMPLES = """\b
Example:
  specctl up --detach
  specctl data capture recipes/smollm2-eagle3.yaml --out features/smollm2
  specctl run submit recipes/smollm2-eagle3.yaml -s data.source=features -s data.features=features/smollm2

The recipe's model, data, capture and strategy sections say what is captured. A set that serves every strategy has all their
layers and the final state: -s strategy.layers=[1,8,14,20,26,27] with eagle3, peagle or dspark, for a target of 30 layers.

The same command again records what is missing, whatever happened to the first one.
"""


def capture(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="A run configuration.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The feature set; continued when it is not complete.")
    ],
    overrides: Overrides = None,
    shard_mb: Annotated[
        int, typer.Option("--shard-mb", min=1, help="MiB per shard; also what is captured again after a kill, at most.")
    ] = 256,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Watch to the end, verify the set, and say what it holds.")
    ] = True,
    coordinator: CoordinatorAddress = "",
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Record the hidden states of a recipe's prompts as a feature set, with the whole fleet: resumable and verified.

    The directory must be visible to this machine, the coordinator and the trainer, whose one rank writes it.
    """
    from specfleet.contracts.errors import SpecfleetError
    from specfleet.contracts.states import RunState
    from specfleet.ctl.client import Client, find_address
    from specfleet.ctl.output import emit, say, to_dict
    from specfleet.ctl.progress import RunProgress
    from specfleet.ctl.recording import build_recording, recording
    from specfleet.ctl.views import facts_table, run_facts
    from specfleet.wire.run_pb2 import ListRunsRequest, ResumeRunRequest

    directory = out.expanduser().resolve()
    with Client(find_address("coordinator", coordinator, state_dir)) as client:
        runs = client.call(client.runs.ListRuns, ListRunsRequest()).runs
        request = build_recording(recipe, overrides or [], directory, shard_mb << 20, runs, say)
        if request is None:
            say(f"{directory} is complete: nothing is left to record")
            _conclude(directory, as_json)
            return
        run = client.call(client.runs.SubmitRun, request, timeout_s=300).run
        if run.state == RunState.PAUSED:
            run = client.call(client.runs.ResumeRun, ResumeRunRequest(run_id=run.run_id)).run
        if not follow:
            emit(as_json, to_dict(run), lambda console: console.print(facts_table(run.run_id, run_facts(run))))
            return
        last = run
        with RunProgress(measure=recording) as progress:
            for last in client.watch(run.run_id):
                progress.update(last)
    if last.state in (RunState.FAILED, RunState.CANCELLED):
        raise SpecfleetError(
            "SF-RECORD-OVER",
            f"run {last.run_id} is {last.state}: {last.reason or 'no reason given'}. What {directory} lists is safe; "
            "the same command records the rest",
        )
    _conclude(directory, as_json)


def _conclude(directory: Path, as_json: bool) -> None:
    """Reads the whole set. Exit code 1 when something is wrong with it."""
    from specfleet.ctl.output import emit
    from specfleet.ctl.recording import conclusion
    from specfleet.ctl.views import facts_table

    facts, problems = conclusion(directory)

    def render(console: "Console") -> None:
        dead = facts["dead"]
        console.print(facts_table("feature set", facts | {"dead": len(dead)}))
        for index, reason in dead.items():
            console.print(f"dead prompt {index}: {reason}", markup=False, soft_wrap=True)
        for problem in problems:
            console.print(problem, markup=False, soft_wrap=True)
        console.print("[red]the set is NOT sound[/]" if problems else "[green]the set is sound[/]")

    emit(as_json, facts | {"problems": problems}, render)
    if problems:
        raise typer.Exit(1)
