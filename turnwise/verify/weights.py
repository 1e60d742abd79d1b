"""The weights of each policy version that is still on disk, against the digests in its manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from turnwise.types import Json
from turnwise.verify.report import Report

MANIFEST = "turnwise.json"


def check_weights(version: int, directory: Path, report: Report) -> None:
    """Hash every weights file of a version and compare it with the manifest that was written with it."""
    manifest = directory / MANIFEST
    if not directory.is_dir():
        report.not_checked["policy versions whose files are gone"] += 1
        return
    if not manifest.exists():
        report.not_checked["policy versions without a manifest"] += 1
        return
    try:
        document: Json = json.loads(manifest.read_text(encoding="utf-8"))
        digests: dict[str, str] = document["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        report.add("weights", str(manifest), f"is no manifest: {type(error).__name__} {error}")
        return
    if document.get("version") != version:
        report.add("weights", str(manifest), f"says version {document.get('version')}, the database {version}")
    for name, digest in digests.items():
        report.checked["weights files"] += 1
        _check_file(directory / name, digest, report)


def _check_file(path: Path, digest: str, report: Report) -> None:
    if not path.is_file():
        report.add("weights", str(path), "is missing")
        return
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != digest:
        report.add("weights", str(path), f"has SHA-256 {found[:12]}…, its manifest says {digest[:12]}…")
