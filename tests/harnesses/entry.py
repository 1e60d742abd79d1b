"""One entry of the table: an agent, framework or SDK, how it is installed, and the command that runs it headless."""

import dataclasses
import functools
import importlib.metadata
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise_fake_engine import Reply, ToolCall

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
"""Programs that use a framework or an SDK as its documentation does."""
PINS: Mapping[str, Mapping[str, str]] = tomllib.loads((Path(__file__).parent / "pins.toml").read_text())
"""Version of each package, by `npm` and `pypi`."""

PROMPT = "Run the check and report."
"""The prompt for every agent."""
OUTPUT = "checked-42"
"""The output of the tool, followed by the label of the call; the command does not contain it."""
ANSWER = "FINISHED-WELL"
SUB_TASK = "Look at the sub-task."
SUB_ANSWER = "SUB-TASK-DONE"


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool that the engine calls, with one argument that differs between calls."""

    name: str
    argument: str = "command"
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The other arguments."""

    def call(self, value: str) -> ToolCall:
        return ToolCall(name=self.name, arguments={self.argument: value, **self.others})


@dataclasses.dataclass(frozen=True)
class Harness:
    name: str
    package: str
    pointing: str
    """The line that points it at the proxy, for people who do not use `turnwise run`."""
    argv: Callable[[Path], list[str]]
    """The command, from the directory that it is installed in."""
    _: dataclasses.KW_ONLY
    installer: Literal["npm", "pypi", "dev"]
    """Source of the package; `dev` means Turnwise's development environment."""
    dialect: str = "chat"
    beside: tuple[str, ...] = ()
    """Further packages, pinned as well."""
    python: str | None = None
    """The version of Python that the package needs, as uv takes it; None if it runs on Turnwise's own."""
    agent: str = "any"
    """Its entry in the table of `turnwise run`."""
    tool: Tool = Tool("bash")
    """Its tool that runs a command of a shell."""
    delegate: Tool | None = None
    """Its tool that gives a task to a sub-agent; None if it has none."""
    delegates_in_background: bool = False
    """Whether that tool returns before the sub-agent has answered. The engine then calls the shell until it has."""
    ask: Callable[[Sequence[ToolCall]], Reply] = lambda calls: Reply(text="I look.", tool_calls=list(calls))
    """The reply of the engine that calls tools."""
    last: Callable[[str], Reply] = lambda text: Reply(text=text)
    """The reply of the engine that ends a run with this text."""
    first_text: str = PROMPT
    """Text of the last message of its first request."""
    first_sub_text: str = SUB_TASK
    """The same of its sub-agent."""
    offers_tools: bool = True
    """Whether its requests list its tools; otherwise its prompt describes them."""
    summary_texts: tuple[str, ...] = ()
    """Texts of the last messages of its requests for a summary."""
    context_tokens: int | None = None
    """The context length that it is told; None: the engine's."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remark: str = ""
    """Why a cell cannot be better, for the page."""

    @property
    def version(self) -> str:
        """The pinned version; of the development environment the installed one."""
        if self.installer == "dev":
            return importlib.metadata.version(self.package)
        return PINS[self.installer][self.package]

    def requirements(self) -> list[str]:
        pins, sign = PINS[self.installer], "@" if self.installer == "npm" else "=="
        return [f"{package}{sign}{pins[package.split('[')[0]]}" for package in (self.package, *self.beside)]


dev = functools.partial(Harness, installer="dev")
pypi = functools.partial(Harness, installer="pypi")
npm = functools.partial(Harness, installer="npm")
"""Entries of each installer: name, package, setting of the base URL, command."""


def python_program(name: str) -> Callable[[Path], list[str]]:
    return lambda directory: [str(directory / "bin" / "python"), str(PROGRAMS / f"{name}.py"), PROMPT]


def node_program(name: str) -> Callable[[Path], list[str]]:
    """Return the command of a JavaScript program, copied beside the packages, where node looks for them."""

    def argv(directory: Path) -> list[str]:
        copied = directory / f"{name}.mjs"
        for source in (PROGRAMS / "node").glob("*.mjs"):
            (directory / source.name).write_text(source.read_text())
        return ["node", str(copied), PROMPT]

    return argv
