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

import pytest

import partita
import partita_studies

PACKAGES = (partita, partita_studies)
E = inspect.Parameter.empty

# name -> (positional parameters with defaults, keyword-only parameters with defaults); E has no default
SIGNATURES = {
    "Gibbs": ({"query": E, "key": E}, {"scale": None, "bias": None, "support": None, "softcap": None}),
    "attention": (
        {
            "query": E,
            "key": E,
            "value": E,
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
        {"support": None, "bias": None, "softcap": None, "sink": None, "return_stats": False},
    ),
    "linear_cross_entropy": (
        {"input": E, "linear_weight": E, "target": E},
        {
            "linear_bias": None,
            "weight": None,
            "reduction": "mean",
            "ignore_index": -100,
            "label_smoothing": 0.0,
            "scale": 1.0,
            "softcap": None,
            "z_loss": 0.0,
            "entropy_weight": 0.0,
            "sample_weight": None,
            "return_stats": False,
        },
    ),
    "info_nce_loss": (
        {"query": E, "positive_key": E, "negative_keys": None},
        {
            "temperature": 0.07,
            "reduction": "mean",
            "negative_mode": "unpaired",
            "normalize": True,
            "symmetric": False,
            "return_stats": False,
            "group": None,
        },
    ),
    "clip_loss": (
        {"image_features": E, "text_features": E, "logit_scale": E, "logit_bias": None},
        {"return_stats": False, "group": None},
    ),
    "nt_xent_loss": ({"out0": E, "out1": E}, {"temperature": 0.5}),
    "supcon_loss": ({"embeddings": E, "labels": E}, {"temperature": 0.1, "ref_emb": None, "ref_labels": None}),
    "divergence": ({"p": E, "q": E, "kind": "forward"}, {"beta": 0.5}),
    "watch": ({"model": E}, {"every": 1, "rows": None, "layers": None}),
    "control.QKClip": ({"model": E, "threshold": E}, {}),
    "hf.logit_free": ({"model": E}, {}),
    "nn.init_sharpness_": ({"module": E}, {"entropy": None, "sigma": None}),
    "solve_scale": ({"query": E, "key": E}, {"entropy": None, "width": None, "support": None, "bias": None}),
    "support.causal": ({"align": "top-left"}, {}),
    "support.window": ({"left": E, "right": E}, {}),
    "support.lengths": ({"key_lengths": E}, {}),
    "support.segments": ({"q_ids": E, "k_ids": E}, {}),
    "support.mask": ({"keep": E}, {}),
    "support.strided": ({"stride": E, "window": 0}, {}),
    "support.dilated": ({"step": E, "left": E, "right": E}, {}),
    "support.blocks": ({"block": E, "layout": E}, {}),
    "support.global_tokens": ({"positions": E}, {}),
    "support.not_self": ({}, {}),
    "support.all": ({}, {}),
    "scale.InverseSqrt": ({}, {}),
    "scale.Constant": ({"value": E}, {}),
    "scale.KappaLog": ({"kappa": 1.0}, {}),
    "scale.LogLength": ({"reference": 512, "floor": 4}, {}),
    "scale.SqrtLogLength": ({"reference": 512, "floor": 4}, {}),
    "scale.Mixed": ({"alpha": 1.0, "beta": 0.1}, {}),
    "scale.MaxLength": ({"n_max": E, "kappa": 1.0}, {}),
    "scale.CalibratedLog": ({"reference": E, "sigma": E}, {}),
    "scale.GaussianEntropy": ({"entropy": E, "sigma": E}, {}),
    "scale.ScalableSoftmax": ({"heads": E}, {}),
    "scale.TargetEntropy": ({"entropy": None, "width": None, "fraction": None}, {}),
    "scale.measure_sigma": ({"query": E, "key": E, "support": None}, {}),
    "scale.from_temperature": ({"temperature": E}, {}),
}
# Names whose required parameter may have a default as well.
RELAXED = {("support.segments", "k_ids"), ("control.QKClip", "threshold")}

GIBBS_METHODS = {
    "log_partition": (),
    "entropy": (),
    "mean_score": (),
    "score_variance": (),
    "max_score": (),
    "visible": (),
    "effective_width": (),
    "expectation": ("value",),
    "nll": ("target",),
    "log_prob": ("target",),
    "target_rank": ("target",),
    "stats": (),
    "sample": ("generator",),
    "top": ("k",),
    "gaps": ("edges",),
    "received": ("weight",),
    "min_score": (),
    "argmax": (),
    "argmin": (),
    "probs": (),
    "state": ("value",),
}
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
    positional, keyword = SIGNATURES[name]
    parameters = inspect.signature(find(name)).parameters
    leading = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert [p.name for p in leading][: len(positional)] == list(positional)
    for p in leading[len(positional) :]:
        assert p.default is not E, f"{p.name} was added without a default"
    for given, default in {**positional, **keyword}.items():
        if (name, given) not in RELAXED:
            assert parameters[given].default == default or parameters[given].default is default, given
    for given in keyword:
        assert parameters[given].kind == inspect.Parameter.KEYWORD_ONLY, given


@pytest.mark.parametrize("name", GIBBS_METHODS)
def test_methods_of_gibbs_are_the_contract(name):
    parameters = list(inspect.signature(getattr(partita.Gibbs, name)).parameters)
    assert tuple(parameters[1 : 1 + len(GIBBS_METHODS[name])]) == GIBBS_METHODS[name]


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
# Statements have a page and tests of their own: docs/statements.md.
ELSEWHERE = {"theory"}


def exported() -> set[str]:
    """Every public name with its module: those of partita itself, and what its modules list."""
    found = {name for name in partita.__all__ if not inspect.ismodule(getattr(partita, name))}
    inner = [name for name in partita.__all__ if inspect.ismodule(getattr(partita, name)) and name not in ELSEWHERE]
    inner += [f"adapters.{m.name}" for m in pkgutil.iter_modules(partita.adapters.__path__)]
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
    """Every module of both packages, but the library, which is none, and what needs packages that may not be here."""
    found = [m.name for package in PACKAGES for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    optional = ("partita.hf", "partita.adapters", "partita.__main__", "partita.engine.backends.triton.kernels")
    return [name for name in found if not name.endswith(".libpartita_native") and not name.startswith(optional)]


@pytest.mark.parametrize("name", modules())
def test_what_a_module_lists_is_there(name):
    """`__all__` of every module holds names that exist, each once; a public package has one."""
    loaded = importlib.import_module(name)
    listed = getattr(loaded, "__all__", None)
    program = name == "partita.lab" or name.startswith("partita_studies")
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


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=600
    )


def test_importing_says_nothing():
    done = run("import partita")
    assert done.stdout == ""
    assert done.stderr == ""


def test_importing_starts_nothing_and_compiles_nothing():
    """No process, no compiler, no dynamo beyond what torch itself imports, no thread."""
    done = run(
        "import sys, subprocess, threading, torch\n"
        "before = set(sys.modules); threads = threading.active_count()\n"
        "def refuse(*a, **k): raise SystemExit('a process was started')\n"
        "subprocess.Popen.__init__ = refuse\n"
        "import partita\n"
        "new = set(sys.modules) - before\n"
        "assert threading.active_count() == threads\n"
        "heavy = [m for m in new if m.split('.')[0] in ('numpy', 'scipy', 'matplotlib', 'transformers', 'triton')]\n"
        "assert not heavy, heavy\n"
        "assert not [m for m in new if m.startswith(('torch._dynamo', 'torch._inductor'))]\n"
    )
    assert done.stdout == ""


def test_importing_loads_little_more_than_torch():
    """First use of the faces included: nothing of other people's, and a tenth of torch's own modules at most."""
    code = (
        "import sys; before = set(sys.modules); import torch; torchs = set(sys.modules) - before; import partita\n"
        "partita.Gibbs, partita.attention, partita.linear_cross_entropy, partita.info_nce_loss\n"
        "more = set(sys.modules) - before - torchs; ours = {m for m in more if m.split('.')[0] == 'partita'}\n"
        "print(len(ours) / len(torchs), *sorted(more - ours))"
    )
    share, *foreign = run(code).stdout.split()
    assert not foreign
    assert float(share) < 0.1


def test_importing_patches_nothing():
    run(
        "import torch, torch.nn.functional as F\n"
        "before = {n: getattr(F, n) for n in dir(F)}, {n: getattr(torch, n) for n in dir(torch)}\n"
        "state = torch.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()\n"
        "import partita\n"
        "assert all(getattr(F, n) is x for n, x in before[0].items())\n"
        "assert all(getattr(torch, n) is x for n, x in before[1].items())\n"
        "assert torch.equal(state[0], torch.get_rng_state())\n"
        "assert state[1:] == (torch.get_num_threads(), torch.get_default_dtype())\n"
    )
