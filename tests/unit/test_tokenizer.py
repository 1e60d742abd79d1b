"""A tokenizer that is kept works as transformers' own, without importing it."""

from pathlib import Path

import jinja2
import pytest
from turnwise_fake_engine.tokens import write_tokenizer
from unit.proxy.test_templates_of_many_families import CASES, FAMILIES, TEXT, template_of

from turnwise import tokenizer as kept_tokenizers
from turnwise.tokenizer import KeptTokenizer, load_tokenizer, shape_conversation


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("family", FAMILIES)
def test_templates_render_and_texts_are_tokenised_as_by_transformers(family, home, tmp_path):
    original = template_of(family).tokenizer
    original.save_pretrained(tmp_path / "model")
    kept, _ = load_tokenizer(str(tmp_path / "model"))
    assert isinstance(kept, KeptTokenizer)
    assert kept.directory.is_relative_to(home)
    assert kept.all_special_tokens == original.all_special_tokens
    num_rendered = 0
    for before, reply, after, tools, _ in CASES.values():
        messages = shape_conversation([*before, reply, *after], "string", has_developer=False)
        for arguments in (
            {},
            {"add_generation_prompt": True},
            {"add_generation_prompt": True, "enable_thinking": False},
        ):
            given = {"tools": tools, "tokenize": False, **arguments}
            try:
                expected = original.apply_chat_template(messages, **given)
            except (jinja2.TemplateError, TypeError) as error:
                with pytest.raises(type(error)):
                    kept.apply_chat_template(messages, **given)
                continue
            num_rendered += 1
            assert kept.apply_chat_template(messages, **given) == expected
            ids = original.encode(expected, add_special_tokens=False)
            assert kept.encode(expected, add_special_tokens=False) == ids
            for skipped in (False, True):
                decoded = original.decode(ids, skip_special_tokens=skipped)
                assert kept.decode(ids, skip_special_tokens=skipped) == decoded
    assert num_rendered > 0


def test_changed_files_of_a_model_are_read_again(home, tmp_path):
    template = write_tokenizer(tmp_path) / "chat_template.jinja"
    load_tokenizer(str(tmp_path))
    template.write_text("{{ messages[0].content }}!")
    changed, _ = load_tokenizer(str(tmp_path))
    assert changed.apply_chat_template([TEXT], tokenize=False) == f"{TEXT['content']}!"
    assert len(list(home.rglob("record.json"))) == 2


def test_a_tokenizer_that_cannot_be_kept_is_loaded_by_transformers(home, tmp_path, monkeypatch):
    home.write_text("a file where the directory would be")
    loaded, ends = load_tokenizer(str(write_tokenizer(tmp_path)))
    assert not isinstance(loaded, KeptTokenizer)
    home.unlink()
    monkeypatch.setattr(kept_tokenizers, "_cleans_up", lambda _: True)
    loaded, again = load_tokenizer(str(tmp_path))
    assert not isinstance(loaded, KeptTokenizer)
    assert (again, list(tmp_path.rglob("record.json"))) == (ends, [])
