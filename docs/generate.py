"""Writes the pages and parts of pages that are made from the code. A test compares the files with it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import click
from prometheus_client.metrics import MetricWrapperBase
from pydantic import SecretStr

from proxy import features
from proxy.metrics import STORED, Metrics
from trainer.algorithms.grpo import PolicyGradient
from trainer.algorithms.loading import provided
from turnwise.commands.cli import main as command
from turnwise.settings import MODELS, Settings, describe_secret, field_docs, settings_model

TARGET = Path(__file__).parent / "reference.md"


def pages() -> dict[Path, str]:
    """Return all pages that are made from the code, by their file."""
    api_page = runpy.run_path(str(TARGET.with_name("api_page.py")))
    client_page = runpy.run_path(str(TARGET.with_name("client_page.py")))
    files_page = runpy.run_path(str(TARGET.with_name("files_page.py")))
    return {
        TARGET: reference(),
        TARGET.with_name("api.md"): api_page["api"](),
        TARGET.with_name("client.md"): client_page["client"](),
        TARGET.with_name("files.md"): files_page["files"](),
    }


def reference() -> str:
    """Return the whole page."""
    parts = [
        "# Reference",
        "",
        "Made from the code by `make docs`.",
        "",
        "## Commands",
        "",
        "| command | does |",
        "|---|---|",
        *(f"| `turnwise {name}` | {text} |" for name, text in commands(command)),
    ]
    for section in MODELS:
        parts += [
            "",
            f"## Settings: `[{section}]`",
            "",
            "| setting | default | means |",
            "|---|---|---|",
            *rows(settings_model(section)),
        ]
        if section == "trainer":
            parts += algorithms()
    parts += ["", "## Metrics", "", "| metric | labels | counts |", "|---|---|---|", *metrics()]
    return "\n".join(parts) + "\n"


def algorithms() -> list[str]:
    """Return the settings of each algorithm; those that all policy gradients have stand first."""
    head = [
        "",
        "## Settings: `[trainer.algorithm]`",
        "",
        "| algorithm | setting | default | means |",
        "|---|---|---|---|",
    ]
    lines = [f"| all with a policy gradient {row}" for row in rows(PolicyGradient.Settings)]
    for name, kind in provided().items():
        known = {}
        for base in reversed(kind.__mro__[1:]):
            if "name" in vars(base) or base is PolicyGradient:
                known |= base.Settings.model_fields
        fields = kind.Settings.model_fields
        own = [field for field in fields if field not in known or fields[field].default != known[field].default]
        lines += [f"| `{name}` {row}" for row in rows(kind.Settings) if row.split("`")[1] in own]
    return head + lines


def commands(group: click.Group, before: str = "") -> list[tuple[str, str]]:
    """Return every command with the first sentence of its help."""
    found: list[tuple[str, str]] = []
    for name, each in sorted(group.commands.items()):
        if isinstance(each, click.Group):
            if each.invoke_without_command:
                found.append((before + name, first_sentence(each.help or "")))
            found += commands(each, f"{before}{name} ")
        else:
            found.append((before + name, first_sentence(each.help or "")))
    return found


def rows(settings: type[Settings]) -> list[str]:
    """Return one line a setting."""
    lines = []
    docs = field_docs(settings, Settings)
    for name, field in settings.model_fields.items():
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        shown = describe_secret(value) if isinstance(value, SecretStr) else value
        default = "required" if field.is_required() else f"`{shown}`"
        # The page is the same on every machine.
        default = default.replace(sys.executable, "sys.executable")
        means = docs.get(name, "").replace("|", "\\|")
        lines.append(f"| `{name}` | {default} | {means} |")
    return lines


def metrics() -> list[str]:
    """Return one line a metric, as Prometheus names it."""
    lines = [
        f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {text} |"
        for name, (text, *labels) in STORED.items()
    ]
    made = Metrics()
    counting = (*features.STEPS, *features.served().beside, features.served().reload.loader)
    counted = [each for kind in counting for each in kind.counters.values()]
    counted += [each for step in features.STEPS for each in step.unpacked.values()]
    added = [made.counter(*each) for each in counted]
    added += [made.newest(*each) for kind in features.served().beside for each in kind.gauges.values()]
    for metric in (*vars(made).values(), *added):
        if not isinstance(metric, MetricWrapperBase):
            continue
        described = metric.describe()[0]
        suffix = "_total" if described.type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)  # noqa: SLF001  the library has no public attribute for them
        lines.append(f"| `{described.name}{suffix}` | {labels} | {described.documentation} |")
    return sorted(lines)


def first_sentence(text: str) -> str:
    """Return the first sentence on one line."""
    return " ".join(text.partition("\n\n")[0].split())


if __name__ == "__main__":
    for path, page in pages().items():
        path.write_text(page)
        sys.stdout.write(f"wrote {path}\n")
