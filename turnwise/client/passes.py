"""The loop of a connector: a command that posts as feedback what people say in another program, in one pass or many."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

import click
import httpx2

from turnwise.errors import TurnwiseError
from turnwise.types import Json

log = logging.getLogger(__name__)


def run_passes(one_pass: Callable[[], Json], every: float | None) -> None:
    """Run a pass and print its counts; repeat it at an interval, also after an error of either program."""
    while True:
        try:
            click.echo(json.dumps(one_pass()))
        except (TurnwiseError, httpx2.HTTPError) as error:
            if every is None:
                raise click.ClickException(str(error)) from error
            log.warning("this pass ended early, the next one reads everything again: %s", error)
        if every is None:
            return
        time.sleep(every)
