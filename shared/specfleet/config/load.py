"""YAML in, RunConfig out: `extends:`, `-s a.b=v` overrides, the nearest name for a misspelt key, exit-code-2 errors."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from specfleet.config.models import RunConfig
from specfleet.config.strategies import STRATEGY_SECTIONS
from specfleet.contracts.errors import ConfigError

# What pydantic says in the words of Python classes.
_MAPPING = "must be a mapping of keys to values"
_PLAIN = {
    "list_type": "must be a list, as in [first, second]",
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "union_tag_not_found": "must be a mapping with a name, as in {name: eagle3}",
}


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a run configuration file. Relative data paths stay as written; `extends:` is resolved against the file's folder.

    Raises ConfigError (SF-CONFIG-*), naming the file, the key and what to do.
    """
    return _validate(_apply(_read(path, ()), overrides), str(path))


def parse_config(text: str, origin: str = "configuration") -> RunConfig:
    """Validates YAML text that is already resolved (no `extends:`)."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _not_yaml(origin, error) from error
    return _validate(document, origin)


def dump_config(config: RunConfig) -> str:
    """The resolved configuration as YAML; parse_config(dump_config(c)) == c."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError("SF-CONFIG-EXTENDS", f"extends: forms a circle: {' → '.join(str(p) for p in (*seen, path))}")
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError("SF-CONFIG-MISSING", f"configuration file {path} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("SF-CONFIG-UNREADABLE", f"configuration file {path} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise _not_yaml(str(path), error) from error
    if not isinstance(document, dict):
        raise ConfigError("SF-CONFIG-YAML", f"{path} must hold a mapping of sections, not {type(document).__name__}")
    base = document.pop("extends", None)
    return document if base is None else _merge(_read(path.parent / str(base), (*seen, path)), document)


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings are merged key by key; an empty one replaces, so that `data.filter={}` filters no longer."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if value and isinstance(old, Mapping) and isinstance(value, Mapping):
            value = _merge(old, value)
        merged[key] = value
    return merged


def _apply(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError("SF-CONFIG-OVERRIDE", f"override {override!r} is not of the form section.key=value")
        try:
            patch: Any = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise _not_yaml(f"the value of override {override!r}", error) from error
        for key in reversed(keys):
            patch = {key: patch}
        document = _merge(document, patch)
    return document


def _not_yaml(what: str, error: yaml.YAMLError) -> ConfigError:
    return ConfigError("SF-CONFIG-YAML", f"{what} is not YAML: {' '.join(str(error).split())}")


def _validate(document: Any, origin: str) -> RunConfig:
    if not isinstance(document, Mapping):
        raise ConfigError("SF-CONFIG-YAML", f"{origin} must hold a mapping of sections, not {type(document).__name__}")
    try:
        return RunConfig.model_validate(document)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        unknown = any(item["type"] == "extra_forbidden" for item in error.errors())
        code = "SF-CONFIG-UNKNOWN-KEY" if unknown else "SF-CONFIG-INVALID"
        raise ConfigError(code, f"{origin}: " + "; ".join(lines)) from error


def _explain(item: Any) -> str:
    shown_parts = [str(part) for part in item["loc"]]
    if shown_parts[:1] == ["strategy"] and shown_parts[1:2] and shown_parts[1] in STRATEGY_SECTIONS:
        del shown_parts[1]  # which form of the section it is, not a key anybody wrote
    where = ".".join(shown_parts)
    if item["type"] == "extra_forbidden":
        key, names = str(item["loc"][-1]), _field_names(item["loc"][:-1])
        near = difflib.get_close_matches(key, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
        if item["loc"][0] == "strategy" and (owners := _strategies_with(key)):
            hint = f"it belongs to {', '.join(owners)}, and the strategy is {item['loc'][1]}"
        return f"unknown key {where!r}; {hint}"
    if item["type"] == "union_tag_invalid":
        near = difflib.get_close_matches(str(item["ctx"]["tag"]), STRATEGY_SECTIONS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"{where}.name: there is no strategy {item['ctx']['tag']!r}, known: {', '.join(STRATEGY_SECTIONS)}{hint}"
    message = _PLAIN.get(item["type"], item["msg"].removeprefix("Value error, "))
    shown = "" if item["type"] in ("value_error", "missing") else f" (got {item['input']!r})"
    return f"{where}: {message}{shown}" if where else f"{message}{shown}"


def _strategies_with(key: str) -> list[str]:
    return [name for name, section in STRATEGY_SECTIONS.items() if key in section.model_fields]


def _field_names(location: tuple[Any, ...]) -> list[str]:
    """Keys of the section at a location. Inside `strategy` the location's next part names the strategy."""
    model: type[BaseModel] = RunConfig
    parts = [str(part) for part in location]
    while parts:
        part = parts.pop(0)
        if model is RunConfig and part == "strategy" and parts:
            model = STRATEGY_SECTIONS[parts.pop(0)]
            continue
        field = model.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
