"""`turnwise certify MODEL`: plays, trains, reloads and restarts; whether a kind is refused, failed or not measured.

The processes are those of a deployment, started by their own commands. Every sampled token is compared with a forward
pass of transformers over the files of the version that sampled it. The result is stored beside the weights, and belongs
to their digest: `turnwise up` reads it, and docs/models.md is made from such rows.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.features.certify.certificate import Certificate, Computed, KindResult, ingredients
from turnwise.commands.output import print_process_line
from turnwise.errors import ChildFailed, TurnwiseError
from turnwise.files import create_private
from turnwise.processes.engine_checks import SERVER_INFO_ROUTE, weights_dtype
from turnwise.types import Json, PolicyKind
from turnwise.version_directory import base_version

if TYPE_CHECKING:
    from turnwise.client import Client
    from turnwise.commands.features.certify.engine_text import EngineText
    from turnwise.processes.supervisor import Supervisor
    from turnwise.store.turns import TurnView

GROUPS, GROUP_SIZE, TOKENS = 2, 4, 16
WAIT_SECONDS = 900.0
CHANGED_TOKENS = 256
"""Tokens of the text that is computed with changed weights."""
TRAINER_LOG = "trainer.log"
NOT_TRAINED = re.compile(r"not trained: (.+)")
TOOL = {"name": "lookup", "description": "Look a word up.", "parameters": {"type": "object", "properties": {}}}


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
    from turnwise.processes.served_model import check_chat_template, check_model_directory, whole_config

    check_model_directory(Path(model))
    check_chat_template(model, vllm_flags)
    known, _ = Certificate.valid(model)
    wanted = kinds or ("full", "lora")
    made = Certificate(
        architecture=str((whole_config(model).get("architectures") or ["unknown"])[0]),
        made_with=ingredients(Path(model)),
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

    from trainer.features import Settings
    from trainer.model.loading import described
    from turnwise.commands.features.certify.engine_text import EngineText
    from turnwise.processes.engine_command import has_gpu
    from turnwise.processes.served_model import check_served, cpu_dtype_of

    result, database = KindResult(kind, dtype=cpu_dtype_of(model)), f"sqlite:///{place}/store.db"
    failures = (TurnwiseError, RuntimeError, MemoryError, OSError, openai.APIError)
    try:
        check_served(model, gpu=has_gpu(), lora=kind == "lora", dtype=None, vllm_flags=vllm_flags)
        result.notes = described(Settings(model=model, kind=PolicyKind(kind)))
        with _stack(model, kind, place, database, vllm_flags) as (stack, client, engine_url):
            result.dtype = engine_dtype(engine_url) or result.dtype
            text = EngineText.longest(engine_url, model, result.dtype)
            _say("computes one long text")
            result.stages["long"] = _long_text(model, text)
            _say("loads weights that were changed at random")
            result.stages["changed"] = _changed_weights(model, kind, place / "changed", text)
            _play_all(stack, client, place, lambda *more: _train(model, kind, place, database, rate, *more))
    except failures as error:
        result.give_up(error)
    try:
        if (place / "store.db").exists():
            _say("compares every sampled token with the files")
            stages, result.notes["chains"] = _compare(database, result.dtype)
            result.stages |= stages
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


def _play_all(stack: Supervisor, client: Client, place: Path, train: Callable[..., None]) -> None:
    """Play every stage; the name of a session begins with its stage."""
    _say("plays the model as it is")
    _play(client, "base", turns=3, branch=True)
    for number, algorithm in enumerate(("grpo", "dpo"), 1):
        for each in range(GROUPS * GROUP_SIZE):
            group, run = divmod(each, GROUP_SIZE)
            named = {"group_id": f"{algorithm}-{group}", "group_size": GROUP_SIZE, "run": run}
            _play(client, f"base-{algorithm}-{each}", turns=2, branch=True, reward=float(run % 2), **named)
        _say(f"trains version {number} by {algorithm}")
        train("--algorithm", algorithm, "--total-batches", str(number))
        if all(policy["version"] != number for policy in client.policies()):
            raise ChildFailed(why_untrained(place / TRAINER_LOG))
        _wait(client, number, stack)
        _say(f"plays version {number}")
        _play(client, algorithm, turns=2)
    for stage, version in (("rolled_back", 0), ("reloaded", 2)):
        _say(f"serves version {version} again")
        client.activate(version)
        _wait(client, version, stack)
        _play(client, stage)
    _say("restarts the engine")
    starts = stack.num_starts("engine")
    stack.restart("engine")
    _until(lambda: stack.num_starts("engine") > starts and stack.state("engine").value == "ready", stack, "a restart")
    client.wait_until_ready(WAIT_SECONDS)
    _wait(client, 2, stack)
    _play(client, "restarted")


def _say(text: str) -> None:
    print_process_line("certify", text)


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
    _command(place / TRAINER_LOG, "train", *flags, "--max-staleness", "100", "--no-progress", *more)


def why_untrained(log: Path) -> str:
    """Return the trainer's sentence about the groups of its last batch."""
    said = NOT_TRAINED.findall(log.read_text(encoding="utf-8", errors="replace"))
    return f"the trainer trained no group: {said[-1].strip()}" if said else f"the trainer made no version: see {log}"


def _command(log: Path, *arguments: str) -> None:
    """Run one of our commands to its end.

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
                command(*arguments), stdout=errors, stderr=errors, check=False, timeout=WAIT_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"turnwise {arguments[0]} did not end within {WAIT_SECONDS:.0f} s: see {log}") from error
    if done.returncode:
        # A process that was killed wrote no error: what its log has is a warning.
        said = None if done.returncode in KILLED else last_error(log, start)
        ended = f"turnwise {arguments[0]} ended with {describe_exit(done.returncode)}: see {log}"
        raise ChildFailed(said or ended)


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


def _compare(database: str, dtype: str) -> tuple[dict[str, Any], str]:
    """Return the versions that sampled each stage and its gaps to forward passes, and how many turns went on in chains.

    One model after the other is loaded, and computes all that it is asked for.
    """
    from trainer.forward import ForwardChecker
    from turnwise.commands.place import opened
    from turnwise.features.records import session_records
    from turnwise.features.verify.records import all_policies
    from turnwise.store.selection import SessionFilter

    with opened(database) as store:
        versions = {each.version: each for each in all_policies(store)}
        with store.read() as conn:
            views = [view for record in session_records(conn, SessionFilter()) for view in record.views()]
    checker = ForwardChecker(versions, tolerance=math.inf)
    views.sort(key=lambda view: view.turn.policy_version_first)
    stages: dict[str, Computed] = defaultdict(Computed)
    sampled: dict[str, set[int]] = defaultdict(set)

    def compute(whose: str, version: int | None = None, number: str = "float32") -> None:
        for view in views:
            found = checker.logprobs(view, version, number)
            if isinstance(found, str):
                raise ChildFailed(f"a turn of version {view.turn.policy_version_first} cannot be computed: {found}")
            now, is_known = found
            stage = stages[_stage(view)]
            getattr(stage, whose).extend(now[is_known].tolist())
            if whose == "exact":
                stage.engine.extend(view.turn.logprobs[is_known].tolist())

    for view in views:
        sampled[_stage(view)].add(view.turn.policy_version_first)
    compute("exact")
    if any(view.turn.policy_version_first for view in views):
        compute("base", version=0)
    if dtype != "float32":
        compute("rounded", number=dtype)
    followed = [view.turn for view in views if view.turn.seq > 0]
    extended = sum(turn.parent_turn_id is not None for turn in followed)
    found = {name: {"versions": sorted(sampled[name]), **stage.gaps()} for name, stage in stages.items()}
    return found, f"{extended} of {len(followed)} turns extend their chain"


def _stage(view: TurnView) -> str:
    return view.turn.session_id.partition("-")[0]


def _long_text(model: str, engine: EngineText) -> Json:
    """Return the gaps of the engine on one text that is longer than the model's window and its original positions."""
    from trainer.forward import ForwardChecker

    checker = ForwardChecker({0: base_version(model)}, tolerance=math.inf)
    computed = Computed(engine=engine.logprobs())
    computed.exact = checker.of_text(engine.tokens, engine.positions).tolist()
    if engine.dtype != "float32":
        computed.rounded = checker.of_text(engine.tokens, engine.positions, engine.dtype).tolist()
    return {"versions": [0], **computed.gaps(), "length": len(engine.tokens)}


def _changed_weights(model: str, kind: str, place: Path, engine: EngineText) -> Json:
    """Return the gaps of the engine after it has loaded weights that were changed at random, before any training.

    It has the model as it is again afterwards.

    Raises:
        ChildFailed: It did not take all of them.
    """
    from trainer.forward import change_at_random

    engine = dataclasses.replace(engine, tokens=engine.tokens[:CHANGED_TOKENS])
    exact, rounded = change_at_random(model, PolicyKind(kind), place, engine.tokens, engine.positions, engine.dtype)
    name = "turnwise-changed"
    if kind == PolicyKind.LORA:
        engine.ask("/v1/load_lora_adapter", lora_name=name, lora_path=str(place))
        computed = Computed(engine=dataclasses.replace(engine, name=name).logprobs(), exact=exact, rounded=rounded)
        engine.ask("/v1/unload_lora_adapter", lora_name=name)
    else:
        engine.load(str(place))
        computed = Computed(engine=engine.logprobs(), exact=exact, rounded=rounded)
        engine.load(model)
    found = {"versions": [], **computed.gaps(), "length": len(engine.tokens)}
    faults = list(KindResult(kind, dtype=engine.dtype, stages={"changed": found}).faults())
    if faults:
        raise ChildFailed(f"the engine does not take all weights of a version ({'; '.join(faults)})")
    return found
