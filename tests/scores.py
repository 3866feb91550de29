"""Random scores: a problem with all that may be in the place of its inner product and of its scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import partita
from tests import reference
from tests.rounding import Noise
from tests.strategies import Problem, both, lengths, problems

Operands = dict[str, Tensor]

SIZES = (0, 1, 1, 2, 3, 7, 13, 17)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def shortest(x: Tensor) -> float:
    """The least norm of a vector, whose inverse is the slope of the unit vector."""
    return min(1.0, float(x.norm(dim=-1).min())) if x.numel() else 1.0


@dataclass(frozen=True, eq=False)
class Scores:
    """A problem's scores with all that may be in the place of its product and of its scale."""

    p: Problem
    kind: str = "inner"
    policy: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} policy={self.policy} {self.p!r}"

    def operands(self, g: torch.Generator) -> Operands:
        p, dim = self.p, self.p.query.shape[-1]
        found: Operands = {"query": p.query, "key": p.key}
        if isinstance(p.scale, Tensor) and self.policy is None:
            found["scale"] = p.scale
        if p.bias is not None:
            found["bias"] = p.bias
        if self.policy == "ScalableSoftmax":
            found["parameter s"] = 0.5 + torch.rand(p.batch[-1], generator=g, dtype=torch.float64)
        if self.kind == "bilinear":
            found["parameter form"] = normal(g, dim, dim)
        if self.kind == "additive":
            shapes = {"own": (4, dim), "other": (4, dim), "shift": (4,), "weight": (4,)}
            found |= {f"parameter {name}": normal(g, *shape) for name, shape in shapes.items()}
        return found

    def options(self, o: Operands) -> dict[str, object]:
        """Scale, bias, support, softcap and score, as both faces take them."""
        p = self.p
        found: dict[str, object] = {"scale": p.scale if self.policy is None else self._policy(o)}
        if "scale" in o:
            found["scale"] = o["scale"]
        found |= {"bias": o.get("bias"), "support": p.support, "softcap": p.softcap}
        return found if self.kind == "inner" else {**found, "score": self._score(o)}

    def gibbs(self, o: Operands) -> partita.Gibbs:
        return partita.Gibbs(o["query"], o["key"], grouped=self.p.groups > 1, **self.options(o))

    def exact(self, o: Operands, noise: Noise) -> Tensor:  # (*batch, n_query, n_key)
        """The scores in float64, each off by what rounding may do to it."""
        p = self.p
        key = p.spread(o["key"])
        scale = o.get("scale", p.scale) if self.policy is None else self.multiplier(o)
        own = replace(p, query=o["query"], key=key, groups=1, scale=scale, bias=o.get("bias"))
        s = reference.score(
            own.query, own.key, scale=scale, bias=own.bias, softcap=p.softcap, visible=p.visible,
            compare=lambda q, k: self._compare(o, q, k, noise),
        )  # fmt: skip
        s = noise.flowing_back(s.expand(*p.batch, p.n_query, p.n_key))
        return s if noise.unit == 0 else noise(s, self.size(own, s))

    def size(self, p: Problem, s: Tensor) -> Tensor:
        """What the rounding of a score is proportional to: the sizes of all that is added up in it."""
        with torch.no_grad():
            dim, q, k = p.query.shape[-1], p.query.abs(), p.key.abs()
            product = q @ k.mT * (dim + 4)
            if self.kind in ("squared", "distance"):
                product = ((q**2).sum(-1)[..., :, None] + (k**2).sum(-1)[..., None, :]) * (dim + 4)
            elif self.kind in ("bilinear", "additive"):
                product = 1 + q.sum(-1)[..., :, None] * k.sum(-1)[..., None, :] * 8 * dim
            factor = p.scale[..., None] if isinstance(p.scale, Tensor) and p.scale.ndim else p.scale
            size = torch.as_tensor(factor).abs() * product
            bias = 0.0 if p.bias is None else torch.where(p.bias.isfinite(), p.bias, 0.0).abs()
            return torch.where(s.isfinite(), size + bias, 0.0)

    def steep(self, o: Operands) -> float:
        with torch.no_grad():
            q, k = o["query"], self.p.spread(o["key"])
            scale = torch.as_tensor(self.p.scale if self.policy is None else self.multiplier(o))
            big = max(largest(q.abs()), largest(k.abs())) * (1 if self.kind in ("inner", "squared") else 8)
            if self.kind == "cosine":
                big = 1 / min(shortest(q), shortest(k))
            return max(1.0, largest(scale.abs()) * big, largest(self._compare(o, q, k).abs()))

    def spread(self, o: Operands) -> float:
        with torch.no_grad():
            s = self.exact(o, Noise(0.0))
            finite = s[s.isfinite()]
            return max(1.0, largest(finite) - float(finite.min())) if finite.numel() else 1.0

    def seen(self) -> Tensor:
        p = self.p
        shown = torch.ones(*p.batch, p.n_query, p.n_key, dtype=torch.bool)
        shown = shown if p.visible is None else shown & p.visible
        return shown if p.bias is None else shown & ~p.bias.isneginf()

    def _compare(self, o: Operands, q: Tensor, k: Tensor, noise: Noise | None = None) -> Tensor:
        if self.kind == "squared" and noise is not None and noise.unit == 0:
            # <q, k> and three features for the digits of each square: parts, which cancel where vectors are near
            x, *squares = (noise.part(o, "query", "key") for _ in range(4))
            s = reference.inner(x["query"], self.p.spread(x["key"]))
            for y in squares:
                size = [(v**2).sum(-1) / 6 for v in (y["query"], self.p.spread(y["key"]))]
                s = s - size[0][..., :, None] - size[1][..., None, :]
            return s
        own = [o[name] for name in o if name.startswith("parameter") and name != "parameter s"]
        kinds = {"squared": "squared_distance"}
        function: Callable[..., Tensor] = getattr(reference, kinds.get(self.kind, self.kind))
        return function(q, k, *own)

    def _score(self, o: Operands) -> object:
        dim = self.p.query.shape[-1]
        if self.kind == "bilinear":
            form = partita.score.Bilinear(dim, dim)
            form.weight = o["parameter form"]
            return form
        if self.kind == "additive":
            score = partita.score.Additive(dim, dim, hidden=4)
            score.query_proj.weight, score.query_proj.bias = o["parameter own"], o["parameter shift"]
            score.key_proj.weight, score.weight = o["parameter other"], o["parameter weight"]
            return score
        kinds = {"cosine": "Cosine", "squared": "SquaredDistance", "distance": "Distance"}
        return getattr(partita.score, kinds[self.kind])()

    def _policy(self, o: Operands) -> object:
        assert self.policy is not None
        if self.policy == "ScalableSoftmax":
            policy = partita.scale.ScalableSoftmax(self.p.batch[-1])
            policy.s = o["parameter s"]
            return policy
        return getattr(partita.scale, self.policy)(*POLICIES[self.policy][1])

    def multiplier(self, o: Operands) -> Tensor:
        assert self.policy is not None
        n, d = self.seen().sum(-1), self.p.query.shape[-1]
        name, given = POLICIES[self.policy]
        given = (o["parameter s"],) if self.policy == "ScalableSoftmax" else given
        return getattr(reference, name)(n, d, *given)


POLICIES: dict[str, tuple[str, tuple[float, ...]]] = {
    "InverseSqrt": ("inverse_sqrt", ()), "KappaLog": ("kappa_log", (1.5,)), "LogLength": ("log_length", (16,)),
    "SqrtLogLength": ("sqrt_log_length", (16,)), "Mixed": ("mixed", (0.5, 0.7)), "MaxLength": ("max_length", (99,)),
    "CalibratedLog": ("calibrated_log", (16, 1.5)), "GaussianEntropy": ("gaussian_entropy", (1.0, 1.5)),
    "ScalableSoftmax": ("scalable_softmax", ()),
}  # fmt: skip
KINDS = ("inner", "inner", "inner", "cosine", "squared", "distance", "bilinear", "additive")


@st.composite
def scores(draw: st.DrawFn, *, plain: bool = False) -> Scores:
    """A problem with any score and any policy; the support at times hides the last keys from all rows."""
    p = draw(problems(sizes=SIZES, with_groups=True, furthest=257))
    if draw(st.integers(0, 3)) == 0:  # padding, which may hold anything
        hide = lengths(p.n_query, p.n_key, max(0, p.n_key - draw(st.integers(1, 3))))
        joined = hide if p.support is None else both((p.support, p.visible), hide)
        p = replace(p, support=joined[0], visible=joined[1])
    kind = "inner" if plain or p.softcap is not None else draw(st.sampled_from(KINDS))
    names = [name for name in POLICIES if name != "ScalableSoftmax" or len(p.batch) > 1]
    policy = draw(st.sampled_from(names)) if not plain and draw(st.integers(0, 3)) == 0 else None
    return Scores(p, kind, policy)
