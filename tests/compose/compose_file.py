"""Read docker-compose.yml for the tests: variables filled in, one profile chosen, services in start order.

The rules, the processes and the containers of the tests are all made from this file, so none of them can differ from
what people deploy.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE_FILE = ROOT / "docker-compose.yml"

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z0-9_]+)(?::(?P<kind>[-?])(?P<rest>[^}]*))?\}")

Service = dict[str, Any]


def services(profile: str, variables: Mapping[str, str]) -> dict[str, Service]:
    """Return the services of one profile, each before those that depend on it, with every variable filled in."""
    document = _filled_in(_document(), variables)
    chosen = {
        name: service for name, service in document["services"].items() if profile in service.get("profiles", [profile])
    }
    for service in chosen.values():
        wanted = service.get("depends_on", {})
        service["depends_on"] = {name: how["condition"] for name, how in wanted.items() if name in chosen}
    return _in_start_order(chosen)


@functools.cache
def _document() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE_FILE.read_text(encoding="utf-8"))


def volumes() -> list[str]:
    return list(_document()["volumes"])


def variables() -> dict[str, str | None]:
    """Return the variables that the file reads, each with its default; None where a value is required."""
    found: dict[str, str | None] = {}
    for match in _VARIABLE.finditer(COMPOSE_FILE.read_text(encoding="utf-8")):
        default = match["rest"] if match["kind"] == "-" else None
        found[match["name"]] = default if found.get(match["name"]) is None else found[match["name"]]
    return found


def _filled_in(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled_in(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled_in(item, variables) for item in value]
    if not isinstance(value, str):
        return value
    return _VARIABLE.sub(lambda match: _value_of(match, variables), value)


def _value_of(match: re.Match[str], variables: Mapping[str, str]) -> str:
    given = variables.get(match["name"])
    if given:
        return given
    if match["kind"] == "-":
        return match["rest"]
    raise KeyError(f"docker-compose.yml needs {match['name']}: {match['rest'] or 'no default is given'}")


def _in_start_order(chosen: dict[str, Service]) -> dict[str, Service]:
    ordered: dict[str, Service] = {}
    while len(ordered) < len(chosen):
        ready = [name for name in chosen if name not in ordered and chosen[name]["depends_on"].keys() <= ordered.keys()]
        if not ready:
            raise ValueError(f"the services {sorted(chosen.keys() - ordered.keys())} wait for each other")
        ordered |= {name: chosen[name] for name in ready}
    return ordered
