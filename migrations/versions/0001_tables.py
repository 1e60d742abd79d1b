"""The tables of release 0.2, as `make release-fixture` wrote them before it: they never change here.

A later change of `turnwise.store.schema`, or of a feature's table, is a new migration, which only adds.
"""

from __future__ import annotations

import re
import time

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TYPES = {
    "sqlite": {"serial": "INTEGER", "key": "INTEGER", "blob": "BLOB"},
    "postgresql": {"serial": "BIGSERIAL", "key": "BIGINT", "blob": "BYTEA"},
}
TABLES = """
CREATE TABLE api_keys (key_id TEXT NOT NULL, tenant TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL,
    policy_id INTEGER NOT NULL, secret_hash {blob} NOT NULL, created_at BIGINT NOT NULL, revoked_at BIGINT,
    expires_at BIGINT, last_used_at BIGINT, token_budget BIGINT, CONSTRAINT pk_api_keys PRIMARY KEY (key_id));
CREATE TABLE consent_marks (tenant TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, record INTEGER NOT NULL,
    written_by TEXT, created_at BIGINT NOT NULL, CONSTRAINT pk_consent_marks PRIMARY KEY (tenant, kind, name));
CREATE TABLE engine_minutes (minute INTEGER NOT NULL, engine TEXT NOT NULL, served BIGINT NOT NULL,
    busy BIGINT NOT NULL, CONSTRAINT pk_engine_minutes PRIMARY KEY (minute, engine));
CREATE TABLE groups (group_pk {serial} NOT NULL, tenant TEXT NOT NULL, group_id TEXT NOT NULL, group_size INTEGER,
    status TEXT NOT NULL, num_sessions INTEGER NOT NULL, num_finished INTEGER NOT NULL, policy_id INTEGER NOT NULL,
    policy_version_first INTEGER, last_active_at BIGINT NOT NULL, ready_at BIGINT, trainer_id TEXT,
    fencing_token BIGINT NOT NULL, leased_until BIGINT, update_id INTEGER, reason TEXT, imported INTEGER,
    part_of INTEGER, CONSTRAINT pk_groups PRIMARY KEY (group_pk));
CREATE TABLE idempotency (tenant TEXT NOT NULL, session_id TEXT NOT NULL, "key" TEXT NOT NULL,
    body_digest {blob} NOT NULL, answer TEXT NOT NULL, created_at BIGINT NOT NULL,
    CONSTRAINT pk_idempotency PRIMARY KEY (tenant, session_id, "key"));
CREATE TABLE leases (name TEXT NOT NULL, owner TEXT NOT NULL, fencing_token BIGINT NOT NULL,
    expires_at BIGINT NOT NULL, CONSTRAINT pk_leases PRIMARY KEY (name));
CREATE TABLE limit_holders (tenant TEXT NOT NULL, key_id TEXT NOT NULL, holder TEXT NOT NULL,
    num_calls INTEGER NOT NULL, num_needed INTEGER NOT NULL, expires_at BIGINT NOT NULL,
    CONSTRAINT pk_limit_holders PRIMARY KEY (tenant, key_id, holder));
CREATE TABLE limit_levels (tenant TEXT NOT NULL, key_id TEXT NOT NULL, requests FLOAT NOT NULL, tokens FLOAT NOT NULL,
    updated_at BIGINT NOT NULL, CONSTRAINT pk_limit_levels PRIMARY KEY (tenant, key_id));
CREATE TABLE media (tenant TEXT NOT NULL, digest TEXT NOT NULL, media_type TEXT NOT NULL, content {blob} NOT NULL,
    CONSTRAINT pk_media PRIMARY KEY (tenant, digest));
CREATE TABLE policies (policy_id {serial} NOT NULL, tenant TEXT NOT NULL, name TEXT NOT NULL, base_version INTEGER,
    pinned_version INTEGER, pinned_until INTEGER, created_at BIGINT NOT NULL, archived_at BIGINT,
    CONSTRAINT pk_policies PRIMARY KEY (policy_id), CONSTRAINT uq_policies_tenant_name UNIQUE (tenant, name));
CREATE TABLE policy_versions (version INTEGER NOT NULL, policy_id INTEGER NOT NULL, path TEXT NOT NULL,
    kind TEXT NOT NULL, status TEXT NOT NULL, update_id INTEGER, metrics TEXT NOT NULL, error TEXT,
    reload_seconds FLOAT, created_at BIGINT NOT NULL, activated_at BIGINT, weights_digest TEXT, model_digest TEXT,
    arms TEXT, arm_share FLOAT, alarm TEXT, CONSTRAINT pk_policy_versions PRIMARY KEY (version));
CREATE TABLE secrets (name TEXT NOT NULL, value {blob} NOT NULL, CONSTRAINT pk_secrets PRIMARY KEY (name));
CREATE TABLE token_usage (tenant TEXT NOT NULL, key_id TEXT NOT NULL, day INTEGER NOT NULL,
    num_tokens BIGINT NOT NULL, CONSTRAINT pk_token_usage PRIMARY KEY (tenant, key_id, day));
CREATE TABLE trainer_states (policy_id INTEGER NOT NULL, state TEXT NOT NULL,
    CONSTRAINT pk_trainer_states PRIMARY KEY (policy_id));
CREATE TABLE trainer_status (trainer_id TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL, starts_at BIGINT,
    reported_at BIGINT NOT NULL, seen_at BIGINT NOT NULL, CONSTRAINT pk_trainer_status PRIMARY KEY (trainer_id));
CREATE TABLE updates (update_id INTEGER NOT NULL, policy_id INTEGER NOT NULL, trainer_id TEXT NOT NULL,
    policy_version INTEGER NOT NULL, num_groups INTEGER NOT NULL, num_sessions INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL, metrics TEXT NOT NULL, created_at BIGINT NOT NULL, batch_digest TEXT,
    CONSTRAINT pk_updates PRIMARY KEY (update_id));
CREATE TABLE version_lineages (version INTEGER NOT NULL, path TEXT NOT NULL, parent INTEGER NOT NULL,
    num_sessions INTEGER NOT NULL, manifest TEXT NOT NULL, signature TEXT,
    CONSTRAINT pk_version_lineages PRIMARY KEY (version));
CREATE TABLE weight_servers (trainer_id TEXT NOT NULL, url TEXT NOT NULL, announced_at BIGINT NOT NULL,
    CONSTRAINT pk_weight_servers PRIMARY KEY (trainer_id));
CREATE TABLE sessions (session_pk {serial} NOT NULL, group_pk {key}, num_rewards INTEGER NOT NULL,
    session_id TEXT NOT NULL, tenant TEXT NOT NULL, task_id TEXT, run INTEGER NOT NULL, group_id TEXT,
    group_size INTEGER, split TEXT NOT NULL, credit TEXT NOT NULL, gamma FLOAT NOT NULL, sampling TEXT NOT NULL,
    explores FLOAT, metadata TEXT NOT NULL, user_id TEXT, key_id TEXT, train INTEGER NOT NULL,
    record INTEGER NOT NULL, opened_by TEXT, agent TEXT, continues TEXT, policy_id INTEGER NOT NULL, arm INTEGER,
    status TEXT NOT NULL, termination_reason TEXT, num_turns INTEGER NOT NULL, num_chains INTEGER NOT NULL,
    created_at BIGINT NOT NULL, last_active_at BIGINT NOT NULL, ended_at BIGINT,
    CONSTRAINT pk_sessions PRIMARY KEY (session_pk), CONSTRAINT uq_sessions_tenant_session_id UNIQUE (tenant,
    session_id), CONSTRAINT fk_sessions_group_pk_groups FOREIGN KEY(group_pk) REFERENCES groups (group_pk));
CREATE TABLE costs (cost_id {serial} NOT NULL, tenant TEXT NOT NULL, session_pk {key}, key_id TEXT NOT NULL,
    policy_id INTEGER NOT NULL, currency TEXT NOT NULL, amount BIGINT NOT NULL,
    CONSTRAINT pk_costs PRIMARY KEY (cost_id),
    CONSTRAINT uq_costs_session_pk_key_id_policy_id_currency UNIQUE (session_pk, key_id, policy_id, currency),
    CONSTRAINT fk_costs_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE SET NULL);
CREATE TABLE examples (tenant TEXT NOT NULL, example_id TEXT NOT NULL, session_pk {key}, policy_id INTEGER NOT NULL,
    criterion TEXT NOT NULL, note TEXT, prompt {blob} NOT NULL, reply {blob} NOT NULL, sampling TEXT NOT NULL,
    messages TEXT NOT NULL, tools TEXT, response TEXT NOT NULL, answers TEXT NOT NULL, written_by TEXT,
    created_at BIGINT NOT NULL, CONSTRAINT pk_examples PRIMARY KEY (tenant, example_id),
    CONSTRAINT fk_examples_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE CASCADE);
CREATE TABLE feedback (session_pk {key} NOT NULL, turn_id TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
    content TEXT NOT NULL, group_id TEXT, source TEXT, written_by TEXT, created_at BIGINT NOT NULL,
    CONSTRAINT pk_feedback PRIMARY KEY (session_pk, turn_id, kind, name),
    CONSTRAINT fk_feedback_session_pk_sessions FOREIGN KEY(session_pk) REFERENCES sessions (session_pk));
CREATE TABLE predicted_rewards (session_pk {key} NOT NULL, policy_id INTEGER NOT NULL,
    policy_version INTEGER NOT NULL, mean FLOAT NOT NULL, deviation FLOAT NOT NULL, made_at BIGINT NOT NULL,
    CONSTRAINT pk_predicted_rewards PRIMARY KEY (session_pk),
    CONSTRAINT fk_predicted_rewards_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE CASCADE);
CREATE TABLE rating_draws (draw_id {serial} NOT NULL, session_pk {key}, tenant TEXT NOT NULL,
    policy_id INTEGER NOT NULL, policy_version INTEGER NOT NULL, num_candidates INTEGER NOT NULL,
    since BIGINT NOT NULL, rater TEXT NOT NULL, asked_at BIGINT NOT NULL, leased_until BIGINT, rated_at BIGINT,
    rating FLOAT, written_by TEXT, CONSTRAINT pk_rating_draws PRIMARY KEY (draw_id),
    CONSTRAINT fk_rating_draws_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE SET NULL);
CREATE TABLE rewards (reward_id {serial} NOT NULL, session_pk {key} NOT NULL, turn_id TEXT, step INTEGER,
    value FLOAT NOT NULL, name TEXT NOT NULL, source TEXT, written_by TEXT, created_at BIGINT NOT NULL, digest {blob},
    CONSTRAINT pk_rewards PRIMARY KEY (reward_id), CONSTRAINT fk_rewards_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk));
CREATE TABLE session_copies (session_pk {key} NOT NULL, source_id TEXT NOT NULL, tenant TEXT NOT NULL,
    made_by TEXT NOT NULL, CONSTRAINT pk_session_copies PRIMARY KEY (session_pk, source_id),
    CONSTRAINT fk_session_copies_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE CASCADE);
CREATE TABLE session_labels (session_pk {key} NOT NULL, label TEXT NOT NULL, note TEXT, written_by TEXT,
    created_at BIGINT NOT NULL, tenant TEXT NOT NULL, CONSTRAINT pk_session_labels PRIMARY KEY (session_pk, label),
    CONSTRAINT fk_session_labels_session_pk_sessions FOREIGN KEY(session_pk)
    REFERENCES sessions (session_pk) ON DELETE CASCADE);
CREATE TABLE session_media (session_pk {key} NOT NULL, digest TEXT NOT NULL, tenant TEXT NOT NULL,
    CONSTRAINT pk_session_media PRIMARY KEY (session_pk, digest),
    CONSTRAINT fk_session_media_tenant_media FOREIGN KEY(tenant, digest) REFERENCES media (tenant, digest),
    CONSTRAINT fk_session_media_session_pk_sessions FOREIGN KEY(session_pk) REFERENCES sessions (session_pk));
CREATE TABLE trained_sessions (session_pk {key} NOT NULL, update_id INTEGER NOT NULL, policy_version INTEGER NOT NULL,
    advantages TEXT NOT NULL, digest {blob}, CONSTRAINT pk_trained_sessions PRIMARY KEY (session_pk, update_id),
    CONSTRAINT fk_trained_sessions_session_pk_sessions FOREIGN KEY(session_pk) REFERENCES sessions (session_pk));
CREATE TABLE turns (session_pk {key} NOT NULL, turn_id TEXT NOT NULL, parent_turn_id TEXT, chain_id TEXT NOT NULL,
    seq INTEGER NOT NULL, step INTEGER NOT NULL, dialect TEXT NOT NULL, model TEXT NOT NULL,
    policy_id INTEGER NOT NULL, messages TEXT NOT NULL, tools TEXT, sampling TEXT NOT NULL, response TEXT NOT NULL,
    prompt_delta {blob} NOT NULL, prompt_length INTEGER NOT NULL, token_ids {blob} NOT NULL, logprobs {blob} NOT NULL,
    finish_reason TEXT, outcome TEXT NOT NULL, reason TEXT, role TEXT, role_reason TEXT,
    policy_version_first INTEGER NOT NULL, policy_version_last INTEGER NOT NULL, history_digest {blob} NOT NULL,
    messages_digest {blob} NOT NULL, dialogue_digest {blob} NOT NULL, request_key TEXT, request_digest {blob},
    inferred_by TEXT, created_at BIGINT NOT NULL, ttft_seconds FLOAT, duration_seconds FLOAT NOT NULL,
    parts {blob} NOT NULL, digest {blob}, CONSTRAINT pk_turns PRIMARY KEY (turn_id),
    CONSTRAINT uq_turns_session_pk_seq UNIQUE (session_pk, seq),
    CONSTRAINT fk_turns_session_pk_sessions FOREIGN KEY(session_pk) REFERENCES sessions (session_pk));
CREATE TABLE version_sessions (session_pk {key} NOT NULL, version INTEGER NOT NULL, is_copied INTEGER NOT NULL,
    CONSTRAINT pk_version_sessions PRIMARY KEY (session_pk, version, is_copied),
    CONSTRAINT fk_version_sessions_session_pk_sessions FOREIGN KEY(session_pk) REFERENCES sessions (session_pk));
"""
INDEXES = """
CREATE INDEX ix_sessions_group ON sessions (tenant, group_id);
CREATE INDEX ix_sessions_group_pk ON sessions (group_pk);
CREATE INDEX ix_sessions_task ON sessions (tenant, task_id);
CREATE INDEX ix_sessions_status ON sessions (status, last_active_at);
CREATE INDEX ix_sessions_live ON sessions (status, last_active_at) WHERE group_id IS NULL AND ended_at IS NOT NULL;
CREATE INDEX ix_sessions_rewarded ON sessions (last_active_at) WHERE status = 'open' AND num_rewards > 0;
CREATE INDEX ix_sessions_tenant ON sessions (tenant, session_pk);
CREATE INDEX ix_sessions_tenant_status ON sessions (tenant, status, session_pk);
CREATE INDEX ix_sessions_created ON sessions (created_at);
CREATE INDEX ix_sessions_split ON sessions (split, session_pk);
CREATE INDEX ix_sessions_user ON sessions (tenant, user_id) WHERE user_id IS NOT NULL;
CREATE INDEX ix_sessions_key ON sessions (tenant, key_id) WHERE key_id IS NOT NULL;
CREATE INDEX ix_sessions_denied ON sessions (tenant, session_pk) WHERE train = 0;
CREATE UNIQUE INDEX ix_turns_request ON turns (session_pk, request_key) WHERE request_key IS NOT NULL;
CREATE INDEX ix_turns_inferred ON turns (inferred_by, history_digest) WHERE inferred_by IS NOT NULL;
CREATE INDEX ix_turns_inferred_dialogue ON turns (inferred_by, dialogue_digest) WHERE inferred_by IS NOT NULL;
CREATE INDEX ix_turns_failed ON turns (created_at) WHERE outcome = 'error';
CREATE INDEX ix_turns_policy ON turns (session_pk, policy_id);
CREATE INDEX ix_rewards_session ON rewards (session_pk);
CREATE INDEX ix_idempotency_created_at ON idempotency (created_at);
CREATE UNIQUE INDEX ix_groups_name ON groups (tenant, group_id) WHERE part_of IS NULL;
CREATE UNIQUE INDEX ix_groups_part ON groups (part_of, policy_id) WHERE part_of IS NOT NULL;
CREATE INDEX ix_groups_status ON groups (status, policy_id, ready_at);
CREATE INDEX ix_groups_update ON groups (update_id);
CREATE INDEX ix_groups_tenant ON groups (tenant, status);
CREATE INDEX ix_groups_activity ON groups (status, last_active_at);
CREATE INDEX ix_groups_finished ON groups (status, num_finished);
CREATE INDEX ix_groups_imported ON groups (imported, group_pk) WHERE imported IS NOT NULL;
CREATE INDEX ix_trained_sessions_update ON trained_sessions (update_id);
CREATE INDEX ix_policy_versions_status ON policy_versions (status, policy_id);
CREATE INDEX ix_policy_versions_policy ON policy_versions (policy_id, version);
CREATE INDEX ix_session_copies_source ON session_copies (tenant, source_id);
CREATE INDEX ix_session_labels_label ON session_labels (label, tenant, session_pk);
CREATE INDEX ix_examples_session ON examples (session_pk);
CREATE INDEX ix_examples_policy ON examples (policy_id);
CREATE INDEX ix_version_sessions_version ON version_sessions (version);
CREATE INDEX ix_session_media_digest ON session_media (tenant, digest);
CREATE INDEX ix_costs_key ON costs (tenant, key_id, policy_id, currency, amount);
CREATE INDEX ix_turns_summaries ON turns (session_pk, seq) WHERE role = 'summary';
CREATE UNIQUE INDEX ix_rating_draws_session ON rating_draws (session_pk);
CREATE INDEX ix_rating_draws_policy ON rating_draws (policy_id, tenant, draw_id);
CREATE INDEX ix_predicted_rewards_policy ON predicted_rewards (policy_id, policy_version);
"""
"""In the order of their creation: of two that serve a query equally well, SQLite takes the last one."""


def upgrade() -> None:
    """Create all tables, and the default policy."""
    types = TYPES[op.get_bind().dialect.name]
    for statement in (TABLES.format(**types) + INDEXES).split(";")[:-1]:
        op.execute(" ".join(statement.split()))
    policies = sa.table("policies", *map(sa.column, ("policy_id", "tenant", "name", "created_at")))
    default = {"policy_id": 0, "tenant": "", "name": "default", "created_at": time.time_ns() // 1000}
    op.bulk_insert(policies, [default])


def downgrade() -> None:
    """Drop all tables."""
    for name in reversed(re.findall(r"CREATE TABLE (\w+)", TABLES)):
        op.drop_table(name)
