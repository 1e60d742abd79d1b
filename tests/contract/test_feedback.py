"""Feedback of people: thumbs, ratings and comments, and better replies that SFT and DPO can train."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import sqlalchemy as sa
from support.proxies import RunningProxy
from support.waiting import wait_until
from turnwise_fake_engine import Reply, Rule

from trainer.algorithms.correction import hinted_prompt
from trainer.algorithms.dpo import DPO
from trainer.algorithms.sft import SFT
from trainer.batch.chain import chain_of
from trainer.batch.selection import SelectionRule, offer
from turnwise.client import Client
from turnwise.errors import InvalidRequest, NotFound
from turnwise.features import retention
from turnwise.features.feedback import HINTS
from turnwise.features.imported import imported_groups
from turnwise.store import claims, experiences, schema
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.types import utc_now

ASKED = [{"role": "user", "content": "Where is Kim?"}]


def call(base_url: str, messages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": messages or ASKED, "return_token_ids": True, **fields}
    return httpx2.post(f"{base_url}/chat/completions", json=body).raise_for_status().json()


def status_of_group(proxy: RunningProxy) -> tuple[str, int]:
    """Return the status of the only group that is no part of another one, and how many of its sessions are finished."""
    with closing(Database(proxy.database_url)) as database, database.read() as conn:
        found = sa.select(schema.groups.c.status, schema.groups.c.num_finished).where(schema.groups.c.group_id == "g")
        status, num_finished = conn.execute(found).one()
        return status, num_finished


WITH_IMPORTED = experiences.Shape(merge="chain", with_imported=True)


def feedback_groups(database: Database) -> list[list[Any]]:
    with database.read() as conn:
        pks = imported_groups(conn)
        found = [experiences.experiences_of_groups(conn, [pk], WITH_IMPORTED) for pk in pks]
        return [list(map(chain_of, each)) for each in found]


def test_thumbs_and_ratings_become_rewards_by_the_table_and_the_last_one_counts(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--feedback-rewards", '{"up": 2, "down": -1}')
    with Client(proxy.url) as client:
        session = client.create_session(session_id="s", credit="step_wise")
        turn_id = call(session.base_url)["id"]
        said = client.feedback("boolean", True, turn_id=turn_id, source="a page")
        assert (said["session_id"], said["turn_id"], said["value"], said["source"]) == ("s", turn_id, True, "a page")
        assert client.session("s")["reward"] == 2.0
        client.feedback("boolean", False, turn_id=turn_id)
        assert client.session("s")["reward"] == -1.0
        # -1 + (2 - -1) * (4 - 1) / (5 - 1) = 1.25, under a name of its own beside the thumb
        client.feedback("float", 4, turn_id=turn_id, name="stars", scale=(1, 5))
        assert client.session("s")["reward"] == 0.25
        client.feedback("float", 0.5, session_id="s", name="plain")
        client.feedback("comment", "The order number was 17.", turn_id=turn_id)
        assert client.session("s")["reward"] == 0.75
        in_force = [(each["kind"], each["name"], each["value"], each["scale"]) for each in client.feedback_of("s")]
        assert in_force == [
            ("boolean", "feedback", False, None),
            ("float", "stars", 4, [1, 5]),
            ("float", "plain", 0.5, None),
            ("comment", "feedback", "The order number was 17.", None),
        ]


@pytest.mark.parametrize("way", ["delete", "null"])
def test_a_thumb_that_is_taken_back_leaves_its_session_as_if_it_had_never_been(way, proxy):
    """Its group waits again, and is complete once with the next thumb. Other names and kinds stay."""

    def withdraw(kind: str, turn_id: str, name: str = "feedback") -> None:
        if way == "delete":
            client.withdraw_feedback(kind, turn_id=turn_id, name=name)
            return
        body = {"turn_id": turn_id, "kind": kind, "name": name, "value": None}
        assert httpx2.post(f"{proxy.v1}/feedback", json=body).raise_for_status().json()["value"] is None

    with Client(proxy.url) as client:
        turn_ids = []
        for name in ("a", "b"):
            session = client.create_session(session_id=name, group_id="g", group_size=2)
            turn_ids.append(call(session.base_url)["id"])
            client.feedback("boolean", True, turn_id=turn_ids[-1])
            client.end_session(name)
        first, second = turn_ids
        for _ in range(2):
            client.feedback("boolean", False, turn_id=first)
            client.feedback("float", 3.0, turn_id=first, name="stars")
            assert status_of_group(proxy) == ("ready", 2)
            withdraw("float", first, "stars")
            assert (client.session("a")["reward"], status_of_group(proxy)) == (0.0, ("ready", 2))
            withdraw("boolean", first)
            assert (client.session("a")["reward"], status_of_group(proxy)) == (None, ("open", 1))
            withdraw("boolean", first)  # once more is no error
            assert client.feedback_of("a") == []
            client.feedback("boolean", True, turn_id=first)
            assert (client.session("a")["reward"], status_of_group(proxy)) == (1.0, ("ready", 2))
        client.feedback("demonstration", "In Oslo.", turn_id=second)
        assert client.feedback_of("b")[-1]["group_id"] is not None
        withdraw("demonstration", second)
        assert [each["kind"] for each in client.feedback_of("b")] == ["boolean"]
        with closing(Database(proxy.database_url)) as database:
            assert not feedback_groups(database)
        with pytest.raises(InvalidRequest, match="is true or false"):  # a value that was forgotten withdraws nothing
            client.feedback("boolean", turn_id=second)


def test_feedback_is_checked_and_written_once_under_retries(proxy):
    with Client(proxy.url) as client:
        turn_id = call(client.create_session(session_id="s").base_url)["id"]
        with pytest.raises(NotFound, match="there is no turn 'none'"):
            client.feedback("boolean", True, turn_id="none")
        with pytest.raises(NotFound, match=f"there is no turn {turn_id!r} in session 'other'"):
            client.feedback("boolean", True, turn_id=turn_id, session_id="other")
        with pytest.raises(NotFound, match="there is no session 'none'"):
            client.feedback("comment", "good", session_id="none")
        with pytest.raises(InvalidRequest, match="`value` of kind `boolean` is true or false, not 'float'"):
            client.feedback("boolean", 1.0, turn_id=turn_id)
        with pytest.raises(InvalidRequest, match=r"`value` 6.0 does not lie on the scale \[1.0, 5.0\]"):
            client.feedback("float", 6.0, turn_id=turn_id, scale=(1, 5))
        with pytest.raises(InvalidRequest, match="at most 10000 characters"):
            client.feedback("comment", "a" * 10_001, turn_id=turn_id)
        key = {"Idempotency-Key": "once"}
        up, down = ({"turn_id": turn_id, "kind": "boolean", "value": value} for value in (True, False))
        for body in (up, down, up):
            named = key if body is up else {}
            httpx2.post(f"{proxy.v1}/feedback", json=body, headers=named).raise_for_status()
        assert client.session("s")["reward"] == 0.0, "the repeated request is the first one, not a revision"
        answer = httpx2.post(f"{proxy.v1}/feedback", json=down, headers=key)
        assert answer.status_code == 409


def test_an_edited_reply_becomes_a_pair_that_sft_and_dpo_train_and_a_later_edit_replaces_it(proxy):
    """The pair shares the prompt's tokens, also in a conversation; the edited reply has no behaviour logprobs."""
    database = Database(proxy.database_url)
    with Client(proxy.url) as client:
        session = client.create_session(session_id="s", user_id="kim")
        first = call(session.base_url)
        reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        second = call(session.base_url, [*ASKED, reply, {"role": "user", "content": "Where exactly?"}])
        for text in ("In Rome.", "In Oslo.", "In Oslo."):
            said = client.feedback("demonstration", text, turn_id=second["id"])
        assert said["group_id"].startswith("feedback-")
        assert said["training_note"].startswith(
            "`sft`, `dpo` and `chord` train it as a group of its own, and `correction`"
        )
        thumb = client.feedback("boolean", True, turn_id=first["id"])
        comment = client.feedback("comment", "Rome it is.", turn_id=first["id"])
        assert (thumb["training_note"], comment["training_note"]) == (
            None,
            "The algorithm `correction` trains it; others do not.",
        )
        client.withdraw_feedback("boolean", turn_id=first["id"])
        (pair,) = feedback_groups(database)
        sampled = pair[0] if pair[0].reward == 0.0 else pair[1]
        written = pair[1] if sampled is pair[0] else pair[0]
        assert (written.reward, sampled.reward) == (1.0, 0.0)
        assert list(sampled.tokens) == second["prompt_token_ids"] + second["choices"][0]["token_ids"]
        prompt = len(second["prompt_token_ids"])
        assert list(written.tokens[:prompt]) == second["prompt_token_ids"]
        assert written.prompt_length == prompt < len(written.tokens)
        assert not np.any(written.logprobs)
        (turn,) = [each for each in client.turns(written.session_id) if each["reason"] == "imported"]
        assert turn["response"] == {"role": "assistant", "content": "In Oslo."}
        offered = offer(pair, [written.group_key], SelectionRule(), (), lambda *_: None)
        assert [each.session_id for each in SFT(SFT.Settings()).choose(offered).experiences] == [written.session_id]
        chosen = DPO(DPO.Settings()).choose(offered)
        is_better = [pair.is_better for pair in chosen.pairs or ()]
        assert dict(zip([each.session_id for each in chosen.experiences], is_better, strict=True)) == {
            written.session_id: True,
            sampled.session_id: False,
        }
        assert claims.claim(database, "t", max_groups=9, lease_seconds=60) is None, "nothing for reinforcement learning"
        assert client.session("s")["reward"] is None
        httpx2.delete(f"{proxy.v1}/sessions/s").raise_for_status()
        assert feedback_groups(database) == []
        assert list(client.sessions(user_id="kim")) == []
    database.close()


def test_a_comment_or_an_edited_reply_is_put_into_the_prompt_of_its_turn(fake_engine, start_proxy):
    """A teacher is to reply to the prompt that a user who says it at once would have sent."""
    proxy = start_proxy(fake_engine.url, "--feedback-rewards", '{"up": 1, "down": 0, "correction": 0}')
    database = Database(proxy.database_url)
    with Client(proxy.url) as client:
        hints = {"comment": "Kim is in Rome.", "demonstration": "This would be a better reply:\n\nIn Rome."}
        for kind, value in (("comment", "Kim is in Rome."), ("demonstration", "In Rome.")):
            session = client.create_session(session_id=kind)
            first = call(session.base_url)
            reply = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
            more = {"role": "user", "content": "Where exactly?"}
            second = call(session.base_url, [*ASKED, reply, more])
            asked = [*ASKED, reply, {**more, "content": f"Where exactly?\n\n{hints[kind]}"}]
            whole = call(client.create_session(session_id=f"{kind}-asked", split="eval").base_url, asked)
            client.feedback(kind, value, turn_id=second["id"])
            client.feedback("boolean", True, turn_id=second["id"])
            session.end()
            assert client.session(kind)["reward"] == 1.0, "a correction does not replace the thumb"
            claim = claims.claim(database, "t", max_groups=9, lease_seconds=60)
            with database.read() as conn:
                (found,) = experiences.experiences_of_groups(conn, claim.group_pks)
            assert hinted_prompt(chain_of(found)).tolist() == whole["prompt_token_ids"]
        client.create_session(session_id="whole")
        turn_id = call(f"{proxy.url}/sessions/whole/v1")["id"]
        client.feedback("comment", "Kim is in Rome.", session_id="whole")
        client.end_session("whole")
        with database.read() as conn:
            (found,) = experiences.experiences_of_groups(
                conn, claims.claim(database, "t", max_groups=9, lease_seconds=60).group_pks
            )
        assert (found.reward, list(found.parts[HINTS])) == (0.0, [turn_id])
    database.close()


def test_edits_in_quick_succession_replace_each_other_and_leave_one_group(proxy):
    """Also back to an earlier text, whose first sessions are deleted and not swept yet, and several at once."""
    database = Database(proxy.database_url)
    with Client(proxy.url) as client:
        turn_id = call(client.create_session(session_id="s").base_url)["id"]
        for text in ("In Rome.", "In Oslo.", "In Rome."):
            said = client.feedback("demonstration", text, turn_id=turn_id)
            (pair,) = feedback_groups(database)
            assert {each.group_id for each in pair} == {said["group_id"]}
        body = {"turn_id": turn_id, "kind": "demonstration"}
        with ThreadPoolExecutor(8) as threads:
            texts = [f"In Rome, {number}." for number in range(8)]
            answers = threads.map(lambda text: httpx2.post(f"{proxy.v1}/feedback", json={**body, "value": text}), texts)
            assert [answer.status_code for answer in answers] == [200] * 8
        assert len(list(client.sessions())) == 3, "the session, and the pair of the last edit"
        key = {"Idempotency-Key": "once"}
        for text, status in (("In Rome.", 200), ("In Oslo.", 409)):
            answer = httpx2.post(f"{proxy.v1}/feedback", json={**body, "value": text}, headers=key)
            assert answer.status_code == status
        (pair,) = feedback_groups(database)
        assert len(list(client.sessions())) == 3, "nothing is left of the request that was refused"
        httpx2.delete(f"{proxy.v1}/sessions/s").raise_for_status()
        assert list(client.sessions()) == []
    database.close()


def test_edits_count_against_the_token_budget_of_the_key(fake_engine, start_proxy):
    """An edit stores the prompt twice, with the sampled reply and with the written one."""
    proxy = start_proxy(fake_engine.url, "--key-token-budget", "100000")

    def used() -> int:
        return httpx2.get(f"{proxy.v1}/budget").raise_for_status().json()["key"]["tokens_used"]

    with Client(proxy.url) as client:
        reply = call(client.create_session(session_id="s").base_url)
        before = used()
        client.feedback("demonstration", "In Rome.", turn_id=reply["id"])
        added = used() - before
        assert added > 2 * len(reply["prompt_token_ids"]) + len(reply["choices"][0]["token_ids"])
        client.feedback("demonstration", "In Rome.", turn_id=reply["id"])
        assert used() == before + added, "the same edit again stores nothing"


@pytest.mark.parametrize("way", ["forget", "delete", "prune"])
def test_nothing_that_a_deleted_person_said_is_left_in_the_database_file(way, fake_engine, proxy):
    """The person's session was edited, preferred to, forked in the names of others, and named later."""
    database, (question, reply, edit) = Database(proxy.database_url), ("Zanzibar", "Quillabamba", "Ouagadougou")
    fake_engine.answer(Rule(reply=Reply(text=reply), count=1))
    asked = [{"role": "user", "content": "Where is it?"}]
    with Client(proxy.url) as client:
        kim = client.create_session(session_id="kim", user_id="unknown")
        first = call(kim.base_url, asked)
        fake_engine.answer(Rule(reply=Reply(text="Elsewhere.")))
        other = call(client.create_session(session_id="lee", user_id="lee").base_url, asked)
        client.feedback("demonstration", turn_id=other["id"], over=[first["id"]])
        told = [*asked, {"role": "assistant", "content": reply}, {"role": "user", "content": question}]
        second = call(kim.base_url, told)
        said = client.feedback("demonstration", edit, turn_id=second["id"])
        client.feedback("demonstration", f"Not {edit}", turn_id=f"{said['group_id']}-1-t0")
        client.create_session(session_id="kim", user_id="kim")
        if way == "forget":
            fork = client.fork(second["id"], user_id="lee")
            client.fork(next(iter(client.turns(fork.session_id)))["turn_id"], user_id="ada")
        kim.end()
    path = Path(proxy.database_url.removeprefix("sqlite:///"))

    def words_in_files() -> list[str]:
        stored = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
        return [word for word in (question, reply, edit) if word.encode() in stored]

    assert words_in_files() == [question, reply, edit]
    if way == "delete":
        httpx2.delete(f"{proxy.v1}/sessions/kim").raise_for_status()
    elif way == "forget":
        of_kim = SessionFilter(tenant="default", user_id="kim")
        retention.delete_all(database, lambda conn: retention.delete_sessions(conn, of_kim))
    else:
        retention.delete_all(database, lambda conn: retention.prune(conn, utc_now() + timedelta(hours=1)))

    def is_gone() -> bool:
        database.truncate_log()
        return not words_in_files()

    wait_until(is_gone, "the deletion of all rows")
    with Client(proxy.url) as client:
        assert "lee" in {each["session_id"] for each in client.sessions()}
    database.close()


def test_a_reply_that_was_chosen_among_several_is_preferred_to_the_others(proxy):
    database = Database(proxy.database_url)
    with Client(proxy.url) as client:
        session = client.create_session(session_id="s")
        first = call(session.base_url, n=2, temperature=1.0)["id"]
        other = call(client.create_session(session_id="o").base_url, [{"role": "user", "content": "Hello."}])["id"]
        with pytest.raises(InvalidRequest, match=f"turn {other!r} replies to another prompt"):
            client.feedback("demonstration", turn_id=first, over=[other])
        with pytest.raises(InvalidRequest, match="is the text of a better reply; left out"):
            client.feedback("demonstration", turn_id=first)
        with pytest.raises(InvalidRequest, match=f"turn '{first}' cannot be preferred to itself"):
            client.feedback("demonstration", turn_id=first, over=[first])
        with pytest.raises(InvalidRequest, match=r"scale.0.*greater than or equal to -1000000"):
            client.feedback("float", 0, turn_id=first, scale=(-1.7e308, 1.7e308))
        client.feedback("demonstration", turn_id=f"{first}#1", over=[first])
        (pair,) = feedback_groups(database)
        rewards = {each.turn_ids[0]: each.reward for each in pair}
        assert sorted(rewards.values()) == [0.0, 1.0]
    database.close()


def test_a_session_key_gives_feedback_only_on_its_own_session(proxy):
    with Client(proxy.url) as client:
        own = client.create_session(session_id="s", key_may="call_and_reward")
        foreign = call(client.create_session(session_id="o").base_url)["id"]
        turn_id = call(own.base_url)["id"]
    with Client(proxy.url, own.api_key) as person:
        person.feedback("boolean", True, turn_id=turn_id)
        for asked in (
            {"turn_id": foreign, "value": True},
            {"session_id": "o", "value": True},
            {"kind": "demonstration", "turn_id": turn_id, "over": [foreign]},
        ):
            answer = httpx2.post(
                f"{proxy.v1}/feedback",
                json={"kind": "boolean", **asked},
                headers={"authorization": f"Bearer {own.api_key}"},
            )
            assert answer.status_code == 403
