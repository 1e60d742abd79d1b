"""Quotas of a tenant's named policies: tokens trained in a day, and bytes on disk; training waits if one is used up."""

from __future__ import annotations

from pydantic import Field

from trainer.claims.holds import Hold
from trainer.claims.ledger import RunProgress
from turnwise.settings import Settings
from turnwise.store import database, policies, rows, versions
from turnwise.store.database import Connection
from turnwise.store.serving import ServingState
from turnwise.version_directory import num_bytes_on_disk


class QuotaSettings(Settings):
    """What the named policies of one tenant may use."""

    tenant_trained_tokens_per_day: int | None = Field(default=None, ge=1)
    """Tokens that the named policies of one tenant may train in a UTC day. Then their training waits for the next."""
    tenant_policy_bytes: int | None = Field(default=None, ge=1)
    """Bytes that the versions and states of the named policies of one tenant may take on disk. Above it their training
    waits."""


class Quotas(Hold[QuotaSettings]):
    """Waits where a quota of the policy's tenant is used up."""

    needs_batch = True

    @classmethod
    def is_on(cls, settings: QuotaSettings) -> bool:
        return (settings.tenant_trained_tokens_per_day or settings.tenant_policy_bytes) is not None

    def why_held(self, conn: Connection, state: ServingState, at: RunProgress) -> str | None:  # noqa: ARG002
        if self._ledger.policy is None:
            return None
        tenant = self._ledger.policy.tenant
        whose, settings = f"the policies of tenant {tenant!r}", self._settings
        most_tokens, most_bytes = settings.tenant_trained_tokens_per_day, settings.tenant_policy_bytes
        if most_tokens is not None:
            now = rows.from_micros(database.clock(conn))
            today = now.replace(hour=0, minute=0, second=0, microsecond=0)
            num_tokens = policies.trained_tokens_since(conn, tenant, today)
            if num_tokens >= most_tokens:
                return (
                    f"{whose} have trained {num_tokens} tokens today, of {most_tokens} a day "
                    "(tenant_trained_tokens_per_day): training waits until 00:00 UTC"
                )
        if most_bytes is not None:
            own = [one.policy_id for one in policies.list_policies(conn) if one.tenant == tenant]
            num_bytes = num_bytes_on_disk(each for number in own for each in versions.measured_versions(conn, number))
            if num_bytes is not None and num_bytes >= most_bytes:
                return (
                    f"{whose} take {num_bytes} bytes on disk, of {most_bytes} (tenant_policy_bytes): training "
                    "waits until the quota is raised, or directories of versions that are not needed are deleted"
                )
        return None
