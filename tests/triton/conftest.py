"""What kernels were launched."""

from __future__ import annotations

import pytest

from partita.engine.backends.triton import launch


@pytest.fixture
def launched(monkeypatch):
    """The kernels that ran, with their programs."""
    found = []
    run = launch.Launch.run
    monkeypatch.setattr(launch.Launch, "run", lambda self, device: (found.append(self), run(self, device))[1])
    return found
