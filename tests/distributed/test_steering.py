"""QK-clip over two ranks: the maximum of both decides, and every rank's share of the weights shrinks."""

from __future__ import annotations

import pytest

from tests.distributed.world import Worlds


@pytest.mark.parametrize("way", ["ddp", "fully_shard", "fsdp-flat", "fsdp-original"])
def test_clipping_is_that_of_one_process_that_saw_all_rows(worlds: Worlds, way: str) -> None:
    worlds.of(2).run("steering", "clipping", way=way)
