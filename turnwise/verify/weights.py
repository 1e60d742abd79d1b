"""The weights of each policy version that is still on disk, against the digests in its manifest."""

from __future__ import annotations

from pathlib import Path

from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyVersion
from turnwise.verify.report import Report
from turnwise.version_directory import MANIFEST, file_digest, read_json, weights_digest


def check_weights(policy: PolicyVersion, report: Report) -> None:
    """Hash every weights file of a version, and compare it with its manifest, and the manifest with the database."""
    version, directory = policy.version, Path(policy.path)
    manifest = directory / MANIFEST
    if not directory.is_dir():
        report.not_checked["policy versions whose files are gone"] += 1
        return
    if not manifest.exists():
        report.not_checked["policy versions without a manifest"] += 1
        return
    try:
        document = read_json(manifest)
        digests: dict[str, str] = document["sha256"]
    except (BadCheckpoint, KeyError) as error:
        report.add("weights", str(manifest), f"is no manifest: {type(error).__name__} {error}")
        return
    if document.get("version") != version:
        report.add("weights", str(manifest), f"names version {document.get('version')}, the database {version}")
    if policy.weights_digest is not None and policy.weights_digest != weights_digest(directory):
        report.add("weights", str(manifest), f"has other digests than version {version} was published with")
    for name, digest in digests.items():
        report.checked["weights files"] += 1
        _check_file(directory / name, digest, report)


def _check_file(path: Path, digest: str, report: Report) -> None:
    if not path.is_file():
        report.add("weights", str(path), "is missing")
        return
    found = file_digest(path)
    if found != digest:
        report.add("weights", str(path), f"has SHA-256 {found[:12]}…, its manifest says {digest[:12]}…")
