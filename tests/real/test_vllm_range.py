"""The Python files of each release of vLLM that is allowed: pip downloads the wheels, and nothing is installed."""

import pytest
from support.vllm_sources import RELEASES, recorded, rows

from turnwise.engine_plugin import upstream

pytestmark = [pytest.mark.slow, pytest.mark.real]


def test_all_that_we_replace_or_call_is_in_each_release_as_it_was_when_somebody_read_it():
    """A difference is a release that changed it: read what changed, then `python -m support.vllm_sources`."""
    table = recorded()
    found = rows(list(table))
    assert {name: row for name, row in found.items() if row != table[name]} == {}
    for replacing, patch in upstream.PATCHES.items():
        known = [found[name] * (len(RELEASES) if len(found[name]) == 1 else 1) for name in patch.replaced]
        if replacing == "images.refuse_typed_placeholders":
            assert [sum(row[release] is not None for row in known) for release in range(len(RELEASES))] == [1, 1]
        else:
            assert not any(each is None for row in known for each in row), replacing
