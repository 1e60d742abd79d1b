"""`turnwise engine`: vLLM with the flags that capture and reload need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnwise.commands.flags import SettingsCommand

if TYPE_CHECKING:
    from turnwise.processes.engine_command import EngineSettings


def _run(settings: EngineSettings, extra: tuple[str, ...]) -> None:
    """Become the engine."""
    from turnwise.processes.engine_command import build_command, check_startable

    check_startable(settings)
    build_command(settings, extra).execute()


def _show(settings: EngineSettings, extra: tuple[str, ...]) -> dict[str, Any]:
    """Return the engine's command for `--dry-run`."""
    from turnwise.processes.engine_command import build_command

    command = build_command(settings, extra)
    return {"argv": list(command.argv), "environment": command.environment, "shell": command.shell()}


engine = SettingsCommand(
    "engine",
    section="engine",
    run=_run,
    show=_show,
    takes_extra="[-- VLLM FLAGS…]",
    help="Run vLLM with the flags that capture and reload need. Arguments after -- go to vLLM.",
)
