"""On-policy distillation: the advantage by hand, and teachers over HTTP that fail in every way."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.algorithms import close
from support.experience_factory import experience
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train
from turnwise_fake_engine import running_fake_engine
from turnwise_fake_engine.sampling import logprobs_of

from trainer.algorithms import teachers as asking
from trainer.algorithms.distillation import with_teachers
from trainer.algorithms.teachers import Teacher, Teachers, TeacherScores
from trainer.batch.batch import build
from trainer.features import Settings
from trainer.features.policies import settings_of
from trainer.world import World
from turnwise.errors import SettingsError
from turnwise.settings import describe
from turnwise.types import Policy

Answer = Callable[[dict], tuple[int, object]]


def batch_of(*sessions):
    return build(sessions, [np.full(len(one.turn_ids), 0.5) for one in sessions], policy_version=0)


def prompt_logprobs(body, logprob=-0.5):
    entries = [None, *({str(token): {"logprob": logprob, "rank": 1}} for token in body["prompt"][1:])]
    return 200, {"choices": [{"prompt_logprobs": entries}]}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], str]]:
    """Return a function that serves a teacher which answers by a function of the request, and gives its address."""
    servers = []

    def start(answer: Answer) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, found = answer(body)
                raw = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def teachers(monkeypatch) -> Iterator[Callable[..., Teachers]]:
    monkeypatch.setattr(asking, "RETRY_SECONDS", 5.0)
    made = []

    def make(*those: Teacher, concurrency: int = 8) -> Teachers:
        monkeypatch.setattr(asking, "CONCURRENCY", concurrency)
        made.append(Teachers(those))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_advantage_is_the_teachers_logprob_minus_the_students_by_hand():
    """μ = -1 and -2, teacher -0.5 and -5, coefficient 2: 0.5 + 2 · 0.5 = 1.5, and 0.5 + 2 · -3 = -5.5; KL = 1.25."""
    batch = batch_of(experience(logprobs=[0, -1.0, -2.0]), experience(session_id="b"))
    scores = TeacherScores(
        logprobs=np.array([-0.5, -5.0, 0, 0], np.float32),
        is_scored=np.array([True, True, False, False]),
        unscored={"unreadable": 1},
    )
    taught, gauges = with_teachers(batch, scores, 2.0)
    close(taught.table.advantages, [1.5, -5.5, 0.5, 0.5])
    assert gauges == {"teacher_tokens": 2, "teacher_kl": 1.25, "num_teacher_unscored": 1, "num_teacher_unreadable": 1}


def test_several_teachers_are_chosen_by_task_and_averaged_by_weight(serve, teachers):
    """Both rate the first session: (3 · -1 + 1 · -2) / 4 = -1.25; the second one's task has one teacher alone."""
    one = Teacher(url=serve(lambda body: prompt_logprobs(body, -1.0)), model="m", weight=3.0)
    two = Teacher(url=serve(lambda body: prompt_logprobs(body, -2.0)), model="m", tasks="maths-*")
    first, second = experience(), experience(session_id="b")
    object.__setattr__(first, "task_id", "maths-1")
    scores = teachers(one, two).score(batch_of(first, second), [0, 1])
    close(scores.logprobs, [-1.25, -1.25, -1.0, -1.0])
    assert scores.is_scored.all()


def test_an_overloaded_teacher_is_asked_again(serve, teachers):
    statuses = iter([503, 429, 200])
    bodies = []

    def answer(body):
        bodies.append(body)
        status = next(statuses)
        return prompt_logprobs(body) if status == 200 else (status, {"error": "busy"})

    scores = teachers(Teacher(url=serve(answer), model="m")).score(batch_of(experience()), [0])
    close(scores.logprobs, [-0.5, -0.5])
    assert bodies == [{"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "prompt_logprobs": 0}] * 3


UNUSABLE = {
    "refused": lambda _: (404, {"error": "no such model"}),
    "unreadable": lambda _: (200, b"<html>"),
    "unreadable ids": lambda _: (200, {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.0}}, None]}]}),
    "unreadable numbers": lambda body: prompt_logprobs(body, float("nan")),
    "unreadable length": lambda body: (
        200,
        {"choices": [{"prompt_logprobs": prompt_logprobs(body)[1]["choices"][0]["prompt_logprobs"] + [None]}]},
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_tokens_that_a_teacher_cannot_score_are_counted_and_get_no_advantage(name, serve, teachers):
    scores = teachers(Teacher(url=serve(UNUSABLE[name]), model="m")).score(batch_of(experience()), [0])
    assert scores.unscored == {name.split()[0]: 1}
    assert not scores.is_scored.any()


def test_tasks_without_a_teacher_are_not_sent(serve, teachers):
    teacher = Teacher(url=serve(prompt_logprobs), model="m", tasks="maths-*")
    rated = experience(turns=2)
    object.__setattr__(rated, "task_id", "maths-1")
    scores = teachers(teacher).score(batch_of(rated, experience(session_id="b")), [0, 1])
    assert scores.unscored == {"without_teacher": 1}


def test_a_teacher_that_answers_nothing_holds_up_a_batch_once_and_not_each_chain(serve, teachers, monkeypatch):
    """Six chains wait 5 s together, not 5 s each; so again in the next batch."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    monkeypatch.setattr("trainer.algorithms.teachers.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    client = teachers(Teacher(url=serve(lambda _: (503, {"error": "down"})), model="m"), concurrency=1)
    batch = batch_of(*(experience(session_id=str(number)) for number in range(6)))
    for _ in range(2):
        began = clock[0]
        assert client.score(batch, range(6)).unscored == {"unreachable": 6}
        assert 3 < clock[0] - began <= 5


def test_the_wire_format_is_that_of_an_engine(teachers):
    """The fake engine has vLLM's format, and logprobs that depend on the token alone."""
    with running_fake_engine() as engine:
        teacher = Teacher(url=f"{engine.url}/v1", model=engine.state.script.model)
        scores = teachers(teacher).score(batch_of(experience(turns=2)), [0])
        prompt = np.frombuffer(b"Hello.", np.uint8).astype(np.int32)
        (whole,), unscored = teachers(teacher).replies([prompt], 500)
        (cut,), why = teachers(teacher).replies([prompt], 1)
    close(scores.logprobs, [logprobs_of(token, 1.0, count=0)[0] for token in (2, 3, 5, 6)])
    assert (len(whole) > 1, unscored) == (True, {})
    assert (len(cut), why) == (0, {"too_long": 1})


def test_a_student_moves_towards_its_teacher_and_the_gauges_show_it(tmp_path, model, ledger, serve):
    """The teacher prefers tokens below 24; rewards are not read. What is served next samples more of them."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)

    def answer(body):
        entries = [None, *({str(t): {"logprob": -1.0 if t < 24 else -8.0}} for t in body["prompt"][1:])]
        return 200, {"choices": [{"prompt_logprobs": entries}]}

    teacher = {"url": serve(answer), "model": "m"}
    settings = settings_for(
        tmp_path,
        model,
        algorithm={"name": "distillation", "teachers": [teacher]},
        total_batches=1,
        num_minibatches=4,
        learning_rate=1e-2,
    )
    state = train(settings)
    assert (state.metrics["teacher_tokens"], state.metrics["num_teacher_unscored"]) == (3 * 4 * 8, 0)
    after = load_model(tmp_path / "policies" / "v000001")
    prompt = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before_p, after_p = (torch.softmax(m(prompt).logits[0, -1], -1)[:24].sum() for m in (load_model(model), after))
    assert after_p > before_p + 0.05


def test_a_batch_that_no_teacher_scored_is_refused(tmp_path, model, ledger, monkeypatch):
    monkeypatch.setattr(asking, "RETRY_SECONDS", 0.0)
    Rollouts(ledger, load_model(model)).play("a", num_groups=3, group_size=2)
    unreachable = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    state = train(
        settings_for(tmp_path, model, algorithm={"name": "distillation", "teachers": [unreachable]}, total_batches=1)
    )
    assert "no teacher scored a chain ({'unreachable': 6})" in state.metrics["refused"]


def test_a_policy_that_is_created_after_a_teacher_was_asked_gets_teachers_of_its_own(serve):
    teacher = {"url": serve(prompt_logprobs), "model": "m"}
    settings = Settings(kind="lora", algorithm={"name": "distillation", "teachers": [teacher]})
    settings.algorithm.credit(batch_of(experience()), [0], SimpleNamespace(world=World()))
    own = settings_of(settings, Policy(policy_id=1, tenant="acme", name="other")).algorithm
    settings.algorithm.close()
    _, gauges = own.credit(batch_of(experience()), [0], SimpleNamespace(world=World()))
    own.close()
    assert own == settings.algorithm
    assert gauges["teacher_tokens"] > 0


def test_teachers_are_tables_in_the_settings_and_must_fit():
    table = {"name": "distillation", "teachers": [{"url": "http://t/v1", "model": "m", "key": "secret"}]}
    given = Settings(algorithm=json.dumps(table))
    assert given.algorithm.settings.teachers == (Teacher(url="http://t/v1", model="m", key="secret"),)
    assert "secret" not in describe(given, "trainer")
    with pytest.raises(SettingsError, match=r"\[trainer.algorithm\] needs 'teachers'"):
        Settings(algorithm="distillation")


def test_a_teacher_replies_to_prompts_with_whole_replies_alone(serve, teachers):
    """The first prompt gets a reply after a retry, the second one a cut reply, the third one no token ids."""
    asked = []
    statuses = iter([503])

    def answer(body):
        asked.append(body)
        if body["prompt"] == [1] and (status := next(statuses, None)):
            return status, {}
        finish = "length" if body["prompt"] == [2] else "stop"
        return 200, {"choices": [{"finish_reason": finish} | ({} if body["prompt"] == [3] else {"token_ids": [7, 8]})]}

    teacher = teachers(Teacher(url=serve(answer), model="v0"), concurrency=1)
    found, unscored = teacher.replies([np.array([number], np.int32) for number in (1, 2, 3)], 5)
    assert [each.tolist() for each in found] == [[7, 8], [], []]
    assert unscored == {"too_long": 1, "unreadable": 1}
    assert [each["prompt"] for each in asked] == [[1], [1], [2], [3]]
    assert {(each["model"], each["max_tokens"], each["return_token_ids"]) for each in asked} == {("v0", 5, True)}
