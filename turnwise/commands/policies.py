"""Commands about policies: `policies` and `updates`: their life from `create` to `archive`."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from turnwise.client import Client
from turnwise.commands.output import print_records, print_stored
from turnwise.commands.place import (
    DataPlace,
    database_option,
    database_url,
    json_option,
    opened,
    refuse_tenant,
    takes_place,
)
from turnwise.errors import NotFound, SettingsError
from turnwise.types import DEFAULT_POLICY_NAME, Json, PolicyKind, values_of
from turnwise.version_directory import on_disk

if TYPE_CHECKING:
    from turnwise.store.database import Database

_COLUMNS = (
    *("policy", "version", "status", "pinned", "on_disk", "earned", "num_sessions", "batch_reward", "lift"),
    *("reload_seconds", "created_at"),
    "error",
)
_POLICY_COLUMNS = (
    *("tenant", "name", "served_version", "num_versions", "num_sessions", "num_trained_sessions"),
    *("num_trained_tokens", "last_update_at", "num_bytes", "archived_at"),
)
_UPDATE_COLUMNS = (
    "update_id",
    "policy",
    "policy_version",
    "num_groups",
    "num_sessions",
    "num_tokens",
    "reward_mean",
    "seconds",
)
_SHOWN = ("reward_mean", "seconds")


@click.group("policies", invoke_without_command=True)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@takes_place
@json_option
@click.pass_context
def policies(context: click.Context, limit: int, place: DataPlace, *, as_json: bool) -> None:
    """List the versions of all policies, newest first; `activate` and `follow` choose the served one."""
    if context.invoked_subcommand is not None:
        return
    with place.client() as client:
        if client is not None:
            newest = itertools.islice(client.policies(earned=True), limit)
            found = [_with_lift(_with_rewards(each, each["earned"])) for each in newest]
            print_stored(found, "policy versions", client.base_url, as_json=as_json, columns=_COLUMNS)
            return
    from turnwise.features.earned import earned_by_version
    from turnwise.store import policies as stored_policies
    from turnwise.store import serving, versions

    with place.store() as store, store.read() as conn:
        named = {policy.policy_id: policy for policy in stored_policies.list_policies(conn)}
        of_version = earned_by_version(conn, None, named)
        pinned = {state.pinned_version for state in serving.serving_states(conn, named).values()}
        listed = [
            _with_lift(_with_rewards(values_of(policy), values_of(of_version.get(policy.version))))
            | {
                "policy": named[policy.policy_id].name,
                "tenant": named[policy.policy_id].tenant,
                "pinned": policy.version in pinned,
                "on_disk": on_disk(policy),
            }
            for policy in versions.list_versions(conn, limit=limit, policy_ids=named)[0]
        ]
    print_stored(listed, "policy versions", place.database_url, as_json=as_json, columns=("tenant", *_COLUMNS))


@policies.command("list")
@takes_place
@json_option
def list_named(place: DataPlace, *, as_json: bool) -> None:
    """List the policies, also those without a version: served version, sessions, what was trained, bytes on disk."""
    with place.client() as client:
        listed = _summaries(place) if client is None else client.policy_summaries()
    rows = [{**each, **each["summary"]} for each in listed]
    print_records(listed if as_json else rows, as_json=as_json, columns=_POLICY_COLUMNS)


def _summaries(place: DataPlace) -> list[Json]:
    from turnwise.features import policies as named_policies
    from turnwise.store import extensions
    from turnwise.store import policies as stored_policies

    with place.store() as store:
        with store.read() as conn:
            columns = extensions.read_columns(conn, "policy", None)
            named = stored_policies.list_policies(conn)
            held = named_policies.summarise_policies(conn)
            measured = {number: named_policies.measured_versions(conn, number) for number in held}
        sizes = named_policies.sizes_on_disk(measured)
    summaries = {
        number: columns.add(values_of(each) | {"num_bytes": sizes[number]}, number) for number, each in held.items()
    }
    return [values_of(each) | {"summary": summaries[each.policy_id]} for each in named]


@policies.command("estimate")
@click.argument("version", type=click.IntRange(min=0))
@takes_place
@json_option
def estimate(version: int, place: DataPlace, *, as_json: bool) -> None:
    """Show how a version was estimated to change the mean reward before engines got it, as a whole and by slice."""
    from turnwise.features import estimates

    with place.client() as client:
        if client is not None:
            found = next((each for each in client.policies() if each["version"] == version), None)
            if found is None:
                raise NotFound(f"there is no policy version {version}")
            metrics = found["metrics"]
        else:
            from turnwise.store import versions

            with place.store() as store, store.read() as conn:
                metrics = versions.get_version(conn, version).metrics
    estimated = metrics.get(estimates.ESTIMATE)
    if as_json:
        print_records(estimated, as_json=True)
        return
    if estimated is None:
        click.echo(f"Version {version} was not estimated: its trainer made none (estimate_sessions), or it has none.")
        return
    click.echo(f"Version {version}: {estimates.in_words(estimated)}.")
    for each in estimated["slices"]:
        click.echo(f"  {each['by']} {each['value']}: {estimates.in_words(each)}")


@policies.command("export")
@click.argument("policy", metavar="POLICY[@VERSION]")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--tenant", help="The policy's owner [default: default].")
@click.option("--merge", "is_merged", is_flag=True, help="Write a whole model: the adapter added to the base model.")
@database_option
def export(policy: str, directory: Path, tenant: str | None, database: str | None, *, is_merged: bool) -> None:
    """Copy the served or the named version of a policy to a new directory: an adapter that PEFT and vLLM load."""
    from turnwise.features import policies as named_policies

    with opened(database_url(database), creates=False) as store, store.read() as conn:
        version = named_policies.find_version(conn, tenant or "default", policy)
    if directory.exists() and any(directory.iterdir()):
        raise SettingsError(f"{str(directory)!r} is not empty: name a new directory")
    try:
        if is_merged:
            from trainer.publish.merge import merge_adapter

            merge_adapter(Path(version.path), directory)
        else:
            shutil.copytree(version.path, directory, dirs_exist_ok=True)
    except FileNotFoundError as error:
        raise SettingsError(f"version {version.version}'s files no longer exist: {version.path!r}") from error
    except BaseException:  # such as a full disk: the same command works once there is space
        shutil.rmtree(directory, ignore_errors=True)
        raise
    click.echo(f"Version {version.version} is in {directory}.")


@policies.command("create")
@click.argument("name")
@click.option("--tenant", help="Its owner [default: default; over HTTP the caller's].")
@click.option(
    "--base",
    default=DEFAULT_POLICY_NAME,
    show_default=True,
    help="What it starts from: a policy, or POLICY@VERSION; `default` is the engine's own model.",
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Start from this adapter instead: a directory that PEFT wrote.",
)
@takes_place
@json_option
def create(
    name: str,
    tenant: str | None,
    base: str,
    adapter: Path | None,
    place: DataPlace,
    *,
    as_json: bool,
) -> None:
    """Create a policy, an adapter of its own; `turnwise keys create --policy NAME` makes a key for it."""
    if adapter is not None and base != DEFAULT_POLICY_NAME:
        raise click.UsageError("give either --base or --adapter")
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            start = {"base": base} if adapter is None else {"path": str(adapter.resolve()), "base": base}
            is_new = all(each["name"] != name for each in client.policy_summaries())
            created = client.create_policy(name, **start)
        else:
            created, is_new = _create(place, tenant or "default", name, base, adapter)
    if as_json:
        print_records(created, as_json=True)
        return
    state = "is there" if is_new else "exists already; nothing has changed"
    option = f" --tenant {tenant}" if tenant else ""
    click.echo(
        f"Policy {name} of tenant {created['tenant']} {state}. Make a key: turnwise keys create --policy {name}{option}"
    )


def _create(place: DataPlace, tenant: str, name: str, base: str, adapter: Path | None) -> tuple[Json, bool]:

    from turnwise.features import policies as named_policies

    with place.store(creates=True) as store:
        if adapter is not None:
            _check_adapter(store, adapter)
        with store.write() as conn:
            directory = None if adapter is None else str(adapter.resolve())
            policy, is_new = named_policies.create_policy(conn, tenant, name, base, adapter=directory)
    return values_of(policy), is_new


def _check_adapter(store: Database, adapter: Path) -> None:
    """Check that a policy can start from an adapter, and that it fits the model of version 0, where that is known."""
    from proxy.reload.checkpoint import check_headers, check_trainable
    from turnwise.store import versions

    model = None
    with store.read() as conn, contextlib.suppress(NotFound):
        model = versions.get_version(conn, 0).path
    check_headers(str(adapter.resolve()), PolicyKind.LORA, model)
    check_trainable(str(adapter.resolve()))


@policies.command("archive")
@click.argument("name")
@click.option("--tenant", help="Its owner [default: default; over HTTP the caller's].")
@takes_place
def archive(name: str, tenant: str | None, place: DataPlace) -> None:
    """Take a policy out of use: its calls get 409, it is not trained, and engines unload its adapters."""
    _archive(name, tenant, place, is_archived=True)
    click.echo(f"Policy {name} is archived. Its versions stay: turnwise policies unarchive {name}")


@policies.command("unarchive")
@click.argument("name")
@click.option("--tenant", help="Its owner [default: default; over HTTP the caller's].")
@takes_place
def unarchive(name: str, tenant: str | None, place: DataPlace) -> None:
    """Take an archived policy into use again."""
    _archive(name, tenant, place, is_archived=False)
    click.echo(f"Policy {name} is in use again.")


def _archive(name: str, tenant: str | None, place: DataPlace, *, is_archived: bool) -> None:
    from turnwise.features import policies as named_policies

    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            client.archive_policy(name, archived=is_archived)
            return

    with place.store() as store, store.write() as conn:
        named_policies.archive_policy(conn, tenant or "default", name, is_archived=is_archived)


@policies.command("activate")
@click.argument("version", type=click.IntRange(min=0))
@takes_place
@json_option
def activate(version: int, place: DataPlace, *, as_json: bool) -> None:
    """Serve this version and stay on it (pin it) until `turnwise policies follow`."""
    with place.client() as client:
        pinned = _pin(place, version) if client is None else client.activate(version)
    if as_json:
        print_records(pinned, as_json=True)
        return
    click.echo(f"Version {version} is pinned: the proxy loads it now and keeps it, whatever is published later.")
    click.echo("`turnwise policies follow` undoes it.")


def _pin(place: DataPlace, version: int) -> Json:
    from turnwise.features import rewinds
    from turnwise.store import versions

    with place.store() as store:
        with store.read() as conn:
            policy = versions.get_version(conn, version)
        rewinds.check_files_exist(store, policy)
        with store.write() as conn:
            pinned: Json = values_of(rewinds.choose_version(conn, version, pin=True))
    return pinned


@policies.command("follow")
@click.option("--policy", default=DEFAULT_POLICY_NAME, show_default=True, help="The policy.")
@click.option("--tenant", help="Its owner [default: default; over HTTP the caller's].")
@takes_place
@json_option
def follow(policy: str, tenant: str | None, place: DataPlace, *, as_json: bool) -> None:
    """Serve the newest version of a policy again, and each later one."""
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            version = _unpin_at(client, policy)
        else:
            version = _unpin(place, tenant or "default", policy)
    if as_json:
        print_records({"version": version}, as_json=True)
        return
    click.echo(
        "No version is published yet." if version is None else f"The proxy follows the newest version: {version}."
    )


def _unpin(place: DataPlace, tenant: str, policy: str) -> int | None:
    from turnwise.features import rewinds
    from turnwise.store import policies as stored_policies
    from turnwise.store import serving

    with place.store() as store, store.write() as conn:
        policy_id = stored_policies.find_policy(conn, tenant, policy).policy_id
        rewinds.pin_policy(conn, None, policy_id=policy_id)
        newest = serving.serving_state(conn, policy_id).newest
    return None if newest is None else newest.version


def _unpin_at(client: Client, policy: str) -> int | None:
    newest = next(client.policies(policy), None)
    if newest is None:
        return None
    client.activate(newest["version"], pin=False)
    return int(newest["version"])


@policies.command("merge")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("destination", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", help="Directory or Hub name of the base model [default: the one that the version names].")
@click.option("--push", "repository", help="Also upload it to this repository of the Hugging Face Hub, private if new.")
def merge(directory: Path, destination: Path, model: str | None, repository: str | None) -> None:
    """Write a version of kind lora, policies/v000007, as a whole model: the adapter added to the base model."""
    from trainer.publish import merge as merging

    merging.merge_adapter(directory, destination, model=model)
    click.echo(f"The merged model is in {destination}.")
    if repository is not None:
        click.echo(f"Uploaded to {merging.push(destination, repository)}.")


@click.command("updates")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@takes_place
@json_option
def updates(limit: int, place: DataPlace, *, as_json: bool) -> None:
    """List what was trained: each update with its version, its groups and its mean reward, newest first."""
    with place.client() as client:
        if client is not None:
            found = [_with_metrics(each, *_SHOWN) for each in itertools.islice(client.updates(), limit)]
            print_stored(found, "updates", client.base_url, as_json=as_json, columns=_UPDATE_COLUMNS)
            return
    from turnwise.features.page.updates import list_updates
    from turnwise.store import extensions
    from turnwise.store import policies as stored_policies

    with place.store() as store, store.read() as conn:
        names = {policy.policy_id: policy.name for policy in stored_policies.list_policies(conn)}
        newest = list_updates(conn, limit=limit)[0]
        columns = extensions.read_columns(conn, "update", None, [each.update_id for each in newest])
        listed = [
            columns.add(_with_metrics(values_of(each), *_SHOWN), each.update_id) | {"policy": names.get(each.policy_id)}
            for each in newest
        ]
    print_stored(listed, "updates", place.database_url, as_json=as_json, columns=_UPDATE_COLUMNS)


def _with_metrics(record: Json, *names: str) -> Json:
    return record | {name: (record["metrics"] or {}).get(name) for name in names}


def _with_rewards(version: Json, earned: Json | None) -> Json:
    """Return a version with what its own sessions earned, and the mean reward of the batch that made it."""
    mean, margin = (None, None) if earned is None else (earned["mean"], earned["margin"])
    text = None if mean is None else f"{mean:.3f}" if margin is None else f"{mean:.3f} ± {margin:.3f}"
    batch = (version["metrics"] or {}).get("reward_mean")
    return version | {"earned": text, "num_sessions": (earned or {}).get("num_sessions"), "batch_reward": batch}


def _with_lift(policy: Json) -> Json:
    """Return a version with its lift over the older arm as text: the mean with its interval, each named reward too."""
    found: Json = (policy.get("arms") or {}).get("lift") or {}
    names = sorted(found, key=lambda name: (name != "reward", name))
    texts = [f"{found[each]['mean']:+.3f} [{found[each]['low']:+.3f}, {found[each]['high']:+.3f}]" for each in names]
    named = [text if name == "reward" else f"{name} {text}" for name, text in zip(names, texts, strict=True)]
    return policy | {"lift": "; ".join(named) or None}
