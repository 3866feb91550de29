"""Every public name has a row, and every row compiles into one graph: its values, its gradients, at other sizes."""

from __future__ import annotations

import pytest
import torch

from tests.compile import table
from tests.compile.calls import compare
from tests.compile.rows import CALLS, CHANCE, NO_CALL, SHOWN_BY, public_names, rows_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it imports its compiler

# One of each kind with dynamic sizes, one by inductor; the slow tests do all of it.
SAMPLE = (
    "Gibbs.stats", "Gibbs.top", "Gibbs.sample", "solve_scale, grouped", "support.joined", "support.blocks",
    "scale.ScalableSoftmax", "attention, ALiBi", "hierarchical_attention", "linear_cross_entropy, tokens",
    "supcon_loss",
)  # fmt: skip
# Of every public name the first row, but for those above, which are compared at these sizes as well.
FIRST = {rows_of(name)[0] for name in public_names() if name not in NO_CALL} - {*SAMPLE}
# Traced another way where nothing needs a gradient: by a function of torch.autograd, or by an operator of their own.
QUIET = ("Gibbs.received", "divergence", "attention", "linear_distillation_loss")
INDUCTOR = ("linear_cross_entropy, tokens",)


def _slow_but(kept):
    return [title if title in kept else pytest.param(title, marks=pytest.mark.slow) for title in CALLS]


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory):
    """Inductor's files in a folder of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_has_a_row(name):
    if name in NO_CALL:
        assert not rows_of(name), f"{name} has a row now: take it out of NO_CALL"
    else:
        assert rows_of(name), f"{name} has no row in tests/compile/rows.py"


def test_the_lists_name_what_there_is():
    assert set(NO_CALL) | set(SHOWN_BY) <= set(public_names())
    assert set(SHOWN_BY.values()) | CHANCE | {*SAMPLE, *QUIET, *INDUCTOR} <= set(CALLS)


@pytest.mark.parametrize("title", _slow_but(FIRST))
def test_one_graph_of_fixed_sizes(title):
    compare(CALLS[title], "aot_eager", False, chance=title in CHANCE)


@pytest.mark.parametrize("title", _slow_but(QUIET))
def test_one_graph_without_gradients(title):
    with torch.no_grad():
        compare(CALLS[title], "eager", False, chance=title in CHANCE)


@pytest.mark.parametrize("title", _slow_but(SAMPLE))
def test_one_graph_serves_two_sizes(title):
    compare(CALLS[title], "aot_eager", True, chance=title in CHANCE)


@pytest.mark.parametrize("title", INDUCTOR)
def test_inductor_compiles_a_sample(title):
    compare(CALLS[title], "inductor", True, chance=title in CHANCE)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("title", CALLS)
def test_inductor_compiles_everything(title, dynamic):
    compare(CALLS[title], "inductor", dynamic, chance=title in CHANCE)


def test_the_page_shows_the_table():
    """What is committed: a row for each call, in this order, and nothing in it that refuses."""
    cells = table.load()
    assert set(cells) <= set(CALLS)
    assert table.render(cells) in table.PAGE.read_text()
    for title in CALLS:
        for way, said in cells.get(title, {}).items():
            assert said in ("works", "forward"), f"{title}, {way}: {said}"
