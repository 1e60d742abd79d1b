"""What follows for policies that a deletion leaves shaped, and the manifests that a database signs."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.ledger_samples import add_session, update_record

from turnwise.features import policies, retention, rewinds
from turnwise.features.lineage import shaped
from turnwise.features.lineage import versions as lineage
from turnwise.features.lineage.shaped import ShapedPolicy, Then
from turnwise.store import claims, keys, serving, versions
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyStatus, PolicyVersion


@pytest.fixture
def train(database, tmp_path):
    """Return a function that makes a version of a policy from a parent and sessions, and lets engines serve it."""
    with database.write() as conn:
        versions.adopt_base(conn, PolicyVersion(version=0, path="/no/model", model_digest="the base model"))

    def make(number: int, parent: int, *session_ids: str, tenant: str = "default", policy_id: int = 0) -> Path:
        path = tmp_path / str(policy_id) / f"v{number:06d}"
        path.mkdir(parents=True)
        version = PolicyVersion(
            version=number, policy_id=policy_id, path=str(path), kind=PolicyKind.LORA, update_id=number
        )
        trained: Mapping[tuple[str, str], Mapping[str, float]] = {(tenant, each): {} for each in session_ids}
        written = dataclasses.replace(version, weights_digest="d")
        with database.write() as conn:
            lineage.note_version(conn, written, parent, trained, {})
            versions.publish_version(conn, written)
            record = update_record(number, policy_id=policy_id)
            claims.ack(conn, claims.Finished(claims.Claim(groups=()), record, written, trained=trained))
            serving.activate_version(conn, number)
        return path

    return make


def delete(database: Database, session_id: str, tenant: str = "default") -> retention.Deleted:
    return retention.delete_all(database, lambda conn: retention.delete_session(conn, tenant, session_id))


def followed(
    database: Database, deleted: retention.Deleted, then: Then
) -> tuple[list[ShapedPolicy], retention.Deletion]:
    done, dropped = [], []
    for each in shaped.shaped_policies(database, deleted.shaped_versions):
        with database.write() as conn:
            policy, gone = shaped.follow(conn, each, then)
        done.append(policy)
        dropped += gone
    return done, retention.finish(database, deleted, done, dropped)


def test_a_policy_goes_back_to_the_last_version_that_deleted_sessions_did_not_shape(database, train):
    """Version 2 was trained on the session and 3 comes from it; 4 was trained again from 1, and its files are gone."""
    add_session(database, "a")
    add_session(database, "s")
    train(1, 0, "a")
    train(2, 1, "s")
    train(4, 1, "a").rmdir()
    train(5, 2, "a")
    (policy,), said = followed(database, delete(database, "s"), Then.ROLLBACK)
    assert (policy.shaped_version, policy.clean_version, policy.then, policy.reason) == (5, 1, Then.ROLLBACK, None)
    assert (said.policy_versions, said.served_versions, said.shaped_policies) == ([2], [2, 5], [policy])
    with database.read() as conn:
        state = serving.serving_state(conn)
    assert (state.target.version, rewinds.undone(state)) == (1, range(2, 6))
    assert followed(database, retention.Deleted(policy_versions=(2,)), Then.NOTHING)[0][0].then is Then.NOTHING


def test_a_policy_that_serves_a_clean_version_is_left_alone(database, train):
    add_session(database, "s")
    train(1, 0, "s")
    train(2, 0)
    assert followed(database, delete(database, "s"), Then.DROP)[0] == []


def test_the_default_policy_is_dropped_to_the_base_model(database, train):
    add_session(database, "s")
    path = train(1, 0, "s")
    (policy,), said = followed(database, delete(database, "s"), Then.DROP)
    assert (policy.clean_version, policy.then, said.deleted_versions) == (0, Then.DROP, [])
    assert path.exists()
    with database.read() as conn:
        assert serving.serving_state(conn).target.version == 0


def test_a_named_policy_is_dropped_with_its_files_and_one_without_a_clean_version_cannot_go_back(database, train):
    with database.write() as conn:
        number = policies.create_policy(conn, "acme", "p")[0].policy_id
    add_session(database, "s", tenant="acme", policy_id=number)
    path = train(1, 0, "s", tenant="acme", policy_id=number)
    deleted = delete(database, "s", "acme")
    (policy,), said = followed(database, deleted, Then.ROLLBACK)
    assert (policy.tenant, policy.policy, policy.clean_version, policy.then) == ("acme", "p", None, Then.NOTHING)
    assert policy.reason == "policy 'p' has no version with its files that they did not shape"
    (policy,), said = followed(database, deleted, Then.DROP)
    assert (policy.then, said.deleted_versions, said.served_versions, path.exists()) == (Then.DROP, [1], [1], False)
    with database.read() as conn:
        (version,), _ = versions.list_versions(conn, policy_ids=[number])
        assert (version.status, version.error) == (PolicyStatus.FAILED, shaped.DROPPED)
        assert policies.find_policy(conn, "acme", "p").archived_at is not None


def test_a_tenant_is_told_of_no_policy_of_another_one_that_its_sessions_shaped(database, train):
    add_session(database, "s", tenant="acme")
    train(1, 0, "s", tenant="acme")
    with database.write() as conn:
        policies.create_policy(conn, "zeta", "theirs", "default@1")
    roots = delete(database, "s", "acme").shaped_versions
    assert [each.policy for each in shaped.shaped_policies(database, roots, "acme")] == ["default"]
    assert [each.policy for each in shaped.shaped_policies(database, roots)] == ["default", "theirs"]


def test_a_manifest_names_its_parent_and_its_data_and_no_other_database_signed_it(database, train, tmp_path):
    add_session(database, "s")
    train(1, 0)
    train(2, 1, "s")
    with database.read() as conn:
        found = lineage.lineage(conn, None, "default@2")
        manifest, signature = found.manifest, found.signature
        parent = lineage.lineage(conn, None, "default@1").manifest
        assert lineage.is_signed(conn, json.loads(json.dumps(manifest)), signature)
        assert not lineage.is_signed(conn, manifest | {"parent": 0}, signature)
    assert (manifest["version"], manifest["parent"], manifest["base_model_digest"]) == (2, 1, "the base model")
    assert manifest["data"]["num_sessions"] == 1
    assert manifest["parent_manifest"] == lineage.digest_of(lineage.canonical(parent))
    with database.write() as conn:
        assert keys.server_secret(conn)  # is not the key that signs manifests
        conn.execute(lineage.secrets_table.delete().where(lineage.secrets_table.c.name == lineage.KEY))
        lineage.note_version(conn, PolicyVersion(version=9, policy_id=DEFAULT_POLICY, path="/v9"), 2, {}, {})
        assert not lineage.is_signed(conn, manifest, signature)
