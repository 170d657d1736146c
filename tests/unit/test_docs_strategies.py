"""docs/strategies.md names every option of every strategy, with the default it really has."""

import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from specfleet.config.section import Section
from specfleet.config.strategies import STRATEGY_SECTIONS

TEXT = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text(encoding="utf-8")
SHARED = "What all of them share"
CHAPTERS = {
    "eagle3": (SHARED, "EAGLE-3", "EAGLE-3.1", "LK losses"),
    "peagle": (SHARED, "P-EAGLE"),
    "dflash": (SHARED, "DFlash", "D-PACE"),
    "domino": (SHARED, "DFlash", "Domino"),
    "dspark": (SHARED, "DFlash", "DSpark"),
}


def chapter(title: str) -> str:
    found = re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def stated_defaults(title: str) -> dict[str, str]:
    """Key → default of the chapter's option table; rows may hold several, separated by commas."""
    stated = {}
    for keys, defaults in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", chapter(title), re.MULTILINE):
        names = [key.removeprefix("strategy.") for key in re.findall(r"`([^`]+)`", keys)]
        values = [value.strip().strip("`") for value in defaults.split(",")]
        stated |= dict(zip(names, values, strict=True))
    assert stated or title == "D-PACE", title
    return stated


def shown(section: type[Section], key: str) -> str:
    default = section.model_fields[key].default
    assert default is not PydanticUndefined, key
    if isinstance(default, bool):
        return str(default).lower()
    return {None: "per strategy", "": "–"}.get(default, str(default))


@pytest.mark.parametrize("name", STRATEGY_SECTIONS)
def test_every_option_is_documented(name: str) -> None:
    text = "".join(chapter(title) for title in CHAPTERS[name])
    options = set(STRATEGY_SECTIONS[name].model_fields) - {"name"}
    missing = {key for key in options if not re.search(rf"`(strategy\.)?{key}[`:]", text)}
    assert not missing


@pytest.mark.parametrize(
    ("name", "title"), [(name, titles[-1]) for name, titles in CHAPTERS.items()] + [("eagle3", "EAGLE-3"), ("dflash", "DFlash")]
)  # fmt: skip
def test_defaults_are_those_of_the_configuration(name: str, title: str) -> None:
    section = STRATEGY_SECTIONS[name]
    for key, default in (stated_defaults(SHARED) | stated_defaults(title)).items():
        assert shown(section, key) == default, key


def test_what_domino_and_dspark_change_of_dflash_is_said() -> None:
    rows = {key: row for row in chapter("DFlash").splitlines() for key in re.findall(r"^\| `(\w+)`", row)}
    fields = {name: section.model_fields for name, section in STRATEGY_SECTIONS.items()}
    for name, other in (("Domino", "domino"), ("DSpark", "dspark")):
        for key, row in rows.items():
            default = fields[other][key].default
            assert (f"{name}: {default}" in row) == (default != fields["dflash"][key].default), (name, key)
