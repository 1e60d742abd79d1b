"""Agents for the tests of `turnwise run`: plain programs that do not use Turnwise and start in milliseconds."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.commands import run_turnwise

from turnwise.processes.stack import command

AGENT = """\
import json, os, sys, urllib.request

def ask(text):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]
"""
"""The head of every agent: `ask` makes one model call."""


def write_agent(directory: Path, body: str) -> Path:
    path = directory / "agent.py"
    path.write_text(AGENT + body)
    return path


def write_tasks(directory: Path, *tasks: Mapping[str, object]) -> Path:
    path = directory / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def start_run(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command("run", *arguments),
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished_run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_turnwise("run", *arguments, cwd=directory)
