"""`python -m turnwise.demo.mini_swe_agent`: a third-party agent learns a task on this machine."""

from __future__ import annotations

from turnwise.demo.agent_driver import AgentDemo, AgentDemoSettings
from turnwise.demo.driver import demo_command

command = demo_command(
    "demo-agent",
    AgentDemoSettings,
    AgentDemo,
    "Build a small model, start the whole stack, and let mini-swe-agent learn a task from its rewards.",
)

if __name__ == "__main__":
    command()
