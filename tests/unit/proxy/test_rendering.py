"""What a long conversation may cost others: what cannot fit is not rendered, and the threads are shared by tenants."""

import asyncio
import math
import threading

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from proxy.sessions.rendering import NUM_THREADS, LongestTokens, RenderThreads, check_fits
from turnwise.errors import PromptTooLong


async def finish(*waiting):
    return await asyncio.wait_for(asyncio.gather(*waiting), 120)


async def test_a_tenant_with_many_long_calls_leaves_a_thread_to_each_other_tenant():
    """The others' calls end while none of the first tenant's does."""
    threads, freed = RenderThreads(), threading.Event()
    held = [asyncio.ensure_future(threads.run("many", freed.wait, 120)) for _ in range(20)]
    await asyncio.sleep(0)
    assert await finish(*(threads.run("other", str, number) for number in range(4))) == ["0", "1", "2", "3"]
    freed.set()
    assert await finish(*held) == [True] * 20


async def test_tenants_that_wait_take_turns():
    """With one thread: `a` has three calls, `b` comes later with one and is second."""
    threads, freed, order = RenderThreads(1), threading.Event(), []
    first = asyncio.ensure_future(threads.run("c", freed.wait, 120))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(threads.run(name[0], order.append, name)) for name in ("a1", "a2", "a3", "b1")]
    await asyncio.sleep(0)
    freed.set()
    await finish(first, *waiting)
    assert order == ["a1", "b1", "a2", "a3"]


async def test_what_has_not_started_when_its_client_leaves_is_not_run_and_its_place_is_free():
    threads, freed, ran = RenderThreads(), threading.Event(), []
    held = [asyncio.ensure_future(threads.run("t", freed.wait, 120)) for _ in range(NUM_THREADS - 1)]
    waiting = [asyncio.ensure_future(threads.run("t", ran.append, number)) for number in range(10)]
    await asyncio.sleep(0)
    for each in waiting:
        each.cancel()
    freed.set()
    await finish(*held)
    await finish(*(threads.run("t", ran.append, "later") for _ in range(4)))
    assert ran == ["later"] * 4


async def test_a_thread_whose_client_has_left_counts_for_its_tenant_until_it_ends():
    threads, freed, ran = RenderThreads(2), threading.Event(), []
    left = asyncio.ensure_future(threads.run("t", freed.wait, 120))
    await asyncio.sleep(0)
    left.cancel()
    next_one = asyncio.ensure_future(threads.run("t", ran.append, "next"))
    await finish(threads.run("other", str))
    assert ran == []
    freed.set()
    await finish(next_one)
    assert ran == ["next"]


LONGEST = LongestTokens.of(["abcd", "x" * 3, "=" * 16])
"""The longest token has four letters."""


LETTERS = "word " * 50_000
"""200,000 letters: 50,000 tokens of four, and the prompt has three more."""


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": LETTERS},
        {"role": "user", "content": [{"type": "text", "text": LETTERS}]},
        {"role": "tool", "content": [LETTERS[:100_000], LETTERS[100_000:]]},
        {"role": "system", "content": LETTERS},
        {"role": "user", "content": "=" * 2**20},
        {"role": "user", "content": "誰" * 2**21},
    ],
    ids=["text", "a part", "parts of a tool", "system", "signs", "beyond ASCII"],
)
async def test_new_messages_that_cannot_fit_are_refused(message):
    with pytest.raises(PromptTooLong, match="maximum context length is 50000") as refused:
        await check_fits([message], 3, 50_000.0, lambda: LONGEST)
    assert refused.value.num_tokens >= 50_000


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        ({"role": "user", "content": LETTERS}, 50_003.0),
        ({"role": "user", "content": LETTERS}, math.inf),
        ({"role": "user", "content": " \n" * 2**20}, 50_000.0),
        ({"role": "assistant", "content": LETTERS}, 50_000.0),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * 2**20}}]}, 50_000.0),
    ],
    ids=["it just fits", "no limit", "white space", "a reply, whose thinking is dropped", "an image"],
)
async def test_new_messages_that_may_fit_are_not_refused(message, limit):
    await check_fits([message], 3, limit, lambda: LONGEST)


TEXTS = [
    "plain words of a text",
    "=====",
    "  \n\n  x",
    "誰もいない",
    "e\u0301e\u0301 \u1100\u1161\u11a8",
    "12345",
    "\x00\x1b",
    "u\u0308\u0304" * 3,
    "𝐀𝐁㎏",
    "🙂👩‍👩‍👧",
]


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC()])
def test_the_least_number_of_tokens_is_never_more_than_there_are(normalizer):
    """A byte-level tokenizer that was trained on the very text, so that its tokens are as long as they get."""
    for text in (each * times for each in TEXTS for times in (1, 7, 100)):
        tokenizer = Tokenizer(models.BPE())
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        trained = trainers.BpeTrainer(vocab_size=400, show_progress=False)
        tokenizer.train_from_iterator([text], trained)
        least = LongestTokens.of(tokenizer.get_vocab()).least_tokens([text])
        assert least <= len(tokenizer.encode(text).ids)
