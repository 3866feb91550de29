"""Memory of a rank beyond its inputs falls as 1 / W: its share of the results, and a few parts of a block."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.memory import PROBES
from tests.distributed.world import World

MB = 1 << 20
# What one process cannot do without: gradients, and outputs that are as large. And the blocks that go round.
RESULTS_MB = {"contrast": 32, "contrast, symmetric": 32, "attention": 64, "classes": 32, "classes, statistics": 32}
TRAVELLING_MB = {"contrast": 16, "contrast, symmetric": 16, "attention": 32}
# On the way (partita.distributed.blocks): 3 of keys, 3 of gradients, the gradients just made of keys and of
# rows; a part has 1 MB, or a sixteenth of a block. And small things.
PARTS, SMALL_MB = 9, 2.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc, which only Linux has"),
]


@pytest.fixture(scope="module", params=[2, 4, 8])
def fresh(request: pytest.FixtureRequest) -> Iterator[World]:
    """Processes in which freed memory goes back at once: what is measured is what is in use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        world = World(request.param, start="spawn")
    yield world
    world.close()


@pytest.mark.parametrize("probe", PROBES)
def test_memory_of_a_rank_falls_with_the_number_of_ranks(fresh: World, probe: str) -> None:
    found = max(fresh.run("memory", "peak", probe=probe)) / MB
    part = max(1.0, TRAVELLING_MB[probe] / fresh.size / 16) if probe in TRAVELLING_MB else 0.0
    limit = RESULTS_MB[probe] / fresh.size + PARTS * part + SMALL_MB
    print(f"{probe}, {fresh.size} ranks: {found:.1f} MB, at most {limit:.1f}")
    assert found < limit, f"{found:.1f} MB, more than {limit:.1f}"
