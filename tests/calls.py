"""Random calls: what is read of a random problem, by the package and by the definition, with its options and dtype.

A call has operands by name, and two functions of them that give results by name: `ours` through the package, `truth`
through tests/reference.py in float64. tests/conformance/test_random_calls.py compares results, first and second
derivatives. Supports, sizes, scales and biases are those of tests/strategies.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

import partita
from tests import reference
from tests.rounding import Noise
from tests.scores import Operands, Scores, largest, normal, scores, shortest
from tests.strategies import INF, Problem, both

Results = dict[str, Tensor]
Counts = dict[str, tuple[Tensor, Tensor, Tensor]]  # what was counted, and the least and the most that rounding allows

SMOOTH = frozenset((  # what has derivatives
    "log_partition", "entropy", "mean_score", "score_variance", "effective_width", "nll", "expectation", "received",
    "probs", "top", "out", "loss", "divergence", "scale",
))  # fmt: skip
POISONED = frozenset(
    ("log_partition", "entropy", "mean_score", "score_variance", "effective_width", "expectation", "out")
)
DTYPES = {
    "float64": (torch.float64, None), "float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None),
    "float16": (torch.float16, None), "autocast": (torch.float32, torch.bfloat16),
}  # fmt: skip
INNER = {"query", "key", "value", "input", "weights"}  # what a product takes: these are lowered under autocast


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One random call; what it is made of stands in `note`."""

    face: str
    operands: Operands
    ours: Callable[[Operands], Results]
    truth: Callable[[Operands, Noise], Results]
    counts: Callable[[Operands, float], Counts] | None = None  # of the package, with the unit of rounding
    note: str = ""
    precision: str = "float64"
    order: int = 0
    frozen: frozenset[str] = frozenset()
    spoiled: dict[str, Tensor] = field(default_factory=dict)  # where an operand, which no row sees there, is nan or inf
    coarse: bool | str = False  # features rounded to the dtype of the operands; "autocast": only some of them lowered
    steep: float = 1.0  # how far a score moves with an operand: what a derivative is multiplied by
    varies: bool = False  # a variance is read, which is made of squares of
    spread: float = 1.0  # how far the scores are from each other
    rows: int = 1  # over which a loss, or the gradient of a key, adds up
    poisoned: Tensor | None = None  # the rows that see a key of nan
    lowered: frozenset[str] = frozenset(INNER)
    seed: int = 0

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={tuple(x.shape)}" for name, x in self.operands.items())
        frozen = f" frozen={sorted(self.frozen)}" if self.frozen else ""
        spoiled = f" spoiled={[*self.spoiled]}" if self.spoiled else ""
        spoiled += "" if self.poisoned is None else f" poisoned={int(self.poisoned.sum())}"
        return f"{self.face}({sizes}) {self.note} {self.precision} order={self.order}{frozen}{spoiled} seed={self.seed}"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:  # hypothesis asks for this one
        printer.text(repr(self))  # type: ignore[attr-defined]


def nowhere_seen(s: Scores, like: Tensor) -> Tensor:
    """Which keys no row sees: those of `like`, whose batch may broadcast or hold a head for several."""
    seen = s.seen().any(-2)
    if s.p.groups > 1:
        seen = seen.unflatten(-2, (-1, s.p.groups)).any(-2)
    return seen.double().sum_to_size(like.shape[:-1]) == 0


@st.composite
def finished(draw: st.DrawFn, call: Call, scores: Scores | None = None) -> Call:
    """The same in a dtype, differentiated this many times, with operands that are frozen and keys that are broken."""
    seed = draw(st.integers(0, 2**20))
    precision = draw(st.sampled_from(["float64"] * 5 + ["float32"] * 2 + ["bfloat16", "float16", "autocast"]))
    if scores is not None and scores.kind == "additive" and precision == "autocast":
        precision = "float64"
    order = draw(st.sampled_from((0, 1, 1, 2) if precision in ("float64", "float32", "autocast") else (0, 1)))
    frozen = frozenset(name for name in call.operands if draw(st.integers(0, 5)) == 0) if order else frozenset()
    spoiled, bad = {}, draw(st.sampled_from((None, math.nan, math.inf, -math.inf)))
    if scores is not None and bad is not None:
        for name in ("key", "value"):
            if name in call.operands and draw(st.booleans()):
                x = call.operands[name]
                spoiled[name] = torch.where(nowhere_seen(scores, x)[..., None].expand(x.shape), bad, 0.0)
    coarse, lowered = call.coarse, call.lowered
    steep, spread, rows, poisoned = call.steep, call.spread, call.rows, None
    if scores is not None:
        steep, spread = scores.steep(call.operands), scores.spread(call.operands) if call.varies else 1.0
        rows = scores.p.target.numel()
        if call.face in ("Gibbs", "attention") and scores.p.n_key and draw(st.integers(0, 9)) == 0:
            order, frozen = 0, frozenset()
            chosen = draw(st.integers(0, scores.p.n_key - 1))
            poisoned = scores.seen()[..., chosen]
            key = call.operands["key"]
            place = (torch.arange(scores.p.n_key) == chosen)[:, None].expand(key.shape)
            spoiled["key"] = torch.where(place, math.nan, spoiled.get("key", torch.zeros_like(key)))
        if scores.kind in ("cosine", "bilinear", "additive"):
            coarse, lowered = True, lowered - {"query", "key"}
    return replace(
        call, precision=precision, order=order, frozen=frozen, spoiled=spoiled, coarse=coarse, lowered=lowered,
        steep=steep, spread=spread, rows=rows, poisoned=poisoned, seed=seed,
    )  # fmt: skip


# The faces -----------------------------------------------------------------------------------------------------------

ROWS = ("log_partition", "entropy", "mean_score", "score_variance", "effective_width", "max_score")
READS = (*ROWS, "visible", "nll", "expectation", "received", "probs", "top")


@st.composite
def reads(draw: st.DrawFn) -> Call:
    """Some reads of one Gibbs, in any order, and what it counts."""
    s = draw(scores())
    p, g = s.p, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    possible = [name for name in READS if p.n_key or name != "nll"]
    if s.policy is None and bool((torch.as_tensor(p.scale) == 0).any()):
        possible.remove("top")  # all scores tie, and which keys are named is not said: a slope goes to any of them
    names = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=4, unique=True))
    k = draw(st.sampled_from((0, 1, 3, 20)))
    weighted = draw(st.booleans())
    # the best keys change places under rounding where two scores tie, and a slope then jumps
    operands = s.operands(g) | {"value": p.value, "weight": normal(g, *p.batch, p.n_query)}

    def ours(o: Operands) -> Results:
        gibbs, found = s.gibbs(o), {}
        for name in names:
            given: tuple[object, ...] = ()
            if name in ("nll", "expectation"):
                given = (p.target if name == "nll" else o["value"],)
            elif name == "received":
                given = (o["weight"] if weighted else None,)
            elif name == "top":
                given = (k,)
            found[name] = getattr(gibbs, name)(*given)
        return {name: x[0] if name == "top" else x for name, x in found.items()}

    def truth(o: Operands, noise: Noise) -> Results:
        scores, found = s.exact(o, noise), {}
        for name in names:
            exact = noise.flowing_back(scores)  # each has a gradient of its own
            if name == "nll":
                found[name] = reference.nll(exact, p.target)
            elif name == "expectation":
                found[name] = reference.expectation(exact, p.spread(o["value"]))
            elif name == "received":
                # a pass over columns makes the scores anew, and rounds them otherwise than those of the normaliser
                anew = noise(torch.ones_like(exact), s.size(replace(p, **dense(s, o)), exact))
                column = reference.received(exact, o["weight"] if weighted else None, anew)
                found[name] = per_key_head(column, p)
            elif name == "top":
                found[name] = reference.top(exact, k)[0]
            else:
                found[name] = statistic(name, exact, noise)
        return found

    def counts(o: Operands, unit: float) -> Counts:
        exact = s.exact({name: x.double() for name, x in o.items()}, Noise(0.0))
        room = 4 * unit * largest(s.size(replace(p, **dense(s, o)), exact))
        gibbs, found = s.gibbs(o), {}
        if p.n_key:
            aim = reference.target_score(exact, p.target)[..., None]
            found["target_rank"] = gibbs.target_rank(p.target), *between(exact, aim + room, aim - room)
        edges = torch.tensor([0.0, 0.5, 2.0, INF], dtype=torch.float64)
        ends = (reference.gaps(exact, edges + x) for x in (-2 * room, 2 * room))
        low, high = ends
        found["gaps"] = gibbs.gaps(edges), torch.maximum(low, reference.visible(exact).clamp(max=1)[..., None]), high
        best, index = reference.max_score(exact), gibbs.argmax()
        found["argmax"] = hits(exact, index, best, room)
        top = gibbs.top(2)[1]
        want = reference.top(exact, 2)[0]
        for i in range(2):
            found[f"top {i}"] = hits(exact, top[..., i], want[..., i], room)
        return found

    note = f"{[*names]} k={k} weighted={weighted} {s}"
    return draw(finished(Call("Gibbs", operands, ours, truth, counts, note, varies="score_variance" in names), s))


def statistic(name: str, s: Tensor, noise: Noise) -> Tensor:
    """One of the rows'; a variance whose parts are rounded has those of the sums it comes from: E[c^2] - E[c]^2."""
    if name != "score_variance" or not noise.back:
        return getattr(reference, name)(s)
    p, top = reference.probs(s), reference.max_score(s.detach())[..., None]
    c = torch.where(reference.seen(s), s - top, 0.0)
    return (p * c * c).sum(-1) - (p * c).sum(-1) ** 2


def dense(s: Scores, o: Operands) -> dict[str, object]:
    """The problem's operands as they are given, keys spread over heads."""
    scale = s.multiplier({k: x.double() for k, x in o.items()}) if s.policy else s.p.scale
    return {"query": o["query"].double(), "key": s.p.spread(o["key"].double()), "groups": 1, "scale": scale}


def between(s: Tensor, high: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """How many scores are above, at the least and at the most."""
    return (s > high).sum(-1), (s > low).sum(-1)


def hits(s: Tensor, index: Tensor, level: Tensor, room: float) -> tuple[Tensor, Tensor, Tensor]:
    """Whether a key that is named has this score, to rounding; -1 where there is none."""
    none = level.isinf()
    if not s.shape[-1]:
        return index, torch.full_like(index, -1), torch.full_like(index, -1)
    score = s.gather(-1, index.clamp(min=0)[..., None])[..., 0]
    near = (torch.where(none, 0.0, score) - torch.where(none, 0.0, level)).abs() <= 2 * room
    wrong = torch.where(none, index != -1, ~near | (index < 0)).long()
    return wrong, torch.zeros_like(wrong), torch.zeros_like(wrong)


def per_key_head(column: Tensor, p: Problem) -> Tensor:
    return column.unflatten(-2, (-1, p.groups)).sum(-2) if p.groups > 1 else column


@st.composite
def attentions(draw: st.DrawFn) -> Call:
    """Attention with its masks, its sink and its statistics."""
    s = draw(scores())
    p, g = s.p, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    causal = draw(st.integers(0, 3)) == 0
    as_mask = draw(st.sampled_from((None, "bool", "bias")))
    usual = s.policy is None and s.kind == "inner" and draw(st.booleans())  # 1 / sqrt(dim)
    with_stats = draw(st.booleans())
    shown = p.visible
    keep = None
    if as_mask == "bool":
        keep = torch.rand(*draw(st.sampled_from([p.batch, ()])), p.n_query, p.n_key, generator=g) < 0.7
        shown = keep if shown is None else shown & keep
    if causal:
        i, j = torch.arange(p.n_query)[:, None], torch.arange(p.n_key)
        shown = j <= i if shown is None else shown & (j <= i)
    if usual:
        p = replace(p, scale=max(p.query.shape[-1], 1) ** -0.5)
    given, s = p, replace(s, p=replace(p, visible=shown))
    shapes = [(), (*p.batch, p.n_query), (p.n_query,)] + ([(p.batch[-1], 1), (p.batch[-1],)] if p.batch else [])
    shape = draw(st.one_of(st.none(), st.sampled_from(shapes)))
    operands = s.operands(g) | {"value": p.value}
    if shape is not None:
        per_head = len(shape) == 1 and bool(p.batch) and shape[0] == p.batch[-1]
        sink = normal(g, *shape)
        broken = draw(st.sampled_from((0.0, 0.3, 1.0)))
        operands["sink"] = sink.masked_fill(torch.rand(shape, generator=g) < broken, -INF)

    def ours(o: Operands) -> Results:
        options = replace(s, p=given).options(o)
        if usual:
            options["scale"] = None
        mask = keep
        if as_mask == "bias" and "bias" in o:
            mask, options["bias"] = o["bias"], None
        out = partita.attention(
            o["query"], o["key"], o["value"], mask, 0.0, causal, enable_gqa=p.groups > 1, sink=o.get("sink"),
            return_stats=with_stats, **options,
        )  # fmt: skip
        parts = list(out) if isinstance(out, tuple) else [out]
        found = {"out": parts[0]}
        if with_stats:
            found |= {name: getattr(parts[1], name) for name in ("log_partition", "entropy", "visible")}
        return found

    def truth(o: Operands, noise: Noise) -> Results:
        exact = s.exact(o, noise)
        found = {"out": reference.expectation(exact, p.spread(o["value"]))}
        if "sink" in o:
            sink = o["sink"][:, None] if per_head else o["sink"]
            found["out"] = found["out"] * reference.kept_from(exact, sink)[..., None]
        if with_stats:
            found |= {name: getattr(reference, name)(exact) for name in ("log_partition", "entropy", "visible")}
        return found

    more = f"causal={causal} attn_mask={as_mask} usual={usual} stats={with_stats} "
    return draw(finished(Call("attention", operands, ours, truth, None, f"{more}{s}"), s))


@st.composite
def merges(draw: st.DrawFn) -> Call:
    """The states of parts of the keys, merged: what they say together."""
    s = draw(scores(plain=True))
    p, g = s.p, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    cuts = sorted(draw(st.lists(st.integers(0, p.n_key), max_size=2)))
    cuts = [0, *cuts, p.n_key]
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    order = draw(st.permutations(parts))
    names = ("log_partition", "entropy", "mean_score", "score_variance", "visible")

    def ours(o: Operands) -> Results:
        states = []
        for cut in order:
            options = s.options(o) | {"grouped": p.groups > 1}
            bias = o.get("bias")
            options["bias"] = bias if bias is None or bias.shape[-1] == 1 else bias[..., cut]
            if p.visible is not None:
                whole = p.visible.expand(*p.visible.shape[:-2], p.n_query, p.n_key)
                options["support"] = partita.support.mask(whole[..., cut])
            states.append(partita.Gibbs(o["query"], o["key"][..., cut, :], **options).state(o["value"][..., cut, :]))
        state = partita.merge(*states)
        return {name: getattr(state.stats(), name) for name in names} | {"expectation": state.expectation()}

    def truth(o: Operands, noise: Noise) -> Results:
        own = [noise.part(o) for _ in parts]  # each part of the keys has gradients of its own
        exact = torch.cat([s.exact(x, noise)[..., cut] for x, cut in zip(own, parts, strict=True)], -1)
        value = torch.cat([x["value"][..., cut, :] for x, cut in zip(own, parts, strict=True)], -2)
        found = {name: statistic(name, exact, noise) for name in names}
        return found | {"expectation": reference.expectation(exact, p.spread(value))}

    operands = s.operands(g) | {"value": p.value}
    return draw(finished(Call("merge", operands, ours, truth, None, f"{order} {s}", varies=True), s))


@st.composite
def divergences(draw: st.DrawFn) -> Call:
    """Two distributions over the same keys, row by row and summed, with a teacher that is learned or is not."""
    s = draw(scores(plain=True))
    p, g = s.p, torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    kind = draw(st.sampled_from(("forward", "reverse", "cross_entropy", "js", "hellinger")))
    beta = draw(st.sampled_from((0.1, 0.5, 0.7)))
    face = draw(st.sampled_from(("divergence", "divergence", "attention_divergence")))
    other_seen = face == "divergence" and p.n_key > 0 and draw(st.booleans())
    t = replace(p, query=normal(g, *p.query.shape[:-1], 4), key=normal(g, *p.key.shape[:-1], 4), bias=None, scale=0.6)
    if face == "attention_divergence":
        t = replace(t, scale=0.5, softcap=None)
        p = replace(p, scale=max(p.query.shape[-1], 1) ** -0.5, bias=None, softcap=None)
    elif other_seen:
        keep = torch.rand(p.n_query, p.n_key, generator=g) < 0.8
        joined = both((t.support, t.visible), (partita.support.mask(keep), keep)) if t.support is not None else None
        t = replace(t, support=partita.support.mask(keep) if joined is None else joined[0])
        t = replace(t, visible=keep if joined is None else joined[1])
    s, teacher = replace(s, p=p), Scores(t)
    operands = s.operands(g) | {"teacher query": t.query, "teacher key": t.key}

    def apart(o: Operands) -> Operands:
        return {"query": o["teacher query"], "key": o["teacher key"]}

    def ours(o: Operands) -> Results:
        if face == "divergence":
            return {face: partita.divergence(s.gibbs(o), teacher.gibbs(apart(o)), kind, beta=beta)}
        found = partita.attn.attention_divergence(
            o["query"], o["key"], o["teacher query"], o["teacher key"], support=p.support, kind=kind, beta=beta,
            enable_gqa=p.groups > 1, reduction=("sum", "none")[len(kind) % 2],
        )  # fmt: skip
        return {"divergence": found}

    def truth(o: Operands, noise: Noise) -> Results:
        own, other = s.exact(o, noise), teacher.exact(apart(o), noise)
        if face == "divergence":
            return {"divergence": reference.divergence(own, other, kind, beta)}
        rows = reference.divergence(other.detach(), own, kind, beta)
        return {"divergence": rows if len(kind) % 2 else rows.sum()}

    note = f"{kind} beta={beta} other={other_seen} {s}"
    call = Call(face, operands, ours, truth, None, note, lowered=frozenset(INNER | {"teacher query", "teacher key"}))
    return draw(finished(call, s))


@st.composite
def scales(draw: st.DrawFn) -> Call:
    """The scale that gives each row its entropy, by itself and as a policy."""
    n_query, n_key, dim = draw(st.sampled_from((1, 3, 17))), draw(st.sampled_from((2, 7, 17))), draw(st.integers(1, 4))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    p = Problem(normal(g, n_query, dim), normal(g, n_key, dim), normal(g, n_key, 3), torch.zeros(n_query).long())
    keep = torch.rand(n_query, n_key, generator=g) < draw(st.sampled_from((0.5, 1.0)))
    p = replace(p, support=partita.support.mask(keep), visible=keep)
    fraction = draw(st.sampled_from((0.3, 0.6, 0.9)))
    face = draw(st.sampled_from(("solve_scale", "TargetEntropy")))
    s = Scores(p)
    count, root = keep.sum(-1), list[Tensor]()
    operands = {"query": p.query, "key": p.key, "value": p.value}
    if face == "solve_scale":
        operands["target"] = fraction * count.clamp(min=1).double().log()

    def ours(o: Operands) -> Results:
        if face == "solve_scale":
            return {"scale": partita.solve_scale(o["query"], o["key"], entropy=o["target"], support=p.support)}
        gibbs = partita.Gibbs(
            o["query"], o["key"], scale=partita.scale.TargetEntropy(fraction=fraction), support=p.support
        )
        return {name: getattr(gibbs, name)() for name in ("log_partition", "score_variance")} | {
            "expectation": gibbs.expectation(o["value"])
        }

    def truth(o: Operands, noise: Noise) -> Results:
        # what is solved, and what is read
        raw, again = (s.exact(noise.part(o, "query", "key"), noise) for _ in range(2))
        n = reference.visible(raw).clamp(min=1).double()
        wanted = o.get("target", fraction * n.log())
        if noise.unit == 0:  # a moved problem starts where the still one ended
            with torch.no_grad():
                root.append(reference.solve_scale(raw, wanted, steps=70))
        scale = root[-1]
        moving = (scale > 0) & (reference.visible(raw) > 1)
        # Two steps of Newton from the root are the implicit function to its second derivative.
        wanted = noise(wanted, (1 + wanted.detach()) * noise.solved)
        for _ in range(2):
            at = torch.where(reference.seen(raw), scale[..., None] * torch.where(reference.seen(raw), raw, 0.0), -INF)
            slope = -reference.score_variance(at) / torch.where(moving, scale, 1.0)
            step = (reference.entropy(at) - wanted) / torch.where(moving, slope, 1.0)
            scale = torch.where(moving, scale - step, scale)
        if face == "solve_scale":
            return {"scale": scale}
        at = torch.where(reference.seen(raw), scale[..., None] * torch.where(reference.seen(raw), again, 0.0), -INF)
        return {name: getattr(reference, name)(at) for name in ("log_partition", "score_variance")} | {
            "expectation": reference.expectation(at, o["value"])
        }

    call = draw(finished(Call(face, operands, ours, truth, None, f"fraction={fraction} {p!r}", varies=True), s))
    # a derivative is multiplied by the scale that is solved for
    steepest = largest(
        reference.solve_scale(s.exact(operands, Noise(0.0)), fraction * count.clamp(min=1).log(), steps=70)
    )
    call = replace(call, steep=call.steep * max(1.0, steepest))
    return call if call.precision in ("float64", "float32") else replace(call, precision="float64")


@st.composite
def heads(draw: st.DrawFn) -> Call:
    """Cross entropy of a linear classifier with all its options, and its distillation."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    lead = draw(st.sampled_from([(1,), (7,), (17,), (2, 3), (0,)]))
    n_class, dim = draw(st.sampled_from((1, 2, 7, 17, 257))), draw(st.sampled_from((1, 3, 8)))
    target = torch.randint(0, n_class, lead, generator=g)
    target = torch.where(torch.rand(lead, generator=g) < draw(st.sampled_from((0.0, 0.3, 1.0))), -100, target)
    operands = {"input": normal(g, *lead, dim), "weights": normal(g, n_class, dim)}
    reduction = draw(st.sampled_from(("mean", "sum", "none")))
    if draw(st.booleans()):
        operands["linear_bias"] = normal(g, n_class)
    sample = torch.rand(lead, generator=g) + 0.1 if draw(st.booleans()) else None  # in float32: exact in every call
    if draw(st.integers(0, 3)) == 0:
        kind, t = draw(st.sampled_from(("forward", "reverse", "js", "hellinger"))), draw(st.sampled_from((1.0, 2.0)))
        operands |= {"teacher input": normal(g, *lead, 3), "teacher weights": normal(g, n_class, 3)}
        options: dict[str, object] = {"kind": kind, "temperature": t, "reduction": reduction, "target": target}
        note = f"{options | {'target': target.shape}}"

        def ours(o: Operands) -> Results:
            given = (o[name] for name in ("input", "weights", "teacher input", "teacher weights"))
            weights = None if sample is None else sample.to(torch.promote_types(o["input"].dtype, torch.float32))
            found = partita.losses.linear_distillation_loss(
                *given, linear_bias=o.get("linear_bias"), sample_weight=weights, **options
            )
            return {"loss": found}

        def truth(o: Operands, noise: Noise) -> Results:
            bias = o.get("linear_bias", torch.zeros(n_class).double())
            own = noise((o["input"] @ o["weights"].mT + bias) / t, 4.0 * dim)
            other = (o["teacher input"] @ o["teacher weights"].mT / t).detach()
            weight = torch.ones(lead).double() if sample is None else sample.double()
            weight = torch.where(target == -100, 0.0, weight)
            rows = t * t * weight * reference.divergence(other, own, kind)
            total = {"none": rows, "sum": rows.sum(), "mean": rows.sum() / weight.sum().clamp(min=1e-30)}
            return {"loss": total[reduction]}

        lowered = frozenset(INNER | {"teacher input", "teacher weights"})
        call = Call("linear_distillation_loss", operands, ours, truth, None, note, lowered=lowered)
        return draw(finished(replace(call, rows=target.numel(), steep=float(operands["weights"].abs().max()))))

    if draw(st.integers(0, 3)) == 0:
        operands["scale"] = torch.rand(lead, generator=g, dtype=torch.float64) + 0.2
    weight = torch.rand(n_class, generator=g) + 0.1 if draw(st.integers(0, 3)) == 0 else None
    options = {
        "reduction": reduction,
        "label_smoothing": draw(st.sampled_from((0.0, 0.0, 0.1))),
        "softcap": draw(st.sampled_from((None, None, 2.5))),
        "z_loss": draw(st.sampled_from((0.0, 0.01))),
        "entropy_weight": draw(st.sampled_from((0.0, 0.1))),
    }

    def given_to(o: Operands) -> dict[str, object]:
        of = torch.promote_types(o["input"].dtype, torch.float32)
        own = {"sample_weight": None if sample is None else sample.to(of)}
        own["weight"] = None if weight is None else weight.to(of)
        return options | own | {"linear_bias": o.get("linear_bias"), "scale": o.get("scale", 1.0)}

    def entropy_of(o: Operands) -> Results:
        return {"loss": partita.linear_cross_entropy(o["input"], o["weights"], target, **given_to(o))}

    def definition(o: Operands, noise: Noise) -> Results:
        smooth = float(options["label_smoothing"])
        if not smooth:
            return {"loss": reference.linear_cross_entropy(o["input"], o["weights"], target, **given_to(o))}
        # the mean class is a part by itself, here a loss that is linear in the scores with one that undoes it
        own, other = (noise.part(o, *(name for name in o if name != "scale")) for _ in range(2))
        loss = reference.linear_cross_entropy(own["input"], own["weights"], target, **given_to(own))
        return {"loss": loss + mean_class(other, smooth) - mean_class(own, smooth)}

    def mean_class(o: Operands, smooth: float) -> Tensor:
        """What the mean over classes gives to a smoothed loss."""
        s = o.get("scale", torch.ones(lead).double())[..., None] * (o["input"] @ o["weights"].mT)
        s = reference.cap(s + o.get("linear_bias", torch.zeros(n_class).double()), options["softcap"])
        w = torch.ones(n_class).double() if weight is None else weight.double()
        count = torch.ones(lead).double() if sample is None else sample.double()
        count = torch.where(target == -100, 0.0, count)
        rows = -count * (smooth / n_class) * (w * s).sum(-1)
        total = (count * w[target.clamp(min=0)]).sum().clamp(min=1e-30)
        return {"none": rows, "sum": rows.sum(), "mean": rows.sum() / total}[reduction]

    note = f"{options} weight={weight is not None} sample={sample is not None}"
    # the mean class of smoothing is one of the weights as they are given, before autocast lowers them
    coarse = "autocast" if options["label_smoothing"] else False
    steep = float(max(operands["weights"].abs().max(), operands["input"].abs().sum(), 1.0))
    call = Call("linear_cross_entropy", operands, entropy_of, definition, None, note)
    return draw(finished(replace(call, coarse=coarse, steep=steep, rows=target.numel())))


@st.composite
def contrasts(draw: st.DrawFn) -> Call:
    """InfoNCE in its modes, CLIP, NT-Xent and the supervised loss."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    n, dim = draw(st.sampled_from((1, 2, 7, 17))), draw(st.sampled_from((2, 5)))
    face = draw(st.sampled_from(("info_nce_loss", "info_nce_loss", "clip_loss", "nt_xent_loss", "supcon_loss")))
    operands = {"query": normal(g, n, dim), "key": normal(g, n, dim)}
    coarse, options = True, {}
    if face == "info_nce_loss":
        mode = draw(st.sampled_from((None, "unpaired", "paired")))
        if mode is not None:
            operands["negatives"] = normal(g, *((n,) if mode == "paired" else ()), 5, dim)
            options["negative_mode"] = mode
        coarse = draw(st.booleans())
        options |= {
            "temperature": draw(st.sampled_from((0.2, 1.0))),
            "normalize": coarse,
            "symmetric": mode is None and draw(st.booleans()),
            "reduction": draw(st.sampled_from(("mean", "sum", "none"))),
        }
    elif face == "clip_loss":
        operands["logit_scale"] = torch.full((), 1.5, dtype=torch.float64)
        coarse = False
    labels = torch.randint(0, 3, (n,), generator=g)

    def ours(o: Operands) -> Results:
        if face == "supcon_loss":
            return {"loss": partita.supcon_loss(o["query"], labels, temperature=0.5)}
        given = [o[name] for name in ("query", "key", "negatives", "logit_scale") if name in o]
        return {"loss": getattr(partita, face)(*given, **options)}

    def truth(o: Operands, noise: Noise) -> Results:
        if face == "supcon_loss":
            return {"loss": reference.supcon(o["query"], labels, temperature=0.5)}
        names = {"info_nce_loss": "info_nce", "clip_loss": "clip", "nt_xent_loss": "nt_xent"}
        given = [o[name] for name in ("query", "key", "negatives", "logit_scale") if name in o]
        return {"loss": getattr(reference, names[face])(*given, **options)}

    if face == "supcon_loss":
        del operands["key"]
    # the positive's own score is one of the vectors as they are given, before autocast lowers them
    coarse = coarse or ("autocast" if "negatives" in operands else False)
    lowered = frozenset() if coarse else frozenset(INNER)
    unit = face != "clip_loss" and options.get("normalize", True)
    # 5 is the largest 1 / temperature
    steep = 5 * max(max(1.0, float(x.abs().max())) / (shortest(x) if unit else 1.0) for x in operands.values())
    call = Call(face, operands, ours, truth, None, f"{options}", coarse=coarse, lowered=lowered)
    return draw(finished(replace(call, steep=steep, rows=n)))


def calls() -> st.SearchStrategy[Call]:
    """Any of them; the reads and attention, which have the most to go wrong, more often."""
    often = [reads(), reads(), reads(), attentions(), attentions(), attentions()]
    return st.one_of(*often, merges(), divergences(), divergences(), scales(), heads(), contrasts())
