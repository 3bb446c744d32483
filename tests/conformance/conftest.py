"""The server that all clients of a test process talk to, one after the other."""

from collections.abc import Iterator

import pytest

from tests.conformance.demo import Demo, demo


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    with demo(tmp_path_factory.mktemp("demo")) as running:
        yield running
