"""Terminus 2 of Terminal-Bench with a short context, on a terminal of this machine instead of a container's."""

import litellm
from shell import BASE_URL, MODEL, PROMPT, bash
from terminal_bench.agents.terminus_2 import Terminus2


class Terminal:
    """What the agent uses of Terminal-Bench's session."""

    def __init__(self) -> None:
        self.screen = ""

    def send_keys(self, keys: str, **_: object) -> None:
        self.screen = bash(keys)

    def capture_pane(self, **_: object) -> str:
        return self.screen

    def get_incremental_output(self) -> str:
        return self.screen

    def is_session_alive(self) -> bool:
        return True

    def get_asciinema_timestamp(self) -> float:
        return 0.0


name, terminal = f"openai/{MODEL}", Terminal()
limits = {"max_tokens": 11_000, "max_output_tokens": 11_000, "litellm_provider": "openai", "mode": "chat"}
litellm.register_model({MODEL: limits, name: limits})
Terminus2(name, api_base=BASE_URL).perform_task(PROMPT, terminal)
print(terminal.screen)
