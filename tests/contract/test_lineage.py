"""What shaped a version: over HTTP, against a model of who trained, copied, corrected, imported and deleted what."""

import dataclasses
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.commands import invoke
from support.in_process import in_process_proxy

from turnwise.features.lineage import versions as lineage
from turnwise.store import claims, keys, policies, sessions, versions
from turnwise.types import IMPORT, PolicyKind, PolicyStatus, PolicyVersion, Session, UpdateRecord, utc_now

TENANTS = ("one", "two")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Where is Kim?"}]}
NUM_STEPS = 70


@dataclasses.dataclass
class Known:
    """A session as the model knows it."""

    tenant: str
    user_id: str | None = None
    turn_id: str | None = None
    sources: frozenset[str] = frozenset()
    imported: dict[str, Any] | None = None
    is_alive: bool = True


@dataclasses.dataclass
class Made:
    """A version as the model knows it; `trained` also has the sessions that are deleted by now."""

    policy: str
    parent: int | None
    trained: frozenset[str] = frozenset()
    is_noted: bool = True


class History:
    """Does at random what users, people and trainers do, and notes it."""

    def __init__(self, http: Any, database: Any, directory: Path, seed: int) -> None:
        self.http, self.database, self.directory, self.random = http, database, directory, random.Random(seed)
        self.sessions: dict[str, Known] = {}
        self.versions: dict[int, Made] = {0: Made("default", None)}
        self.owner = {"default": ""}
        self.unacknowledged: list[claims.Finished] = []
        self.deletions: list[dict[str, Any]] = []
        with database.write() as conn:
            versions.adopt_base(conn, PolicyVersion(version=0, path="/no/model"))
            self.keys = {each: keys.create_key(conn, each, keys.KeyRole.ADMIN, "")[1] for each in TENANTS}
        for tenant in TENANTS:
            self.create_policy(tenant, "default@0")

    def ask(self, tenant: str, method: str, path: str, **options: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        done = self.http.request(method, path, headers=headers, **options)
        assert done.is_success, (method, path, done.text)
        return done.json()

    def some(self, **wanted: Any) -> str | None:
        found = [
            name
            for name, known in self.sessions.items()
            if known.is_alive and all(getattr(known, field) == value for field, value in wanted.items())
        ]
        return self.random.choice(found) if found else None

    def play(self) -> None:
        tenant, user_id = self.random.choice(TENANTS), self.random.choice(["kim", "lea", None])
        name = f"s{len(self.sessions)}"
        self.ask(tenant, "POST", "/v1/sessions", json={"session_id": name, "user_id": user_id})
        reply = self.ask(tenant, "POST", f"/sessions/{name}/v1/chat/completions", json=CHAT)
        self.sessions[name] = Known(tenant, user_id, reply["id"])

    def fork(self) -> None:
        source = self.some(imported=None)
        if source is None:
            return
        known, name = self.sessions[source], f"s{len(self.sessions)}"
        fork = {"session_id": name, "at": "after"}
        self.ask(known.tenant, "POST", f"/v1/turns/{known.turn_id}/fork", json=fork)
        (copy,) = self.ask(known.tenant, "GET", f"/v1/sessions/{name}/turns")["data"][-1:]
        self.sessions[name] = Known(known.tenant, known.user_id, copy["turn_id"], frozenset({source}))

    def correct(self) -> None:
        source = self.some(imported=None, sources=frozenset())
        if source is None:
            return
        known = self.sessions[source]
        given = {
            "kind": "demonstration",
            "value": "In Oslo.",
            "turn_id": known.turn_id,
            "name": f"n{len(self.sessions)}",
        }
        said = self.ask(known.tenant, "POST", "/v1/feedback", json=given)
        made = {"session_id": source, "turn_id": known.turn_id}
        group = {"group_id": said["group_id"]}
        for copy in self.ask(known.tenant, "GET", "/v1/sessions", params=group)["data"]:
            copied = Known(known.tenant, known.user_id, None, frozenset({source}), imported=made)
            self.sessions[copy["session_id"]] = copied

    def bring(self) -> None:
        tenant, name = self.random.choice(TENANTS), f"s{len(self.sessions)}"
        imported = {"format": "messages", "file": f"{tenant}.jsonl", "line": len(self.sessions)}
        session = Session(session_id=name, tenant=tenant, metadata={"imported": imported}, opened_by=IMPORT)
        with self.database.write() as conn:
            sessions.create_session(conn, session)
        self.sessions[name] = Known(tenant, imported=imported)

    def create_policy(self, tenant: str, base: str) -> None:
        name = f"p{len(self.owner)}"
        self.ask(tenant, "POST", "/v1/policies", json={"name": name, "base": base})
        self.owner[name] = tenant

    def branch(self) -> None:
        """Create a policy from any version that its tenant may start from."""
        tenant = self.random.choice(TENANTS)
        able = [
            (made.policy, number) for number, made in self.versions.items() if self.owner[made.policy] in ("", tenant)
        ]
        policy, number = self.random.choice(able)
        self.create_policy(tenant, f"{policy}@{number}")
        name = [*self.owner][-1]
        self.train(name, number)

    def train(self, policy: str | None = None, parent: int | None = None) -> None:
        """Train a version from any earlier one of its policy, as after a rewind; acknowledge it now or later."""
        policy = policy or self.random.choice([*self.owner])
        owner, number = self.owner[policy], max(self.versions) + 1
        earlier = [each for each, made in self.versions.items() if made.policy == policy]
        parent = parent if parent is not None else self.random.choice(earlier or [0])
        able = [name for name, known in self.sessions.items() if known.is_alive and owner in ("", known.tenant)]
        trained = frozenset(self.random.sample(able, min(len(able), self.random.randint(0, 3))))
        path = self.directory / f"v{number}"
        with self.database.write() as conn:
            stored = policies.find_policy(conn, owner or "default", policy)
            version = PolicyVersion(
                version=number, policy_id=stored.policy_id, path=str(path), kind=PolicyKind.LORA, update_id=number
            )
            advantages = {(self.sessions[each].tenant, each): {} for each in trained}
            for written in (version, dataclasses.replace(version, weights_digest="d")):
                lineage.note_version(conn, written, parent, advantages, {"weights": {}})
                versions.publish_version(conn, written)
            # It was served, and no engine loads it now: there are no files.
            versions.change_version(conn, number, status=PolicyStatus.FAILED, activated_at=utc_now())
        record = UpdateRecord(
            update_id=number,
            policy_id=stored.policy_id,
            trainer_id="t",
            policy_version=number,
            num_groups=0,
            num_sessions=len(trained),
            num_tokens=0,
        )
        self.unacknowledged.append(claims.Finished(claims.Claim(groups=()), record, version, trained=advantages))
        self.versions[number] = Made(policy, parent, trained)

    def acknowledge(self) -> None:
        with self.database.write() as conn:
            for finished in self.unacknowledged:
                claims.ack(conn, finished)
        self.unacknowledged.clear()

    def publish(self) -> None:
        number, path = max(self.versions) + 1, self.directory / "by-hand"
        with self.database.write() as conn:
            versions.publish_version(conn, PolicyVersion(version=number, path=f"{path}{number}", kind=PolicyKind.LORA))
        self.versions[number] = Made("default", None, is_noted=False)

    def train_elsewhere(self) -> None:
        """Record what another project's trainer did, which publishes its version first and says no parent."""
        before = max(each for each, made in self.versions.items() if made.policy == "default")
        self.publish()
        number = max(self.versions)
        able = [name for name, known in self.sessions.items() if known.is_alive]
        trained = frozenset(self.random.sample(able, min(len(able), 2)))
        counts = {"num_groups": 0, "num_sessions": len(trained), "num_tokens": 0}
        record = UpdateRecord(update_id=number, trainer_id="theirs", policy_version=number, **counts)
        advantages: dict[tuple[str, str], dict[str, float]] = {
            (self.sessions[each].tenant, each): {} for each in trained
        }
        with self.database.write() as conn:
            claims.ack(conn, claims.Finished(claims.Claim(groups=()), record, trained=advantages))
            versions.change_version(conn, number, status=PolicyStatus.FAILED, activated_at=utc_now())
        self.versions[number] = Made("default", before, trained, is_noted=False)

    def delete(self) -> None:
        name = self.some()
        if name is None:
            return
        gone = self._with_copies({name}, with_forks=False)
        said = self.ask(self.sessions[name].tenant, "DELETE", f"/v1/sessions/{name}")
        self._deleted(gone, said, self.sessions[name].tenant)

    def forget(self) -> None:
        name = self.some(user_id=self.random.choice(["kim", "lea"]))
        if name is None:
            return
        tenant, user_id = self.sessions[name].tenant, self.sessions[name].user_id
        wanted = tenant, user_id, True
        own = {each for each, it in self.sessions.items() if (it.tenant, it.user_id, it.is_alive) == wanted}
        gone = self._with_copies(own, with_forks=True)
        options = ("--tenant", tenant, "--user-id", str(user_id), "--yes", "--json")
        done = invoke("forget", *options, "--database", f"sqlite:///{self.directory}/turnwise.db")
        assert done.exit_code == 0, done.output
        self._deleted(gone, json.loads(done.stdout), None)

    def _with_copies(self, names: set[str], *, with_forks: bool) -> set[str]:
        """Return sessions with what demonstrations made of them, and their forks where those go too."""
        found = set(names)
        for name, known in self.sessions.items():  # a copy is made after what it copies
            copied = known.sources & (self._behind(found) if with_forks else found)
            if known.is_alive and copied and (with_forks or known.imported is not None):
                found.add(name)
        return found

    def _behind(self, names: set[str]) -> set[str]:
        """Return sessions and the deleted ones that hold copies of theirs, through which copies are still linked."""
        found = set(names)
        for name, known in self.sessions.items():
            if not known.is_alive and known.sources & found:
                found.add(name)
        return found

    def _deleted(self, gone: set[str], said: dict[str, Any], tenant: str | None) -> None:
        assert said["num_sessions"] == len(gone)
        shaped = {number for number in self.versions if self.shaping(number) & gone}
        sees_all = tenant in (None, "one")  # the database's owner, and the tenant that owns the model
        seen = {name for name, owner in self.owner.items() if sees_all or owner in ("", tenant)}
        expected = sorted(number for number in shaped if self.versions[number].policy in seen)
        assert said["served_versions"] == expected
        for name in gone:
            self.sessions[name].is_alive = False

    def chain(self, number: int) -> list[int]:
        parent = self.versions[number].parent
        return [number] if parent is None else [number, *self.chain(parent)]

    def shaping(self, number: int) -> set[str]:
        found = {name for each in self.chain(number) for name in self.versions[each].trained}
        while more := {source for name in found for source in self.sessions[name].sources} - found:
            found |= more
        return found

    def check(self) -> None:
        for number, made in self.versions.items():
            for tenant in TENANTS if number else ():
                if self.owner[made.policy] in ("", tenant):
                    self._check(number, made, tenant)

    def _check(self, number: int, made: Made, tenant: str) -> None:
        found, after = [], None
        while True:
            query = {"version": number, "limit": 3} | ({} if after is None else {"after": after})
            said = self.ask(tenant, "GET", f"/v1/policies/{made.policy}/lineage", params=query)
            found += said["data"]
            if not said["has_more"]:
                break
            after = found[-1]["session_id"]
        shaping = {name: self.sessions[name] for name in self.shaping(number)}
        own = {name for name, known in shaping.items() if (known.tenant, known.is_alive) == (tenant, True)}
        assert {each["session_id"] for each in found} == own
        assert (len(found), said["num_sessions"]) == (len(own), len(own))
        chain = self.chain(number)
        in_chain = {name: [each for each in sorted(chain) if name in self.versions[each].trained] for name in own}
        for each in found:
            known, trained = self.sessions[each["session_id"]], in_chain[each["session_id"]]
            assert each["versions"] == trained
            assert each["how"] == ("trained" if trained else "copied")
            assert (each["user_id"], each["imported"], each["tenant"]) == (known.user_id, known.imported, tenant)
        noted = {each for each in chain if self.versions[each].is_noted}
        total = sum(len(self.versions[each].trained) for each in noted)
        assert said["num_unnamed"] == total - sum(len(noted.intersection(each)) for each in in_chain.values())
        assert said["is_complete"] == (noted == {0, *chain})
        users = Counter(shaping[name].user_id for name in own if shaping[name].user_id)
        files = Counter(
            (shaping[name].imported or {}).get("file", "feedback") for name in own if shaping[name].imported
        )
        for named, expected in (("users", users), ("imports", files)):
            assert {each["name"]: each["num_sessions"] for each in said[named]} == expected
        assert said["is_signed"] == (True if tenant == "one" and made.is_noted else None)
        assert (said["manifest"] is None) == (said["is_signed"] is None)


@pytest.mark.parametrize("seed", range(3))
def test_a_lineage_names_exactly_what_shaped_a_version_through_any_history(tmp_path, seed):
    with in_process_proxy(tmp_path, policy_tenant="one") as (http, database):
        history = History(http, database, tmp_path, seed)
        steps = {
            history.play: 10,
            history.fork: 8,
            history.correct: 4,
            history.bring: 3,
            history.train: 14,
            history.branch: 2,
            history.acknowledge: 5,
            history.publish: 1,
            history.train_elsewhere: 2,
            history.delete: 5,
            history.forget: 2,
        }
        for step in history.random.choices([*steps], [*steps.values()], k=NUM_STEPS):
            step()
        history.check()
        history.acknowledge()
        history.check()
        assert sum(not known.is_alive for known in history.sessions.values()) > 1
