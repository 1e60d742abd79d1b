"""The task, the model, and the one tool of the programs beside this file."""

import os
import subprocess
import sys

PROMPT = sys.argv[1]
MODEL = os.environ["OPENAI_MODEL"]
BASE_URL = os.environ["OPENAI_BASE_URL"]
API_KEY = os.environ["OPENAI_API_KEY"]
INSTRUCTIONS = "You are a helpful agent."
SUB_INSTRUCTIONS = "You look at one part of a task."
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def bash(command: str) -> str:
    """Run a command.

    Args:
        command: The command.
    """
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return ran.stdout + ran.stderr
