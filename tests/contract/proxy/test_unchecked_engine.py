"""`--engine-check off`: the chat template is loaded all the same, and a warning says when there is none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.in_process import in_process_proxy

USER = {"role": "user", "content": "Hello."}


def second_turn(directory: Path, **settings: Any) -> dict[str, Any]:
    with in_process_proxy(directory, **settings) as (http, _):
        url = "/sessions/s/v1/chat/completions"
        reply = http.post(url, json={"messages": [USER]}).json()["choices"][0]["message"]
        http.post(url, json={"messages": [USER, reply, USER]}).raise_for_status()
        return dict(http.get("/v1/sessions/s/turns").json()["data"][1])


def test_an_unchecked_engine_is_continued_by_the_template_of_its_directory(tmp_path: Path):
    turn = second_turn(tmp_path)
    assert (turn["outcome"], turn["reason"]) == ("exact", None)


def test_an_unchecked_engine_without_a_template_is_named_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        turn = second_turn(tmp_path, tokenizer=str(tmp_path))
    assert (turn["outcome"], turn["reason"]) == ("retokenised", "template_unknown")
    assert "no turn continues another" in caplog.text
