# ruff: noqa: E501  the lines of the page are longer than those of the code
"""Writes docs/client.md: an introduction with tested examples, and each method with its signature and docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from turnwise.client import Client, SessionHandle, wire
from turnwise.client.connection import Connection
from turnwise.settings import field_docs

INTRODUCTION = """# The Python client

`turnwise.client` is the Python client of the control plane: it creates sessions, posts rewards, and reads captured data.
It is [installed](compatibility.md#install) without any extra. It imports neither a database driver nor torch. [api.md](api.md) has its HTTP routes.

A session creates OpenAI clients with the session's own URL and key, so an agent that accepts an OpenAI client runs unchanged:

```python
from turnwise.client import Client

with Client("http://127.0.0.1:8100") as turnwise:
    model = turnwise.served_model()
    for run in range(8):
        session = turnwise.create_session(task_id="kim", run=run, group_id="kim-1", group_size=8)
        openai = session.openai()
        reply = openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "Which city?"}])
        ended = session.end(reward=1.0 if "Oslo" in (reply.choices[0].message.content or "") else 0.0)
        print(ended["training_note"])
```

This example posts a reward for each step, and prints the experiences that the trainer would get:

```python
from turnwise.client import Client

with Client("http://127.0.0.1:8100") as turnwise:
    session = turnwise.create_session(credit="step_wise", gamma=0.9)
    for step in range(2):
        messages = [{"role": "user", "content": f"Step {step}?"}]
        session.openai(step=step).chat.completions.create(model=turnwise.served_model(), messages=messages)
        session.reward(0.5, step=step)
    session.end()
    for experience in turnwise.experiences(session_id=session.session_id):
        print(experience["eid"]["step"], experience["reward"], experience["return"], experience["advantage"])
```

`AsyncClient` has the same methods. Await all of them except iterators:

```python
import asyncio

from turnwise.client import AsyncClient


async def main():
    async with AsyncClient("http://127.0.0.1:8100") as turnwise:
        session = await turnwise.create_session()
        messages = [{"role": "user", "content": "Which city?"}]
        await session.openai_async().chat.completions.create(model=await turnwise.served_model(), messages=messages)
        await session.end(reward=1.0)
        async for turn in session.turns():
            print(turn["turn_id"], turn["outcome"], turn["token_ids"])


asyncio.run(main())
```

Labels mark sessions for later, and lists can search the content of sessions:

```python
from turnwise.client import Client

with Client("http://127.0.0.1:8100") as turnwise:
    for session in turnwise.sessions(text="Oslo", min_reward=0.5):
        turnwise.set_label(session["session_id"], "golden", note="found the city")
    print([session["session_id"] for session in turnwise.sessions(label="golden")])
```

Every write has an idempotency key, so a call that is repeated after a broken connection, 429 or 503 takes effect once. Errors
are exceptions of `turnwise.errors`: `InvalidRequest`, `Unauthorized`, `Forbidden`, `NotFound`, `Conflict`, and
`ProxyUnavailable` once all retries have failed.
"""
_FIRST = re.compile(r"(.+?)(?:\n\n|$)", re.DOTALL)


def client() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    parts.append("\n".join(["## `Client` and `AsyncClient`", "", *_options(), "", *_methods(Client)]) + "\n")
    parts.append("\n".join(["## A session", "", *_methods(SessionHandle)]) + "\n")
    for title, fields in (
        ("`create_session`", wire.SessionFields),
        ("`reward`, besides its value", wire.RewardFields),
    ):
        docs = field_docs(fields)
        rows = [f"| `{name}` | {docs.get(name, '')} |" for name in fields.__annotations__]
        parts.append("\n".join([f"## Fields of {title}", "", "| field | means |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _options() -> Iterator[str]:
    """Yield the arguments of a client's creation as rows."""
    described = dict(re.findall(r"^    (\w+): (.+)$", inspect.getdoc(Connection.__init__) or "", flags=re.MULTILINE))
    yield from ("| argument | default | means |", "|---|---|---|")
    for name, parameter in inspect.signature(Connection.__init__).parameters.items():
        if name in described:
            yield f"| `{name}` | `{parameter.default!r}` | {described[name]} |"


def _methods(owner: type) -> Iterator[str]:
    yield from ("| method | does |", "|---|---|")
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        if not name.startswith("_") and name not in vars(Connection):
            shown = str(inspect.signature(method)).replace("'", "").partition(" ->")[0]
            shown = re.sub(r"(\*\*\w+): [^,)]+", r"\1", shown)  # their fields have tables of their own
            shown = shown.replace("(self, ", "(").replace("(self)", "()").replace("|", "\\|")
            first = _FIRST.match(inspect.getdoc(method) or "")
            yield f"| `{name}{shown}` | {' '.join(first[1].split()) if first else ''} |"
