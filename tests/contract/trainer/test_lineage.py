"""A trainer notes what its versions come from before engines can serve them, and signs it beside their weights."""

import contextlib
import json

import pytest
from support.full_disk import no_file_over
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.claims.ledger import Ledger
from trainer.features.lineage import MANIFEST
from turnwise.errors import NotWritten
from turnwise.features.lineage import shaped
from turnwise.features.lineage import versions as lineage
from turnwise.features.page.updates import list_updates
from turnwise.files import replaced
from turnwise.store import selection
from turnwise.version_directory import policy_directory, read_manifest


def test_each_version_has_a_signed_manifest_beside_its_weights(tmp_path, model, ledger):
    rollouts = Rollouts(ledger, load_model(model))
    rollouts.play("g", num_groups=2)
    settings = settings_for(tmp_path, model, total_batches=2, groups_per_batch=1)
    train(settings)
    with ledger.read() as conn:
        trained = {each.policy_version: each for each in list_updates(conn)[0]}
        before = None
        for number in (1, 2):
            directory = policy_directory(settings.policies_dir, number)
            document = json.loads((directory / MANIFEST).read_text())
            manifest, signature = document["manifest"], document["signature"]
            found = lineage.lineage(conn, None, f"default@{number}")
            assert (found.manifest, found.signature, found.is_signed) == (manifest, signature, True)
            assert manifest["data"]["digest"] == trained[number].batch_digest is not None
            assert (manifest["data"]["num_sessions"], found.num_sessions, found.num_unnamed) == (4, 4 * number, 0)
            assert manifest["weights"] == read_manifest(directory)["sha256"]
            assert manifest["settings"]["learning_rate"] == settings.learning_rate
            assert "database" not in manifest["settings"]
            assert manifest["code"]["turnwise"]
            assert len(manifest["code"]["digest"]) == 64
            assert (manifest["parent"], manifest["parent_manifest"]) == (number - 1, before)
            before = lineage.digest_of(lineage.canonical(manifest))


def test_a_deletion_names_a_version_that_was_published_and_whose_update_is_not_recorded_yet(
    tmp_path, model, ledger, monkeypatch
):
    """The trainer dies before its acknowledgement: engines may serve the version."""
    Rollouts(ledger, load_model(model)).play("g", num_groups=1)

    def die(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Ledger, "ack", die)
    with pytest.raises(KeyboardInterrupt):
        train(settings_for(tmp_path, model, total_batches=1, groups_per_batch=1))
    with ledger.read() as conn:
        (pk,) = (selection.session_row(conn, "default", "g-0-0").session_pk,)
        assert shaped.trained_on(conn, [pk]) == ({1}, set())
        assert lineage.lineage(conn, None, "default@1").num_sessions == 4


def test_a_full_disk_names_the_manifest_that_could_not_be_written(tmp_path, model, ledger, monkeypatch):
    Rollouts(ledger, load_model(model)).play("g", num_groups=1)

    @contextlib.contextmanager
    def replaced_on_a_full_disk(path):
        with no_file_over(0), replaced(path) as staged:
            yield staged

    monkeypatch.setattr("trainer.features.lineage.replaced", replaced_on_a_full_disk)
    with pytest.raises(NotWritten, match=r"v000001/lineage\.json' on '.+' cannot be written: .*too large"):
        train(settings_for(tmp_path, model, total_batches=1, groups_per_batch=1))
