"""mini-swe-agent without changes, called for one task: its agent, its shell and its model class.

turnwise run --tasks tasks.jsonl --call examples.mini_swe_agent.agent:play
"""

import os
import pwd
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_CONFIGURED", "true")
os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no download of price lists

import litellm
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

SYSTEM_PROMPT = "Reply with one block: ```mswea_bash_command, a command, ```."
COMMANDS = ("cat", "echo", "ls")
UNPRIVILEGED_USER = "nobody"

litellm.suppress_debug_info = True


def drop_privileges() -> None:
    """Switch to an unprivileged user, if this process may change its user."""
    if os.geteuid() != 0:
        return
    user = pwd.getpwnam(UNPRIVILEGED_USER)
    os.seteuid(user.pw_uid)
    readable = os.access(Path(litellm.__file__), os.R_OK, effective_ids=True)
    os.seteuid(0)
    if not readable:
        print(f"the packages are not readable by {UNPRIVILEGED_USER}; commands run as root")
        return
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def make_path() -> str:
    """Return a directory with only the commands that the task needs."""
    path = Path(SCRATCH) / "bin"
    path.mkdir()
    for name in COMMANDS:
        program = shutil.which(name)
        if program is None:
            raise SystemExit(f"this machine has no {name!r}, which the task needs")
        (path / name).symlink_to(program)
    return str(path)


SCRATCH = tempfile.mkdtemp(prefix="mini-swe-agent-")
Path(SCRATCH).chmod(0o777)
PATH = make_path()
drop_privileges()
# Sampled commands inherit the environment, so variables that are no longer needed are removed, including keys.
os.environ.clear()
os.environ.update(PATH=PATH, HOME=SCRATCH, LC_ALL="C")


def temperature(split: str) -> float:
    """Return the sampling temperature: 1 to explore in training, 0 to measure on held-out tasks."""
    return 0.0 if split == "eval" else 1.0


def play(task: dict, run: Any) -> float:
    """Play one task in its own directory; return 1 for the right answer, otherwise 0."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as directory:
        for name, content in task["files"].items():
            Path(directory, name).write_text(content)
        model = LitellmTextbasedModel(
            model_name=f"openai/{run.model}",
            model_kwargs={
                "api_base": run.base_url,
                "api_key": run.api_key,
                "temperature": temperature(run.split),
                "max_tokens": 128,
            },
        )
        shell = LocalEnvironment(cwd=directory, timeout=10)
        agent = DefaultAgent(
            model,
            shell,
            system_template=SYSTEM_PROMPT,
            instance_template="{{task}}",
            step_limit=task["step_limit"],
            max_consecutive_format_errors=1,
        )
        ended = agent.run(task["question"])
    return float(ended["submission"].strip() == task["answer"])
