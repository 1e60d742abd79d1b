"""The command line: settings from flags, expected errors as one sentence, JSON where data is printed."""

import datetime as dt
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.commands import invoke
from support.servers import serving
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from turnwise.commands.output import print_records
from turnwise.exchange import plugins
from turnwise.installed import install_command
from turnwise.processes.installation import examine
from turnwise.store import sessions
from turnwise.store.database import Database
from turnwise.types import Session

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/store.db"
    assert invoke("db", "upgrade", "--database", url).exit_code == 0
    return url


def test_the_dry_run_of_the_engine_prints_a_line_for_the_shell():
    output = invoke("engine", "--dry-run", "--model", "owner/name", "--device", "cpu", "--", "--seed", "3").output
    line = output.strip().splitlines()[-1]
    assert line.startswith("VLLM_SERVER_DEV_MODE=1")
    assert line.endswith("--seed 3")


def test_the_dry_run_of_the_stack_shows_every_process_in_its_order():
    output = json.loads(invoke("up", "--dry-run", "--json", "--model", "owner/name", "--port", "8123").output)
    assert list(output["commands"]) == ["engine", "proxy", "trainer"]
    proxy = output["commands"]["proxy"]
    assert proxy[proxy.index("--port") + 1] == "8123"
    for name, subcommand in (("proxy", "proxy"), ("trainer", "train")):
        argv = output["commands"][name]
        assert argv[1:4] == ["-m", "turnwise", subcommand]
        dry = invoke(*argv[3:], "--dry-run")
        assert dry.exit_code == 0, dry.output


def test_an_invalid_setting_gives_one_sentence_and_status_two():
    result = invoke("engine", "--model", "owner/name", "--port", "much", "--dry-run")
    assert result.exit_code == 2
    assert result.stderr.startswith("turnwise: [engine] port='much' (from flag) does not fit")
    assert "Traceback" not in result.output


def test_a_command_that_stores_something_makes_the_sqlite_file_and_one_that_reads_does_not(tmp_path):
    """An empty database at a mistyped place would look like one without sessions."""
    file = tmp_path / "new.db"
    at = ("--database", f"sqlite:///{file}")
    read = (
        ("sessions",),
        ("policies",),
        ("updates",),
        ("keys", "list"),
        ("export",),
        ("verify",),
        ("db", "backup", "b"),
    )
    copy = ("db", "copy", "--from", f"sqlite:///{file}", "--to", f"sqlite:///{tmp_path}/copy.db")
    for command in (*((*each, *at) for each in read), copy):
        result = invoke(*command)
        assert (result.exit_code, "there is no database at" in result.stderr) == (2, True), command
    doctor = invoke("doctor", "--engine", "http://127.0.0.1:1", *at, "--json")
    assert {each["check"]: each["verdict"] for each in json.loads(doctor.output)}["database"] == "warn"
    assert not file.exists()
    assert invoke("keys", "create", "--yes", *at).exit_code == 0
    assert json.loads(invoke("sessions", *at, "--json").output) == []
    doctor = invoke("doctor", "--engine", "http://127.0.0.1:1", *at, "--json")
    assert {each["check"]: each["verdict"] for each in json.loads(doctor.output)}["database"] == "ok"


def test_the_first_key_is_asked_about_where_agents_ran_without_one(database):
    assert invoke("keys", "create", "--database", database, "--json").exit_code == 0, "nobody is locked out"
    other = database.replace("store.db", "other.db")
    store = Database(other)
    store.upgrade()
    with store.write() as connection:
        sessions.create_session(connection, Session(session_id="s"))
    store.close()
    for typed in ("n\n", ""):
        result = invoke("keys", "create", "--database", other, input=typed)
        assert (result.exit_code, "no key is created; answer y, or pass --yes" in result.stderr) == (2, True)
    assert json.loads(invoke("keys", "list", "--database", other, "--json").output) == []
    assert invoke("keys", "create", "--database", other, input="y\n").exit_code == 0
    assert invoke("keys", "create", "--database", other).exit_code == 0, "the second one is not asked about"


def test_a_new_key_is_shown_with_its_end_and_its_budget(database):
    limits = ("--expires-days", "2", "--token-budget", "500")
    made = json.loads(invoke("keys", "create", *limits, "--database", database, "--json").output)
    (stored,) = json.loads(invoke("keys", "list", "--database", database, "--json").output)
    assert made["token_budget"] == stored["token_budget"] == 500
    assert dt.datetime.fromisoformat(made["expires_at"]) == dt.datetime.fromisoformat(stored["expires_at"])
    assert invoke("keys", "create", "--database", database).output.split("\n")[0].endswith("expires_at  token_budget")


def test_the_database_of_the_environment_is_used_and_its_password_is_not_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("TURNWISE_PROXY_DATABASE", f"sqlite:///{tmp_path}/hidden.db")
    assert invoke("db", "upgrade").exit_code == 0
    assert (tmp_path / "hidden.db").exists()
    monkeypatch.setenv("TURNWISE_PROXY_DATABASE", "postgresql+psycopg://turnwise:hunter2@db/name")
    output = invoke("proxy", "--dry-run").output
    assert 'database = "postgresql+psycopg://**********@db/name"' in output
    assert "hunter2" not in output


def test_an_empty_store_has_no_sessions_and_no_experiences(database):
    assert json.loads(invoke("sessions", "--database", database, "--json").output) == []
    empty = invoke("sessions", "--database", database)
    assert f"no matching sessions in {database}" in empty.stderr, "the user may have meant another database"
    exported = invoke("export", "--database", database, "--split", "train")
    assert (exported.exit_code, exported.output) == (0, "")


def _verdicts(engine: RunningFakeEngine, database: str) -> dict[str, str]:
    result = invoke("doctor", "--engine", engine.url, "--database", database, "--json")
    return {finding["check"]: finding["verdict"] for finding in json.loads(result.output)}


def test_the_doctor_reports_no_problem_for_a_suitable_engine_and_a_ready_store(fake_engine, database):
    verdicts = _verdicts(fake_engine, database)
    checks = ("engine", "token ids", "logprobs", "continuation", "database")
    assert {check: verdicts[check] for check in checks} == dict.fromkeys(checks, "ok")


def test_the_doctor_detects_raw_logprobs_and_an_ignored_prompt(database):
    script = Script(logprobs_mode="raw_logprobs", honours_prompt_token_ids=False)
    with running_fake_engine(script) as engine:
        verdicts = _verdicts(engine, database)
    assert (verdicts["logprobs"], verdicts["continuation"]) == ("fail", "fail")


def test_the_doctor_names_an_unreachable_engine_and_exits_with_status_one(database):
    result = invoke("doctor", "--engine", "http://127.0.0.1:1", "--database", database)
    assert result.exit_code == 1
    assert "turnwise engine" in result.output


def test_the_doctor_names_the_address_of_an_api_in_place_of_an_engine(fake_engine, database):
    result = invoke("doctor", "--engine", f"{fake_engine.url}/v1", "--database", database)
    assert "answers 404 to GET /v1/health; name the address of a vLLM server, without /v1" in result.output


def test_the_doctor_does_not_blame_the_address_for_an_engines_own_error(database):
    """The handler of the standard library has no GET: it answers 501."""
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as url:
        result = invoke("doctor", "--engine", url, "--database", database)
    assert "answers 501 to GET /health; the log of that server states the reason" in result.output


@pytest.mark.parametrize("command", ["doctor", "verify"])
@pytest.mark.parametrize("content", [b"<html>Welcome</html>", b"[]"])
def test_the_address_of_another_server_than_an_engine_is_named(database, command, content):
    class Website(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Website)) as url:
        result = invoke(command, "--engine", url, "--database", database)
    assert "name the address of a vLLM server, without /v1" in result.output
    assert result.exit_code == 1


@pytest.mark.parametrize("output", ["directory", "file/below"])
def test_a_file_that_cannot_be_written_is_one_sentence(database, output):
    Path("file").touch()
    Path("directory").mkdir()
    result = invoke("export", "--database", database, "--output", output)
    assert result.exit_code == 1, result.output
    assert f"cannot read or write '{output}': " in result.output
    assert "name another place" in result.output


def test_tables_print_rounded_numbers_and_times_that_people_read(capsys):
    row = {"reward": 0.30000000000000004, "seconds": 12.345678, "created_at": "2026-11-23T02:41:55.476526+00:00"}
    print_records([row], as_json=False)
    shown = capsys.readouterr().out
    assert "0.3  " in shown
    assert "12.35" in shown
    assert re.search(r"2026-11-2\d \d\d:\d\d:55$", shown, flags=re.MULTILINE)
    print_records([row], as_json=True)
    assert json.loads(capsys.readouterr().out) == [row]


@pytest.mark.parametrize(
    ("name", "command"), [("proxy", "sessions"), ("trainer", "train"), ("migrations", "db upgrade")]
)
def test_a_package_in_the_place_of_ours_is_named_and_not_run(tmp_path, name, command):
    """A user's `trainer.py` lies in the directory of `turnwise up`, or another distribution has the name."""
    site = tmp_path / "site"
    site.mkdir()
    (site / f"{name}.py").write_text("print('RAN')")
    there = site / "theirs-1.0.dist-info"
    there.mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (there / "RECORD").write_text(f"{name}.py,,\n")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, "-m", "turnwise", *arguments]
        return subprocess.run(whole, check=False, capture_output=True, text=True, env=variables, timeout=WAIT_SECONDS)

    done = run(*command.split())
    said = f"'{site}/{name}.py', of the distribution theirs stands in its way"
    assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True), done.stderr
    doctor = run("doctor")  # it reads the proxy's settings, so it ends at that package as other commands do
    assert f"'{site}/{name}.py', of the distribution theirs stands in its way" in doctor.stdout + doctor.stderr


def test_a_distribution_that_may_have_replaced_files_of_ours_is_named(monkeypatch):
    monkeypatch.setattr(plugins, "_distributions_of_packages", lambda: {"proxy": ["theirs", "turnwise"]})
    (found,) = [each for each in examine([], "sqlite:///none.db") if each.check.startswith("package ")]
    assert (found.check, found.verdict) == ("package proxy", "warn")
    assert "the distribution theirs installs one too, and may have replaced files" in found.text


def test_a_shell_completes_commands():
    """The words that a shell completes come from the command itself, as docs/operations.md says."""
    variables = {"_TURNWISE_COMPLETE": "bash_complete", "COMP_WORDS": "turnwise pol", "COMP_CWORD": "1"}
    code = "import sys; sys.argv = ['turnwise']; from turnwise.commands.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | variables,
        timeout=WAIT_SECONDS,
        cwd=ROOT,
    )
    assert done.stdout == "plain,policies\n"


def test_up_in_a_bare_environment_names_all_extras_at_once(monkeypatch):
    def lacks(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="sqlalchemy")

    monkeypatch.setattr("turnwise.commands.cli.importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("turnwise.commands.cli.missing_from", lambda extra: [extra])
    monkeypatch.setattr("turnwise.commands.up.check_none_runs", lambda: lacks("sqlalchemy"))
    result = invoke("up", "--model", "owner/name")
    assert (result.exit_code, install_command("store", "proxy", "trainer", "engine-cpu") in result.stderr) == (2, True)
