"""The simplex, the softmax Jacobian, Fisher metric, curvature of losses, smooth maxima."""

from __future__ import annotations

from partita_theory._domain import public
from partita_theory.geometry import losses, simplex
from partita_theory.geometry.losses import *
from partita_theory.geometry.simplex import *
from partita_theory.information.shannon import kl as kl
from partita_theory.law import softmax_jacobian as softmax_jacobian
from partita_theory.law import softmax_vjp as softmax_vjp

__all__ = [
    *public(vars(losses), "cross_entropy_hessian_logits"),
    *public(vars(simplex), "fisher_logits", "kl", "softmax_jacobian", "softmax_vjp"),
]
