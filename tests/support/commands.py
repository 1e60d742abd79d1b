"""`turnwise` commands for tests, in this process or as processes without imports of their own: see warm_commands.py."""

import atexit
import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from support.waiting import WAIT_SECONDS
from support.warm_commands import WarmCommands

from turnwise.commands.cli import main


def invoke(*arguments: str, **options: Any) -> Result:
    """Run a `turnwise` command in this process, whatever its exit status; `options` are those of click's runner."""
    return CliRunner().invoke(main, arguments, **options)


def verify(database_url: str, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run `turnwise verify`; return its exit status and its report."""
    result = invoke("verify", "--database", database_url, "--json", *arguments)
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


@functools.cache
def warm_commands() -> WarmCommands:
    commands = WarmCommands()
    atexit.register(commands.close)
    return commands


def run_turnwise(
    *arguments: str, cwd: Path | None = None, seconds: float = WAIT_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a `turnwise` command to its end, whatever its exit status; it cannot import torch."""
    with tempfile.TemporaryDirectory() as directory:
        output, errors = Path(directory) / "stdout", Path(directory) / "stderr"
        process = warm_commands().start(
            arguments, log=output, errors=errors, cwd=cwd or Path.cwd(), environment=os.environ
        )
        try:
            status = process.wait(seconds)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())
