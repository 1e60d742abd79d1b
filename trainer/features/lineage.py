"""Notes what each version comes from before it is published, and writes its signed manifest beside its weights."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import turnwise
from trainer.claims.holds import Hold
from trainer.claims.ledger import outlast
from trainer.publish.checkpoint import writing
from trainer.settings import TrainerSettings
from turnwise.features.lineage import versions as lineage
from turnwise.files import replaced
from turnwise.installed import installed_version
from turnwise.settings import mask_credentials
from turnwise.store.updates import Advantages
from turnwise.types import Json, PolicyVersion, SessionKey
from turnwise.version_directory import recorded_digests

MANIFEST = "lineage.json"
"""In each version's directory: the manifest with its signature."""
PACKAGES = "turnwise", "torch", "transformers", "peft", "numpy"


class Lineage(Hold[TrainerSettings]):
    """Notes the parent, the sessions, the settings and the code of each version."""

    def announced(self, version: PolicyVersion, parent: int, trained: Mapping[SessionKey, Advantages]) -> None:
        """Note a version; once its files are written, sign what was noted and write it beside them."""
        path, ledger = Path(version.path), self._ledger
        settings: Json = json.loads(mask_credentials(json.dumps(self._settings.saved())))
        of_trainer: Json = {
            "settings": settings,
            "code": code(),
            "weights": recorded_digests(path) if version.is_written else None,
        }

        def note() -> tuple[Json, str | None]:
            with ledger.db.write() as conn:
                return lineage.note_version(conn, version, parent, trained, of_trainer)

        manifest, signature = outlast(note, ledger.process)
        if signature is not None:
            with writing(path / MANIFEST), replaced(path / MANIFEST) as staged:
                document = json.dumps({"manifest": manifest, "signature": signature}, indent=2)
                staged.write_text(document + "\n", encoding="utf-8")


@functools.cache
def code() -> Json:
    """Return the versions of what trained, and one digest of Turnwise's own files."""
    root, digest = Path(turnwise.__file__).parents[1], hashlib.sha256()
    for package in ("trainer", "turnwise"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    versions = {name: installed_version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "platform": sys.platform, **versions, "digest": digest.hexdigest()}
