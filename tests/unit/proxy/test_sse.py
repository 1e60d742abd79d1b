"""The parser returns complete events from a stream that is cut anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import sse

EVENTS = [b'{"a": 1}', '{"text": "ž\\n"}'.encode(), b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(cuts=st.lists(st.integers(min_value=1, max_value=60), max_size=8))
def test_any_cut_gives_the_same_events(line_end: bytes, cuts: list[int]):
    stream = b"".join(map(sse.event, EVENTS)).replace(b"\n", line_end)
    buffer, found, at = sse.EventBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == EVENTS
    assert not b"".join(buffer.pending)


def test_comments_and_windows_line_ends_are_parsed_and_incomplete_data_is_kept():
    buffer = sse.EventBuffer()
    events = buffer.feed(b": ping\r\n\r\ndata: x\r\n\r\ndata: y")
    assert events == [b"x"]
    assert b"".join(buffer.pending) == b"data: y"
    assert sse.EventBuffer().feed(b"data: x\r\n\r\ndata: y\n\n") == [b"x", b"y"]


def test_a_stream_is_written_as_it_is_read():
    verbatim = sse.Verbatim()
    written = verbatim.chunks(EVENTS[:2]) + verbatim.done() + verbatim.error(b'{"error": {}}')
    assert sse.EventBuffer().feed(written) == [*EVENTS, b'{"error": {}}']
    assert sse.named_event("ping", {"n": 1}) == b'event: ping\ndata: {"type":"ping","n":1}\n\n'
