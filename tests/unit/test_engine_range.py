"""The range of vLLM's releases: another one is refused, and all that the plug-in touches is in the recorded table."""

import ast
import re
import sys
import types
from pathlib import Path

import pytest
from support.vllm_sources import RELEASES, recorded

from turnwise import engine_plugin
from turnwise.engine_plugin import upstream
from turnwise.processes import engine_command

ROOT = Path(__file__).resolve().parents[2]
ASKED = re.compile(r'(?:engine|self)\.ask\(\s*"(GET|POST)", f?"(/[^"]+)"')


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "0.9.2", "dev"])
def test_a_vllm_outside_of_the_range_is_refused_with_what_to_install(version, monkeypatch):
    said = f"fits vLLM >=0.32,<0.34, and this is vLLM {version}: run `pip install 'vllm>=0.32,<0.34'`"
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
        patched.setitem(sys.modules, "vllm.version", types.SimpleNamespace(__version__=version))
        with pytest.raises(RuntimeError, match=re.escape(said)):
            engine_plugin.register.__wrapped__()
    monkeypatch.setattr("importlib.util.find_spec", {"vllm": types.SimpleNamespace}.get)  # `make compat` has no vLLM
    monkeypatch.setattr(engine_command, "installed_version", {"vllm": version, "torch": "2.13.0"}.get)
    assert said in str(engine_command.packages_problem())


@pytest.mark.parametrize("version", [*RELEASES, "0.32.1+cpu", "0.33.0rc1"])
def test_a_vllm_of_the_range_is_taken(version):
    assert upstream.refusal(version) is None


def test_the_documented_range_is_the_programs_and_the_image_of_deployments_is_in_it():
    assert f"`vllm{upstream.RANGE}`" in (ROOT / "docs" / "compatibility.md").read_text()
    images = re.findall(r"vllm-openai:v([\d.]+)", (ROOT / "docker-compose.yml").read_text())
    assert images
    assert [upstream.refusal(each) for each in images] == [None] * len(images)


def test_no_patch_is_kept_that_a_release_of_the_range_makes_needless():
    needless = {name: each.needless_from for name, each in upstream.PATCHES.items() if each.needless_from}
    assert {name: first for name, first in needless.items() if first < upstream.BELOW} == {}


def test_all_that_the_plug_in_takes_of_vllm_is_recorded():
    names = recorded().keys()
    missing = {
        f"{each.module}:{alias.name}"
        for file in (ROOT / "turnwise" / "engine_plugin").rglob("*.py")
        for each in ast.walk(ast.parse(file.read_text()))
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("vllm")
        for alias in each.names
        if not any(re.match(rf"{each.module}(:|\.){alias.name}(?!\w)", name) for name in names)
    }
    assert missing == set()
    replaced = {name for each in upstream.PATCHES.values() for name in each.replaced}
    assert replaced <= names


def test_each_route_that_the_proxy_asks_an_engine_for_is_recorded_in_all_releases():
    found = {" ".join(each) for file in (ROOT / "proxy").rglob("*.py") for each in ASKED.findall(file.read_text())}
    assert len(found) > 12
    found = found - {"GET /is_{name}", "GET /metrics"} | {"GET /is_paused", "GET /is_sleeping"}
    table = recorded()
    assert {each for each in found if None in table.get(each, [None])} == set()
