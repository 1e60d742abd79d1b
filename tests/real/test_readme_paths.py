"""The four paths of README, "I have …": every block of each, word for word, in one directory with what it names.

A stand-in engine and a proxy take the place of `turnwise up`, which the section before has started.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from support.documented_commands import ROOT
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Reply, Rule, Script, running_fake_engine

from turnwise.client import Client

PATHS = re.findall(r"^### (.*?)\n(.*?)(?=^##)", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
AGENT = """
import os, sys
from openai import OpenAI

def play(task, run):
    client = OpenAI(base_url=run.base_url, api_key=run.api_key)
    return 1.0 if task["answer"] in ask(client, run.model, task["question"]) else 0.0

def ask(client, model, question):
    asked = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=asked).choices[0].message.content

if __name__ == "__main__":
    ask(OpenAI(), os.environ["OPENAI_MODEL"], sys.argv[1])
"""
GRADER = """#!/bin/sh
exec python3 -c 'import json, sys; it = json.load(sys.stdin); \
print(float(it["task"]["answer"] in it["turns"][-1]["response"]["content"]))'
"""
TASKS = [{"question": "Where is Kim?", "answer": "Oslo"}, {"question": "Where is Lea?", "answer": "Rome"}]


def rules() -> list[Rule]:
    """Return a right answer to five questions and wrong ones after them, and what a judge makes of both."""
    return [
        Rule(contains="In Oslo", reply=Reply(text='{"score": 9}')),
        Rule(contains="Is the answer right?", reply=Reply(text='{"score": 2}')),
        Rule(contains="Where is Kim?", count=5, reply=Reply(text="In Oslo")),
        Rule(reply=Reply(text="Nowhere")),
    ]


@pytest.fixture
def project(tmp_path):
    """Return a function that runs a block in a directory with the files that the paths name."""
    (tmp_path / "bin").mkdir()
    for name, command in (("turnwise", "-m turnwise"), ("python3", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {command} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "grade.sh").write_text(GRADER)
    (tmp_path / "grade.sh").chmod(0o755)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    known = {"kim-0": ("Where is Kim?", 1), "lea-0": ("Where is Lea?", 0)}
    lines = [json.dumps({"session_id": name, "reward": reward}) for name, (_, reward) in known.items()]
    (tmp_path / "known.jsonl").write_text("\n".join(lines))
    (tmp_path / ".turnwise-key").write_text("any")  # a proxy without keys takes each
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with running_fake_engine(Script(rules=rules())) as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        with Client(proxy.url) as client:
            for name, (question, _) in known.items():
                session = client.create_session(session_id=name)
                messages = [{"role": "user", "content": question}]
                session.openai().chat.completions.create(model="any", messages=messages)
                session.end()
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]),
            "TURNWISE_PROXY_DATABASE": url,
            "TURNWISE_URL": proxy.url,
        }

        def run(text: str) -> None:
            asked = text.replace("http://127.0.0.1:8100", proxy.url).replace("curl ", "curl --fail-with-body -sS ")
            if "turnwise export --format hf" in asked:  # over HTTP text alone is exported; `up` has the database here
                asked = f"unset TURNWISE_URL\n{asked}".replace("turnwise run", f"TURNWISE_URL={proxy.url} turnwise run")
            done = subprocess.run(
                ["bash", "-euo", "pipefail"],
                input=asked,
                text=True,
                capture_output=True,
                timeout=WAIT_SECONDS,
                check=False,
                cwd=tmp_path,
                env=environment,
            )
            assert done.returncode == 0, f"{asked}\n{done.stdout}\n{done.stderr}"

        yield run, proxy.url, tmp_path


def test_readme_has_four_paths():
    assert [name.partition(" ")[2].partition(" ")[0].strip(",") for name, _ in PATHS] == [
        "chat",
        "benchmark",
        "judge",
        "TRL",
    ]


@pytest.mark.parametrize(("name", "text"), PATHS, ids=[name for name, _ in PATHS])
def test_a_path_runs_as_written_and_leaves_rewards(name, text, project):
    run, url, directory = project
    for block in re.findall(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        run(block)
    with Client(url) as client:
        rewards = {each["reward"] for each in client.sessions()} - {None}
    assert 1.0 in rewards or rewards == {0.9, 0.2}
    if "TRL" in name:
        assert {"prompt", "chosen", "rejected"} <= json.loads(
            (directory / "pairs.jsonl").read_text().splitlines()[0]
        ).keys()
        assert (directory / "experiences").is_dir()
