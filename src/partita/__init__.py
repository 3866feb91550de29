"""partita: one partition function, three faces.

    p(j|i) = exp(scale_i * <query_i, key_j> + bias_ij) / Z_i        j in the support of i

Names are loaded when first used, so that importing partita costs nothing and the command line answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from partita._later import load

if TYPE_CHECKING:
    from partita import adapters as adapters
    from partita import attn as attn
    from partita import contrastive as contrastive
    from partita import control as control
    from partita import distributed as distributed
    from partita import engine as engine
    from partita import errors as errors
    from partita import hf as hf
    from partita import losses as losses
    from partita import metrics as metrics
    from partita import monitor as monitor
    from partita import nn as nn
    from partita import scale as scale
    from partita import score as score
    from partita import support as support
    from partita._checks import validate as validate
    from partita._signatures import attention as attention
    from partita._signatures import clip_loss as clip_loss
    from partita._signatures import cross_entropy as cross_entropy
    from partita._signatures import info_nce_loss as info_nce_loss
    from partita._signatures import linear_cross_entropy as linear_cross_entropy
    from partita._signatures import nt_xent_loss as nt_xent_loss
    from partita._signatures import solve_scale as solve_scale
    from partita._signatures import supcon_loss as supcon_loss
    from partita.attn import attention_divergence as attention_divergence
    from partita.calibration import fit_temperature as fit_temperature
    from partita.comparison import divergence as divergence
    from partita.contrastive import ContrastStats as ContrastStats
    from partita.contrastive import joint_loss as joint_loss
    from partita.contrastive import siglip_loss as siglip_loss
    from partita.engine import State as State
    from partita.engine import Stats as Stats
    from partita.engine import backend as backend
    from partita.engine import merge as merge
    from partita.engine.backends import backends as backends
    from partita.exactness import exact_rows as exact_rows
    from partita.gibbs import Gibbs as Gibbs
    from partita.gibbs import explain as explain
    from partita.interception import replace_sdpa as replace_sdpa
    from partita.losses import ClassStats as ClassStats
    from partita.losses import LossStats as LossStats
    from partita.losses import brier_loss as brier_loss
    from partita.losses import distillation_loss as distillation_loss
    from partita.losses import focal_loss as focal_loss
    from partita.losses import gaussian_nll_loss as gaussian_nll_loss
    from partita.losses import laplace_nll_loss as laplace_nll_loss
    from partita.losses import linear_distillation_loss as linear_distillation_loss
    from partita.losses import mae_loss as mae_loss
    from partita.losses import mse_loss as mse_loss
    from partita.losses import nce_loss as nce_loss
    from partita.losses import token_divergence as token_divergence
    from partita.losses import token_stats as token_stats
    from partita.metrics import mutual_information_bound as mutual_information_bound
    from partita.monitor import load_record as load_record
    from partita.monitor import watch as watch

__version__ = "0.1.0"

_HOME = {
    name: module
    for module, names in {
        "_checks": ("validate",),
        "attn": ("attention", "attention_divergence"),
        "calibration": ("fit_temperature",),
        "comparison": ("divergence",),
        "contrastive": (
            "ContrastStats", "clip_loss", "info_nce_loss", "joint_loss", "nt_xent_loss", "siglip_loss",
            "supcon_loss",
        ),
        "engine": ("State", "Stats", "backend", "merge"),
        "engine.backends": ("backends",),
        "exactness": ("exact_rows",),
        "gibbs": ("Gibbs", "explain"),
        "interception": ("replace_sdpa",),
        "losses": (
            "ClassStats", "LossStats", "brier_loss", "cross_entropy", "distillation_loss", "focal_loss",
            "gaussian_nll_loss", "laplace_nll_loss", "linear_cross_entropy", "linear_distillation_loss", "mae_loss",
            "mse_loss", "nce_loss", "token_divergence", "token_stats",
        ),
        "metrics": ("mutual_information_bound",),
        "monitor": ("load_record", "watch"),
        "solve": ("solve_scale",),
    }.items()
    for name in names
}  # fmt: skip
_MODULES = (
    "adapters", "attn", "contrastive", "control", "distributed", "engine", "errors", "hf", "losses", "metrics",
    "monitor", "nn", "scale", "score", "support",
)  # fmt: skip
__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> Any:
    return load(__name__, name, _HOME)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])


# The operators that compiled and exported graphs hold: registered with the package, where torch is imported already. A
# command line that needs no torch does not wait for it.
if "torch" in sys.modules:
    importlib.import_module(f"{__name__}.calibration")
