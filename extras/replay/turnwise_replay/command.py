"""`turnwise replay`: the calls of a recording, made again."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from turnwise.errors import InvalidRequest
from turnwise.types import Json
from turnwise_replay.replaying import replay as make_again


@click.command("replay")
@click.argument("recording", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--to", "base_url", required=True, metavar="URL", help="OpenAI-compatible endpoint, with its /v1.")
@click.option("--api-key", default="none", envvar="OPENAI_API_KEY", help="Bearer key [default: $OPENAI_API_KEY].")
@click.option("--speed", type=click.FloatRange(min=0), default=1.0, show_default=True, help="0: without pauses.")
@click.option("--model", help="Model to ask for instead of the recorded one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def replay(recording: Path, base_url: str, api_key: str, speed: float, model: str | None, *, as_json: bool) -> None:
    """Make recorded calls again, at their own pace or faster; exit 1 if any failed."""
    lines = recording.read_text(encoding="utf-8").splitlines()
    calls = [_recorded(line, number, recording) for number, line in enumerate(lines, 1) if line]
    done = asyncio.run(make_again(calls, base_url.rstrip("/"), api_key=api_key, speed=speed, model=model))
    report = done.as_json()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo("\n".join(f"{name}: {value}" for name, value in report.items() if value not in (None, {})))
    if report["failed"]:
        sys.exit(1)


def _recorded(line: str, number: int, file: Path) -> Json:
    try:
        call: Json = json.loads(line)
        if {"turn_id", "parent_turn_id", "started_at", "body"} <= call.keys():
            return call
    except (ValueError, AttributeError) as error:
        raise InvalidRequest(f"line {number} of {str(file)!r} is not a JSON object: {error}") from error
    raise InvalidRequest(
        f"line {number} of {str(file)!r} is not a recorded call; write the file by `turnwise export --format replay`"
    )
