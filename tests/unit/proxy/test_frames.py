"""The byte stream between two processes."""

from __future__ import annotations

from proxy.writer.frames import Frames, frame

OBJECTS = [(1, 2.5, ["text", b"bytes"]), {"key": None}, "x" * 3000]


def test_objects_are_decoded_wherever_the_stream_is_cut():
    stream = b"".join(piece for each in OBJECTS for piece in frame(each))
    for size in (1, 7, 8, 9, 100, len(stream) - 1, len(stream)):
        frames, found = Frames(), []
        for start in range(0, len(stream), size):
            found += frames.feed(stream[start : start + size])
        assert found == OBJECTS, f"cut into pieces of {size} bytes"
