"""A grader of the tiny task: a program, which reads a session as JSON and prints a number, and a function.

It imports little, since `turnwise reward --source command` starts it once for each session.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

TASK = re.compile(r"remainder (\d+) modulo (\d+)")


def share_right(document: dict[str, Any]) -> float:
    """Return the share of right numbers over a session's replies."""
    return share_right_of(document["chains"][0]["messages"])


def share_right_of(messages: list[dict[str, Any]]) -> float:
    """Return the share of right numbers over the assistant's messages; the first message has the task."""
    remainder, modulus = map(int, TASK.search(messages[0]["content"]).groups())
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    numbers = [int(number) for reply in replies for number in reply.split()]
    return sum(number % modulus == remainder for number in numbers) / len(numbers)


if __name__ == "__main__":
    print(share_right(json.load(sys.stdin)))
