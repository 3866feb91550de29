"""Worlds of 2 and 3 processes in the fast suite, of 4 and 8 in the slow one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World, Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    known = Worlds()
    yield known
    known.close()


@pytest.fixture(params=[2, 3, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    return worlds.of(request.param)
