"""The proxy of these tests: one for each module, empty for each test, over a fake engine."""

import pytest
from support.control_plane import publish, wait_for_status
from support.tiny_checkpoints import write_weights


@pytest.fixture(scope="module")
def serves_version_1(shared_proxy, tmp_path_factory):
    directory = tmp_path_factory.mktemp("policies")
    for version in range(2):
        assert publish(shared_proxy.proxy, write_weights(directory / str(version))) == version
        wait_for_status(shared_proxy.proxy, version)


@pytest.fixture
def proxy(empty_proxy, serves_version_1):
    return empty_proxy
