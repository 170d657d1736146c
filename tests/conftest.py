"""Fixtures for every test. Helpers live in tests/fixtures and are imported as `fixtures.NAME`."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random six-layer Llama with a ChatML tokenizer (tests/fixtures/tiny.py). Tests must not change it."""
    from fixtures.tiny import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("tiny-target"))
