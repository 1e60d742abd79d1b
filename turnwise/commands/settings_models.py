"""The settings of each section of `turnwise.toml`, by the section's name.

A model is imported when it is asked for: `turnwise --help` and the SDK alone need no package of an extra.
"""

from __future__ import annotations

from turnwise.settings import Settings

DESCRIPTIONS = {
    "up": "`turnwise up`: the whole stack on this machine. It sets model, addresses, database of the other sections.",
    "proxy": "`turnwise proxy`: the API for agents, sessions, rewards and policies.",
    "trainer": "`turnwise train`: claims experiences, updates, publishes.",
    "engine": "`turnwise engine`: vLLM with the right flags.",
    "run": "`turnwise run`: any agent as rollouts.",
    "reward": "`turnwise reward`: rewards from a separate process.",
}
"""What each section is for."""


def settings_model(section: str) -> type[Settings]:
    """Return the settings model of a section.

    Raises:
        ModuleNotFoundError: the extra with the process is not installed.
    """
    match section:
        case "up":
            from turnwise.processes.stack import UpSettings

            return UpSettings
        case "proxy":
            from proxy.settings import ProxySettings

            return ProxySettings
        case "trainer":
            from trainer.settings import TrainerSettings

            return TrainerSettings
        case "engine":
            from turnwise.processes.engine_command import EngineSettings

            return EngineSettings
        case "run":
            from turnwise.rollouts.settings import RunSettings

            return RunSettings
        case "reward":
            from turnwise.rewards.settings import RewardSettings

            return RewardSettings
    raise ValueError(f"no section {section!r}")
