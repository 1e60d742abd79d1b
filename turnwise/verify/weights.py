"""The weights of each policy version that is still on disk, against the digests in its manifest."""

from __future__ import annotations

from pathlib import Path

from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyVersion
from turnwise.verify.report import Report
from turnwise.version_directory import MANIFEST, compare_digests, read_manifest, weights_digest


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
        named = read_manifest(directory).get("version")
        found = weights_digest(directory)
    except BadCheckpoint as error:
        report.add("weights", str(manifest), f"is no manifest: {error}")
        return
    if named != version:
        report.add("weights", str(manifest), f"names version {named}, the database {version}")
    if found is None or (policy.weights_digest is not None and policy.weights_digest != found):
        report.add("weights", str(manifest), f"has other digests than version {version} was published with")
    for file, problem in compare_digests(directory):
        report.checked["weights files"] += 1
        if problem is not None:
            report.add("weights", str(file), problem)
