"""Learn from corrections alone: no session has a reward, and each failed one gets a comment on its first wrong reply.

`python bench/learning/corrections.py [--seed N] [--sft]`. The demo's model, warmed up on `hinted_trail`, can follow a
hint. Its first version is the teacher: it replies with the comment in its prompt. With `--sft` the whole conversations
that the same people would have had are imitated instead. What is forgotten is the loss on the replies of 200
conversations right after a hint to a random way, which the model can follow at the start and nothing teaches it to.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import hinted_trail
import torch
import transformers
from hinted_trail import hint, way_of, with_hint
from imported import play
from in_process import Chain, Sampler
from json_server import serving
from learner import ROOT, Run, step_rewards
from recipes import Recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxy.features.feedback.routes import hint_of
from proxy.sessions.template import ChatTemplate, load_chat_template
from turnwise.default_models import small_model, trail
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.exchange.imports.formats import FORMATS
from turnwise.exchange.imports.tokenise import Tokeniser
from turnwise.exchange.imports.writer import ImportRule, import_files
from turnwise.features import feedback
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.store import claims, turns
from turnwise.store.serving import serving_state
from turnwise.types import Json, Reward, Split

NUM_EVAL = 256
EVALUATE_EVERY = 4
NUM_UNRELATED = 200
BATCH = 64
"""Corrections for which the trainer waits."""
HINTED = trail.WarmUp("hinted_trail", hinted_trail.warm_up_conversation, trail.TOOLS)


class CorrectedRun(Run):
    """A run in which nobody gives a reward, and every failed session is corrected."""

    def __init__(self, seed: int, model: Path, directory: Path, *, teacher: str, is_sft: bool) -> None:
        algorithm = {"name": "correction", "teacher": {"url": teacher, "model": "version-0"}}
        settings = {"algorithm": {"name": "sft"} if is_sft else algorithm, "singles_per_group": 1}
        settings |= {"groups_per_batch": 2 * BATCH}
        super().__init__(Recipe(settings=settings, is_single=True, groups_per_update=16), seed, model, directory)
        self.template: ChatTemplate = load_chat_template(str(model), "string")
        self._model, self._directory = model, directory
        self._is_sft = is_sft
        self._rows: list[str] = []
        self.num_corrections = 0

    def play_until_ready(self) -> None:
        """Play tasks until there are corrections for a batch."""
        while True:
            with self.db.read() as conn:
                if sum(claims.num_claimable(conn, with_imported=True)) >= BATCH:
                    return
            self.play_groups()
            if self._rows:
                path = self._directory / f"corrected-{self.num_corrections}.jsonl"
                path.write_text("".join(self._rows), encoding="utf-8")
                self._rows.clear()
                rule = ImportRule(format_name="hf")
                import_files(self.db, path, FORMATS["hf"], Tokeniser(str(self._model)), rule, lambda _: None)

    def _rewards(self, chain: Chain, task: trail.TrailTask, answer: str) -> list[Reward]:
        """Return the true rewards of held-out sessions; correct the failed ones of the others."""
        if chain.session.split is Split.EVAL:
            return super()._rewards(chain, task, answer)
        right = play(task, random.Random(task.task_id), reward=1.0)
        replies = step_rewards(task, [turn.response for turn in chain.turns])
        if 0.0 in replies:
            self.num_corrections += 1
            if self._is_sft:
                self._rows.append(json.dumps({"messages": right, "tools": trail.TOOLS}) + "\n")
            else:
                way = way_of(right)
                assert way is not None, "a right conversation ends with an answer"
                number = replies.index(0.0)
                self._comment(chain, number, hint(way, number))
        return []

    def _comment(self, chain: Chain, number: int, text: str) -> None:
        turn_id = chain.turns[number].turn_id
        with self.db.write() as conn:
            view = turns.read_turn(conn, "default", turn_id, whole_prompt=True)
            content = {"value": text, "hint": hint_of(self.template, view, text)}
            session_id = chain.session.session_id
            given = Feedback(session_id=session_id, turn_id=turn_id, kind=FeedbackKind.COMMENT, content=content)
            feedback.add(conn, given, reward=0.0)

    def newest(self) -> Path:
        """Return the directory of the newest version."""
        with self.db.read() as conn:
            newest = serving_state(conn).newest
        assert newest is not None, "the trainer publishes version 0 at its start"
        return Path(newest.path)


def main() -> None:
    """Train one seed and print its held-out rewards and losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sft", action="store_true", help="imitate the corrected conversations")
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--models", type=Path, default=ROOT / "runs/learning", help="where warmed models are kept")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    spec = SmallModelSpec(warm_up=HINTED, seed=options.seed)
    model = build_small_model(options.models / f"hinted-{options.seed}", spec)
    with tempfile.TemporaryDirectory() as directory, serving_replies(model) as teacher:
        run = CorrectedRun(options.seed, model, Path(directory), teacher=teacher, is_sft=options.sft)
        for number in range(options.updates + 1):
            if number:
                run.play_until_ready()
                run.update()
            if number % EVALUATE_EVERY == 0:
                held_out, loss = run.evaluate(NUM_EVAL), unrelated_loss(run.newest())
                print(
                    f"seed {options.seed}, update {number}: held-out {held_out:.2f}, unrelated loss {loss:.3f}, "
                    f"{run.num_corrections} corrections of {run.num_sessions} sessions",
                    flush=True,
                )
        run.close()


def serving_replies(directory: Path) -> AbstractContextManager[str]:
    """Serve the replies of a policy, as vLLM's completions do; yield the address, with `/v1`."""
    end = AutoTokenizer.from_pretrained(directory).eos_token_id
    sampler, lock = Sampler(end, seed=0), threading.Lock()
    sampler.load(directory)

    def reply(request: Json) -> Json:
        with lock:
            torch.set_num_threads(1)  # a setting of each thread
            (sampled,) = sampler.sample([request["prompt"]], request["max_tokens"], [{}])
        finish = "stop" if sampled.token_ids[-1] == end else "length"
        return {"choices": [{"token_ids": sampled.token_ids, "finish_reason": finish}]}

    return serving(reply)


@torch.inference_mode()
def unrelated_loss(directory: Path) -> float:
    """Return the mean loss of a token of the last reply of each conversation of `unrelated`."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    losses = []
    for messages in unrelated():
        text = tokenizer.apply_chat_template(messages, tools=trail.TOOLS, tokenize=False)
        before, _, reply = text.rpartition(f"{small_model.START_OF_TURN}assistant\n")
        ids = tokenizer(text)["input_ids"]
        length = len(tokenizer(reply)["input_ids"]) - 1  # without the line feed after the end of the message
        assert tokenizer.decode(ids[-1 - length : -1]) == reply.removesuffix("\n"), (before, reply)
        log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0, -2 - length : -2], -1)
        losses.append(-float(log_p.gather(1, torch.tensor(ids[-1 - length : -1])[:, None]).mean()))
    return sum(losses) / len(losses)


def unrelated() -> Iterator[list[trail.Message]]:
    """Yield conversations that end with the reply to a hint, with random ways, of tasks that no run plays."""
    rng, number = random.Random("unrelated"), 0
    for _ in range(NUM_UNRELATED):
        way = None
        while way is None:
            messages = trail.warm_up_conversation(trail.make_task("eval", 500_000 + number, 0), rng)
            way, number = way_of(messages), number + 1
        reply = rng.randrange(len(way))
        yield with_hint(messages, way, reply)[: 3 + 2 * reply + (reply > 0)]


if __name__ == "__main__":
    main()
