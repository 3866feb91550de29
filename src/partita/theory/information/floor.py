"""How low entropy can be when logits are confined to an interval: cosine scores, QK-norm, temperatures."""

from __future__ import annotations

import torch
from torch import Tensor

from partita.theory._domain import Number, above_zero, number, require, together

__all__ = ["entropy_floor", "entropy_floor_of_width", "floor_gap", "logit_width", "max_weight"]


def floor_gap(width: Number) -> Tensor:
    """The most information a row can use when its logits lie in an interval of this width, whatever n.

        D*(w) = a - 1 - log a,     a = w / (1 - exp(-w))

    So H >= log n - D*(w). w^2 / 8 for small w, w - 1 - log w for large. Cosine scores: w = 2 / temperature.
    Spec: M-INF-2.

    >>> round(floor_gap(2.0).item(), 6)  # cosine at temperature 1
    0.474475
    """
    w = number(width)
    require(w >= 0, f"width is a length, so width >= 0; got {w}.")
    a = torch.where(w > 0, w / -torch.expm1(-w.clamp(min=1e-300)), 1.0)
    # a - 1 - log a cancels for small w; its series is w^2/8 - w^4/576 (the next term is below 1e-12 at w = 1e-2).
    return torch.where(w < 1e-2, w**2 / 8 - w**4 / 576, a - 1 - a.log())


def entropy_floor_of_width(n: Number, width: Number) -> Tensor:
    """The least entropy of n logits in an interval of this width: k keys at the top, the others at the bottom.

        H_floor = min_k  log(k r + n - k) - w k r / (k r + n - k),     r = exp(w)

    The best k is one of the two integers around n (a - 1) / (r - 1), at least 1. n = 1 gives 0. Spec: M-INF-2.

    >>> round(entropy_floor_of_width(5, 2.0).item(), 6)
    1.135082
    """
    n, w = together(n, width)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    require(w >= 0, f"width is a length, so width >= 0; got {w}.")
    a = torch.where(w > 0, w / -torch.expm1(-w.clamp(min=1e-300)), 1.0)
    share = torch.where(w > 1e-6, (a - 1) / torch.expm1(w.clamp(min=1e-6)), 0.5)
    best = (n * share).floor()
    floors = [_two_level(n, w, (best + step).clamp(min=torch.ones_like(n), max=n)) for step in (0.0, 1.0)]
    return torch.minimum(floors[0], floors[1])


def entropy_floor(n: Number, temperature: Number) -> Tensor:
    """The least entropy of a softmax over n cosines at this temperature; close to log n - D*(2 / temperature).

        H_floor(n, w = 2 / temperature)

    Attainable in any dimension, by keys that are +query and -query. Only for bounded scores: Gaussian ones have 0.
    Spec: M-INF-2, M-INC-6.

    >>> round(entropy_floor(256, 1.0).item(), 4)  # log 256 - 0.4745
    5.0707
    >>> round(entropy_floor(256, 0.2).item(), 4)
    0.126
    """
    return entropy_floor_of_width(n, 2.0 / above_zero("temperature", temperature))


def max_weight(n: Number, width: Number) -> Tensor:
    """The most weight one of n keys can get when logits lie in an interval of this width.

        p_max = exp(w) / (exp(w) + n - 1)

    Normalised queries and keys of length sqrt(dim) with scale kappa log n / dim have w = 2 kappa log n: below
    kappa = 1/2 no key can dominate a long row. Spec: M-SCL-18.

    >>> round(max_weight(4096, torch.tensor(4096.0).log()).item(), 4)  # kappa = 1/2: n / (2n - 1)
    0.5001
    """
    n, w = number(n), number(width)
    require(n >= 1, f"n counts visible keys, so n >= 1; got {n}.")
    require(w >= 0, f"width is a length, so width >= 0; got {w}.")
    return 1.0 / (1.0 + (n - 1.0) * torch.exp(-w))


def logit_width(
    query: Tensor,  # (..., n_query, dim)
    key: Tensor,  # (..., n_key, dim)
    scale: Number = 1.0,
) -> Tensor:  # (..., n_query)
    """An interval that holds every logit of a row, from lengths alone (Cauchy-Schwarz), in O(n).

        w_i = 2 * scale_i * |query_i| * max_j |key_j|

    With it, `entropy_floor_of_width` bounds the entropy of a row before it is computed. Spec: M-INF-2, M-SCL-18.

    >>> logit_width(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]]), 0.5)  # 2 * 0.5 * 5 * 2
    tensor([10.])
    """
    length_q, length_k = _lengths(query), _lengths(key)
    return 2.0 * number(scale).abs().to(length_q.dtype) * length_q * length_k.amax(-1, keepdim=True)


def _lengths(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def _two_level(n: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """Entropy of k keys at logit w and n - k at 0. For k = n all are equal: log n."""
    # Relative to the top, so that large w neither overflows nor cancels: u = (n - k) / (k r).
    # A floor of 1e-9 must come out as 1e-9, hence log1p.
    u = (n - k) / k * torch.exp(-w)
    return k.log() + torch.log1p(u) + w * u / (1.0 + u)
