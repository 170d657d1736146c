"""Every recipe through `specctl run submit` on the embedded stack: online, and offline from one recorded feature set."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.stack import Specctl
from typer.testing import CliRunner

from specfleet.config import load_config
from specfleet.config.strategies import STRATEGY_SECTIONS
from specfleet.ctl.app import app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

# All but the demo's, which `specctl demo` runs.
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("smollm2-*.yaml"))
PROMPTS = 12
# What makes a recipe for a real target small. Whatever else it says is what runs.
SMALL = {
    "eagle3": ["draft_vocab_size=300", "ttt_length=3"],
    "peagle": ["draft_vocab_size=300", "num_layers=2", "mask_token_id=383"],
    "dflash": ["num_layers=2", "mask_token_id=383"],
    "domino": ["num_layers=2", "mask_token_id=383", "gru_hidden_size=16", "embedding_size=8"],
    "dspark": ["num_layers=2", "mask_token_id=383", "markov_rank=8"],
}


def strategy_of(recipe: Path) -> str:
    return load_config(recipe).strategy.name


def test_every_strategy_has_a_recipe() -> None:
    assert {strategy_of(recipe) for recipe in RECIPES} == STRATEGY_SECTIONS.keys() == SMALL.keys()


class Stack:
    """The embedded stack, spoken to by the command line in this process, whose libraries are loaded."""

    def __init__(self, folder: Path, common: list[str]) -> None:
        self.folder, self._common = folder, common

    def __call__(self, *command: str | Path, settings: list[str] | None = None) -> str:
        options = [part for setting in settings or [] for part in ("-s", setting)]
        state = ["--state-dir", str(self.folder / ".specfleet"), "--json"]
        done = CliRunner().invoke(app, [*map(str, command), *options, *state], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    def settings(self, recipe: Path) -> list[str]:
        name = strategy_of(recipe)
        return [*self._common, *(f"strategy.{setting}" for setting in SMALL[name])]

    def submit(self, recipe: Path, run_id: str, *more: str) -> None:
        self("run", "submit", recipe, "--run-id", run_id, settings=[*self.settings(recipe), *more])

    def finish(self, run_id: str) -> dict[str, Any]:
        last: dict[str, Any] = json.loads(self("run", "watch", run_id, "--interval", "0.2").splitlines()[-1])
        return last


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("recipes")
    rows = [
        {"id": f"r{n}", "split": "train", "finish": "stop", "messages": [
            {"role": "user", "content": f"What is {n} times 3?"},
            {"role": "assistant", "content": f"The answer is {n * 3}. Let me explain step by step."},
        ]}
        for n in range(PROMPTS)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = [
        f"model.target={tiny_target}", "model.dtype=float32", f"data.train=[{folder / 'rows.jsonl'}]", "data.max_length=128",
        "trainer.batch_size=4", "trainer.epochs=1", "trainer.dtype=float32", "trainer.device=cpu", "trainer.num_threads=1",
        f"deployment.output_dir={folder / 'runs'}",
    ]  # fmt: skip
    specctl = Specctl(folder)
    done = specctl("up", "--detach", "--pool", "128M")
    try:
        assert done.returncode == 0, done.stderr
        yield Stack(folder, common)
    finally:
        specctl("down")


@pytest.fixture(scope="module")
def runs(stack: Stack) -> None:
    """One feature set with all that any recipe asks for, then every recipe twice; they train one after another."""
    features = stack.folder / "features"
    (recipe,) = [recipe for recipe in RECIPES if strategy_of(recipe) == "dspark"]
    settings = [*stack.settings(recipe), "strategy.layers=[0,1,2,3,4]", "capture.extras=[teacher_argmax,teacher_lse]"]
    recorded = json.loads(stack("data", "capture", recipe, "--out", features, settings=settings))
    assert (recorded["rows"], recorded["problems"]) == (PROMPTS, [])
    for recipe in RECIPES:
        stack.submit(recipe, f"{recipe.stem}-online")
        stack.submit(recipe, f"{recipe.stem}-offline", "data.source=features", f"data.features={features}")


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_trains_online_and_offline(stack: Stack, recipe: Path) -> None:
    online, offline = (stack.finish(f"{recipe.stem}-{source}") for source in ("online", "offline"))
    for run in (online, offline):
        assert (run["state"], run["trained_steps"]) == ("SUCCEEDED", run["total_steps"]), run
        assert run["tasks"] == {"SETTLED": PROMPTS}
    assert online["captured_tokens"] == online["trained_tokens"] == offline["trained_tokens"] > 0
    assert offline["captured_tokens"] == 0
    # The same prompts in the same order; only the batches that capture happened to form differ.
    assert online["metrics"].keys() == offline["metrics"].keys()
    assert online["metrics"]["loss"] == pytest.approx(offline["metrics"]["loss"], rel=1e-4)
