"""Ten tasks in a browser that browser-use controls by what it sees: the page's elements, and a screenshot a step."""

import asyncio
import os
import sys

os.environ |= {"ANONYMIZED_TELEMETRY": "false", "BROWSER_USE_CLOUD_SYNC": "false", "BROWSER_USE_VERSION_CHECK": "false"}
from browser_use import Agent, Browser, ChatOpenAI

PROXY, SITE, CHROMIUM = sys.argv[1:4]
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage"]


async def play(number: int) -> bool:
    llm = ChatOpenAI(model="small", base_url=f"{PROXY}/sessions/task-{number}/v1", api_key="EMPTY")
    browser = Browser(
        executable_path=CHROMIUM, headless=True, chromium_sandbox=False, args=FLAGS, enable_default_extensions=False
    )
    task = f"Open {SITE}/task/{number} and do what the page says."
    agent = Agent(task=task, llm=llm, browser=browser, flash_mode=True, use_judge=False)
    history = await agent.run(max_steps=8)
    return bool(history.is_successful())


async def main() -> None:
    for number in range(10):
        print(number, await play(number), flush=True)


asyncio.run(main())
