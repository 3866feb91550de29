"""The public names with their exact signatures; importing costs little more than torch and says nothing."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import partita

# The contract, as Python reads it: what is added later is keyword-only or has a default.
CONTRACT = """
Gibbs(query, key, *, scale=None, bias=None, support=None, softcap=None)
attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
          support=None, bias=None, softcap=None, sink=None, return_stats=False)
linear_cross_entropy(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean",
          ignore_index=-100, label_smoothing=0.0, scale=1.0, softcap=None, z_loss=0.0, entropy_weight=0.0,
          sample_weight=None, return_stats=False)
info_nce_loss(query, positive_key, negative_keys=None, *, temperature=0.07, reduction="mean",
          negative_mode="unpaired", normalize=True, symmetric=False, return_stats=False, group=None)
clip_loss(image_features, text_features, logit_scale, logit_bias=None, *, return_stats=False, group=None)
nt_xent_loss(out0, out1, *, temperature=0.5)
supcon_loss(embeddings, labels, *, temperature=0.1, ref_emb=None, ref_labels=None)
divergence(p, q, kind="forward", *, beta=0.5)
watch(model, *, every=1, rows=None, layers=None)
control.QKClip(model, threshold=Any)
hf.logit_free(model)
nn.init_sharpness_(module, *, entropy=None, sigma=None)
solve_scale(query, key, *, entropy=None, width=None, support=None, bias=None)
support.causal(align="top-left")
support.window(left, right)
support.lengths(key_lengths)
support.segments(q_ids, k_ids=Any)
support.mask(keep)
support.strided(stride, window=0)
support.dilated(step, left, right)
support.blocks(block, layout)
support.global_tokens(positions)
support.not_self()
support.all()
scale.InverseSqrt()
scale.Constant(value)
scale.KappaLog(kappa=1.0)
scale.LogLength(reference=512, floor=4)
scale.SqrtLogLength(reference=512, floor=4)
scale.Mixed(alpha=1.0, beta=0.1)
scale.MaxLength(n_max, kappa=1.0)
scale.CalibratedLog(reference, sigma)
scale.GaussianEntropy(entropy, sigma)
scale.ScalableSoftmax(heads)
scale.TargetEntropy(entropy=None, width=None, fraction=None)
scale.measure_sigma(query, key, support=None)
scale.from_temperature(temperature)
Gibbs.log_partition(self)
Gibbs.entropy(self)
Gibbs.mean_score(self)
Gibbs.score_variance(self)
Gibbs.max_score(self)
Gibbs.visible(self)
Gibbs.effective_width(self)
Gibbs.expectation(self, value)
Gibbs.nll(self, target)
Gibbs.log_prob(self, target)
Gibbs.target_rank(self, target)
Gibbs.stats(self)
Gibbs.sample(self, generator=Any)
Gibbs.top(self, k)
Gibbs.gaps(self, edges)
Gibbs.received(self, weight=Any)
Gibbs.argmax(self)
Gibbs.probs(self)
Gibbs.state(self, value=Any)
"""
SIGNATURES = dict(re.findall(r"^([\w.]+)(\(.*?\))$", CONTRACT, re.MULTILINE | re.DOTALL))
# Names of the contract whose signatures it leaves open, or to torch.
NAMES = [
    *("cross_entropy", "focal_loss", "mse_loss", "nce_loss", "fit_temperature", "merge", "backend", "explain"),
    *(f"nn.{name}" for name in ("MultiheadAttention", "EntropyInvariantAttention", "LinearCrossEntropyLoss")),
    *(f"nn.{name}" for name in ("InfoNCELoss", "FocalLoss", "NCELoss")),
    *(f"monitor.Watch.{name}" for name in ("frame", "findings", "coverage", "save", "report")),
    *("control.QKClip.step", "control.QKClip.max_scores", "scale.Policy.fold"),
]


def find(name: str) -> object:
    thing: object = partita
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_the_contract(name):
    """Contract parameters come first, in order, with these defaults; additions are keyword-only or have defaults."""
    made: dict[str, Any] = {"Any": Any}
    exec(f"def call{SIGNATURES[name]}: ...", made)
    known = inspect.signature(made["call"]).parameters.values()
    parameters = inspect.signature(find(name)).parameters
    leading = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = [p.name for p in known if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in leading][: len(positional)] == positional
    for p in leading[len(positional) :]:
        assert p.default is not p.empty, f"{p.name} was added without a default"
    for p in known:
        found = parameters[p.name]
        assert p.default is Any or found.default == p.default or found.default is p.default, p.name
        assert p.kind is not p.KEYWORD_ONLY or found.kind is p.kind, p.name


@pytest.mark.parametrize("name", NAMES)
def test_other_names_of_the_contract_are_there(name):
    assert find(name) is not None


def test_statistics_are_the_contract():
    assert issubclass(partita.Stats, tuple)
    known = ("log_partition", "entropy", "mean_score", "score_variance", "max_score", "visible")
    assert partita.Stats._fields == known


def test_public_is_what_all_lists():
    assert sorted(set(partita.__all__)) == sorted(partita.__all__)
    for name in partita.__all__:
        assert hasattr(partita, name), name
    needed = {"Gibbs", "Stats", "State", "merge", "attention", "linear_cross_entropy", "info_nce_loss", "solve_scale"}
    assert needed | {"backend", "explain", "scale", "support"} <= set(partita.__all__)


ROOT = Path(__file__).parents[1]
LISTED = dict(
    line.split(maxsplit=1)
    for line in (ROOT / "tests" / "exports.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def exported() -> set[str]:
    """Every public name with its module: those of partita itself, and what its modules list."""
    found = {name for name in partita.__all__ if not inspect.ismodule(getattr(partita, name))}
    inner = [name for name in partita.__all__ if inspect.ismodule(getattr(partita, name))]
    inner += [f"adapters.{m.name}" for m in pkgutil.iter_modules(partita.adapters.__path__) if m.name[0] != "_"]
    for module in inner:
        found |= {f"{module}.{name}" for name in getattr(importlib.import_module(f"partita.{module}"), "__all__", ())}
    return found


def test_every_export_is_listed():
    """A name becomes public on purpose: with a line in tests/exports.txt that says where its values are checked."""
    new, gone = exported() - set(LISTED), set(LISTED) - exported()
    assert not new, f"not in tests/exports.txt: {sorted(new)}; add a line for each: the name and the test of its values"
    assert not gone, f"in tests/exports.txt, but no longer exported: {sorted(gone)}"


@pytest.mark.parametrize("name", LISTED)
def test_every_export_has_an_oracle(name):
    """The file that is named exists and speaks of the name; or a dash and a reason."""
    where = LISTED[name]
    if where.startswith("- "):
        assert len(where) > 5, f"{name}: say why there is no test of its values"
        return
    assert re.search(rf"\b{name.rsplit('.', 1)[-1]}\b", (ROOT / where).read_text()), f"{where} does not name {name}"


def modules() -> list[str]:
    """Every module, but the library, which is none, what needs packages that may not be here, and what has moved."""
    found = [m.name for m in pkgutil.walk_packages(partita.__path__, "partita.")]
    optional = ("partita.hf", "partita.adapters", "partita.engine.backends.triton.kernels")
    optional += ("partita.__main__", "partita.theory")
    return [name for name in found if not name.endswith(".libpartita_native") and not name.startswith(optional)]


@pytest.mark.parametrize("name", modules())
def test_what_a_module_lists_is_there(name):
    """`__all__` of every module holds names that exist, each once; a public package has one."""
    loaded = importlib.import_module(name)
    listed = getattr(loaded, "__all__", None)
    program = name == "partita.cli"
    if name.count(".") == 1 and not name.rsplit(".", 1)[-1].startswith("_") and not program:
        assert listed is not None, f"{name} has no __all__"
    for one in listed or ():
        assert hasattr(loaded, one), f"{name}.{one}"
    assert len(set(listed or ())) == len(listed or ())


def test_backend_is_a_getter_and_a_context_manager(monkeypatch):
    monkeypatch.delenv("PARTITA_BACKEND", raising=False)
    assert partita.backend() == "auto"
    with partita.backend("dense"):
        assert partita.backend() == "dense"
        with partita.backend("tiled"):
            assert partita.backend() == "tiled"
        assert partita.backend() == "dense"
    assert partita.backend() == "auto"
    monkeypatch.setenv("PARTITA_BACKEND", "tiled")
    assert partita.backend() == "tiled"


def test_explain_names_the_backend_that_serves():
    import torch

    gibbs = partita.Gibbs(torch.zeros(2, 3), torch.zeros(5, 3))
    with partita.backend("dense"):
        assert "dense" in str(partita.explain(gibbs))
    with partita.backend("tiled"):
        assert "tiled" in str(partita.explain(gibbs))


IMPORTED = """
import subprocess, sys, threading
before = set(sys.modules)
import torch, torch.nn.functional as F
torchs, threads = set(sys.modules) - before, threading.active_count()
spaces = [(space, {n: getattr(space, n) for n in dir(space)}) for space in (F, torch)]
state = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
def refuse(*a, **k): raise SystemExit('a process was started')
subprocess.Popen.__init__ = refuse
import partita
assert threading.active_count() == threads
assert all(getattr(space, n) is x for space, names in spaces for n, x in names.items())
assert torch.equal(state[0], torch.get_rng_state())
assert state[1:] == (torch.get_num_threads(), torch.get_default_dtype())
partita.Gibbs, partita.attention, partita.linear_cross_entropy, partita.info_nce_loss
more = set(sys.modules) - before - torchs
ours = {m for m in more if m.split('.')[0] == 'partita'}
assert more == ours, sorted(more - ours)  # nothing of other packages, nothing of torch that torch did not import
assert len(ours) < 0.1 * len(torchs), len(ours)
"""


def test_importing_loads_little_changes_nothing_and_says_nothing():
    """No process, thread, compiler or package of others, no output; a tenth of torch's own modules at most."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORTED], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


NAMES_OF_THEORY = ("sharpness", "information", "mutual_information_bound")


@pytest.mark.parametrize(
    "code",
    ["partita.theory", "from partita.theory import information", "from partita.theory.sharpness import bias_growth"]
    + [f"partita.theory.{name}" for name in NAMES_OF_THEORY],
)
def test_what_has_moved_is_named(code):
    """The mathematics is a package of its own; code that looks for it here gets the new name."""
    with pytest.raises(AttributeError) as caught:
        exec(code, {"partita": partita})
    for name in NAMES_OF_THEORY:
        assert f"partita_theory.{name}" in str(caught.value)
    assert "pip install partita-theory" in str(caught.value)
