"""A scripted replacement for vLLM: the same wire format, with replies and faults that a test sets.

`create_app` returns the ASGI application, `running_fake_engine` serves it from a thread, `turnwise fake-engine` runs it
as a process.
"""

from turnwise_fake_engine.running import RunningFakeEngine, running_fake_engine, serve
from turnwise_fake_engine.script import Fault, FaultKind, Reply, Rule, Script, ToolCall
from turnwise_fake_engine.server import create_app

__all__ = [
    "Fault",
    "FaultKind",
    "Reply",
    "Rule",
    "RunningFakeEngine",
    "Script",
    "ToolCall",
    "create_app",
    "running_fake_engine",
    "serve",
]
