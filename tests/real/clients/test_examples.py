"""Each example as a separate program, on a proxy in front of a fake engine: a tool call first, then an answer.

The test applies the diff of the example's README and runs the agent with that line. It also runs the agent without it,
as in the framework's documentation, with the proxy's address in the environment.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.proxies import ProxyAndEngine, RunningProxy, running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Reply, Rule, RunningFakeEngine, Script, ToolCall, running_fake_engine

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCUMENTED_URL = "http://127.0.0.1:8100"
MODEL = "gpt-4.1-mini"

CALL = ToolCall(name="get_weather", arguments={"city": "Oslo"})
TOOL_SAID = "It rains in Oslo, at 7 degrees."
ANSWER = "Yes, take one: it rains in Oslo."

PYTHON = ["openai", "openai_agents", "langgraph", "pydantic_ai", "smolagents"]
EDITING = ["smolagents"]
"""Frameworks that rewrite the model's tool calls in the history."""


@pytest.fixture(scope="module")
def shared_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyAndEngine]:
    """A proxy in front of an engine whose model has the name that the agents request."""
    directory = tmp_path_factory.mktemp("proxy")
    with (
        running_fake_engine(Script(model=MODEL)) as engine,
        running_proxy(engine.url, f"sqlite:///{directory}/turnwise.db", directory) as proxy,
    ):
        engine.calls.clear()
        yield ProxyAndEngine(proxy, engine)


def changed_line(name: str) -> tuple[str, str]:
    """Return the line without our address and with it, as the example's README shows them."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (EXAMPLES / name / "README.md").read_text(), re.DOTALL)
    without, with_address = diff.splitlines()
    assert (without[0], with_address[0]) == ("-", "+")
    return without[1:], with_address[1:]


def source(name: str, file: str, proxy: RunningProxy, *, way: str) -> str:
    """Return the example's program for this proxy: with the changed line, or as it was before."""
    program = (EXAMPLES / name / file).read_text()
    without, with_address = changed_line(name)
    assert program.splitlines().count(with_address) == 1
    assert with_address.count(DOCUMENTED_URL) == 1
    if way == "environment":
        return program.replace(with_address, without)
    return program.replace(DOCUMENTED_URL, proxy.url)


def answer_as_scripted(engine: RunningFakeEngine, name: str) -> None:
    """Call the tool for the question, and answer after the tool's result."""
    final = Reply(text=ANSWER)
    if name == "smolagents":
        final = Reply(tool_calls=[ToolCall(name="final_answer", arguments={"answer": ANSWER})])
    engine.answer(Rule(contains="umbrella", reply=Reply(tool_calls=[CALL])))
    engine.answer(Rule(contains=TOOL_SAID, reply=final))


def run(command: list[str], directory: Path, base_url: str | None) -> str:
    """Run a program to its end and return what it printed."""
    environment = {**os.environ, "OPENAI_API_KEY": "none", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    if base_url is not None:
        environment["OPENAI_BASE_URL"] = base_url
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Played:
    """The output and the stored turns of a run of an example."""

    def __init__(self, proxy: RunningProxy, engine: RunningFakeEngine) -> None:
        self._proxy = proxy
        self._engine = engine
        self._num_calls = len(engine.calls)
        self._known = {view.turn.turn_id for view in proxy.turns()}

    def check(self, printed: str, reasons: list[str | None]) -> None:
        """Check the answer, and that the two calls are two turns of one session, with these reasons."""
        assert printed.splitlines()[-1] == ANSWER
        calls = self._engine.calls[self._num_calls :]
        views = [view for view in self._proxy.turns() if view.turn.turn_id not in self._known]
        assert [view.turn.token_ids.tolist() for view in views] == [call.token_ids[0] for call in calls]
        assert len({view.turn.session_id for view in views}) == 1
        assert [view.turn.reason for view in views] == reasons
        assert [view.turn.outcome for view in views] == ["retokenised" if reason else "exact" for reason in reasons]
        assert len({view.turn.chain_id for view in views}) == 1 + sum(reason is not None for reason in reasons)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, "line") for name in PYTHON]
    + [("openai", "environment")]
    + [pytest.param(name, "environment", marks=pytest.mark.slow) for name in PYTHON if name != "openai"],
)
def test_an_example_runs_and_is_one_exact_chain_or_its_turns_have_the_reason(proxy, fake_engine, tmp_path, name, way):
    """A history that only grows is extended token by token.

    Where it is edited, each turn has its own chain, and the session's name in the URL joins them.
    """
    played = Played(proxy, fake_engine)
    answer_as_scripted(fake_engine, name)
    (tmp_path / "agent.py").write_text(source(name, "agent.py", proxy, way=way))
    url = proxy.session_v1(f"{name}-by-environment") if name in EDITING else proxy.v1
    printed = run([sys.executable, "agent.py"], tmp_path, url if way == "environment" else None)
    played.check(printed, [None, "edited_history" if name in EDITING else None])


@pytest.mark.parametrize("way", ["line", pytest.param("environment", marks=pytest.mark.slow)])
def test_the_node_example_runs_and_is_one_exact_chain(proxy, fake_engine, node_project, way):
    played = Played(proxy, fake_engine)
    answer_as_scripted(fake_engine, "openai_node")
    program = node_project / f"agent-{os.getpid()}.mjs"
    program.write_text(source("openai_node", "agent.mjs", proxy, way=way))
    printed = run(["node", program.name], node_project, proxy.v1 if way == "environment" else None)
    played.check(printed, [None, None])


NO_AGENTS = {"demos", "gigpo", "policies", "trl_claims", "secret/tasks.py"}
"""The demos' drivers and tasks, an algorithm, which the trainer loads, and a trainer."""
AGENTS = sorted(
    path
    for path in EXAMPLES.glob("*/*.py")
    if NO_AGENTS.isdisjoint({path.parent.name, path.relative_to(EXAMPLES).as_posix()})
)


@pytest.mark.parametrize("program", AGENTS, ids=lambda path: path.parent.name)
def test_an_example_does_not_import_turnwise(program):
    nodes = list(ast.walk(ast.parse(program.read_text())))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert modules
    assert {module.partition(".")[0] for module in modules}.isdisjoint({"turnwise", "proxy", "trainer"})
