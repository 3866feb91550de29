"""Random calls of everything, against the definitions in dense float64: values, counts, first and second derivatives.

Here a few of them; `make test-random` makes 20,000, of the same strategies.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import partita
from conftest import SEED
from partita.engine.backends import native
from partita.errors import PartitaError
from tests.calls import DTYPES, POISONED, SMOOTH, Call, Results, calls
from tests.conformance.serving import serving
from tests.rounding import DRAWS, Noise, allowed

COUNT = int(os.environ.get("PARTITA_RANDOM_CALLS", 4 * settings.default.max_examples))
TOGETHER = 9
Name = TypeVar("Name")
SILENT = {"suppress_health_check": list(HealthCheck), "deadline": None}
LARGE = 700  # pairs beyond which tiles of a few keys would only measure the merging


def lowered(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Rounded to a dtype; its derivative is that of the number itself."""
    return x if dtype is None else x + (x.detach().to(dtype).to(x.dtype) - x.detach())


class Judged:
    """One call by the package and by its definition."""

    def __init__(self, call: Call):
        self.call = call
        self.dtype, self.cast = DTYPES[call.precision]
        low = self.cast or self.dtype
        self.low = torch.finfo(low).eps / 2  # the unit of operands, and so of what autograd adds up
        self.unit = torch.finfo(torch.float64 if low == torch.float64 else torch.float32).eps / 2
        if call.coarse is True or (call.coarse == "autocast" and self.cast):
            self.unit = self.low
        self.solved = (1e-10 if low == torch.float64 else 2e-6) / self.unit
        self.worst = (0.0, "")  # the nearest that a result came to what is allowed

    def operand(self, name: str, x: Tensor) -> Tensor:
        """As the package gets it: in the call's dtype, and what is for rows in that of the sums."""
        inexact = name in ("scale", "sink", "weight", "target", "logit_scale") or name.startswith("parameter")
        return x.to(torch.promote_types(self.dtype, torch.float32) if inexact else self.dtype)

    def given(self) -> Results:
        """Leaves for the package, broken where no row looks."""
        leaves = {}
        for name, x in self.call.operands.items():
            spoiled = self.call.spoiled.get(name)
            leaf = self.operand(name, x)
            leaf = leaf if spoiled is None else torch.where(spoiled == 0, leaf, spoiled.to(leaf.dtype))
            leaves[name] = torch.nn.Parameter(leaf.clone(), requires_grad=self.tracked(name))
        return leaves

    def exact(self) -> Results:
        """The same numbers in float64."""
        found = {name: self.operand(name, x).double() for name, x in self.call.operands.items()}
        return {name: x.detach().clone().requires_grad_(self.tracked(name)) for name, x in found.items()}

    def tracked(self, name: str) -> bool:
        return self.call.order > 0 and name not in self.call.frozen

    def definition(self, leaves: Results, noise: Noise) -> Results:
        operands = {}
        for name, x in leaves.items():
            value = lowered(x, self.cast) if name in self.call.lowered else x
            operands[name] = noise.relative(value, x.shape[-1] + 4 if x.ndim else 4)
        with noise if noise.back else contextlib.nullcontext():
            found = self.call.truth(operands, noise)
        if self.call.poisoned is None:
            return found
        rows = self.call.poisoned
        return {
            name: x.masked_fill(rows if x.ndim == rows.ndim else rows[..., None], torch.nan)
            for name, x in found.items()
            if name in POISONED
        }

    def package(self, leaves: Results) -> Results:
        with torch.autocast("cpu", self.cast) if self.cast else contextlib.nullcontext():
            return self.call.ours(leaves)

    def weights(self, name: str, like: Tensor) -> Tensor:
        """Eighths, which every dtype holds: an upstream gradient is not rounded."""
        g = torch.Generator().manual_seed(self.call.seed + sum(map(ord, name)))
        return torch.randint(-8, 9, like.shape, generator=g).double() / 8

    def results(
        self, run: Callable[[Results], Results], leaves: Results, finite: dict[str, Tensor] | None
    ) -> tuple[Results, dict[str, Tensor]]:
        """Values, and derivatives of a weighted sum of the finite ones, by name."""
        with torch.set_grad_enabled(self.call.order > 0):
            out = run(leaves)
        found = {name: x.detach() for name, x in out.items()}
        finite = finite or {name: x.detach().isfinite() for name, x in out.items() if name in SMOOTH}
        tracked = {name: x for name, x in leaves.items() if x.requires_grad}
        if not tracked:
            return found, finite
        terms = [
            (out[name].double()[mask] * self.weights(name, mask)[mask]).sum()
            for name, mask in finite.items()
            if out[name].requires_grad
        ]
        slopes = self.slopes(terms, tracked, self.call.order > 1)
        found |= {f"d {name}": x.detach() for name, x in slopes.items()}
        if self.call.order > 1:
            again = [(x.double() * self.weights(f"d {name}", x)).sum() for name, x in slopes.items() if x.requires_grad]
            found |= {f"dd {name}": x.detach() for name, x in self.slopes(again, tracked, False).items()}
        return found, finite

    @staticmethod
    def slopes(terms: list[Tensor], leaves: dict[Name, Tensor], create: bool) -> dict[Name, Tensor]:
        """Gradients of the sum; 0 where nothing leads to a leaf."""
        zero = {name: torch.zeros_like(x) for name, x in leaves.items()}
        if not terms:
            return zero
        found = torch.autograd.grad(sum(terms), [*leaves.values()], create_graph=create, allow_unused=True)
        return {name: zero[name] if g is None else g for name, g in zip(leaves, found, strict=True)}

    def parts(self, finite: dict[str, Tensor]) -> dict[str, tuple[float, int]]:
        """The size of what is added up in each derivative, and how many parts that are.

        Autograd adds one for every result, and for every part that the definition names. n numbers rounded to a unit,
        and their n - 1 sums rounded again: at most n units of the sum of their sizes.
        """
        noise, leaves = Noise(0.0), self.exact()
        out = self.definition(leaves, noise)
        tracked = [name for name, x in leaves.items() if x.requires_grad]
        named = {name: [o[name] for o in noise.copies if name in o] or [leaves[name]] for name in tracked}
        places = {(name, i): x for name, found in named.items() for i, x in enumerate(found)}
        masked = [(out[name].double()[mask] * self.weights(name, mask)[mask]).sum() for name, mask in finite.items()]
        terms = [x for x in masked if x.requires_grad]
        first = [self.slopes([term], places, True) for term in terms]
        whole = self.slopes(terms, places, True) if self.call.order > 1 else {}
        slopes = [(x.double() * self.weights(f"d {at[0]}", x)).sum() for at, x in whole.items()]
        again = [self.slopes([x], places, True) for x in slopes if x.requires_grad]
        sizes = {}
        for order, found in (("d", first), ("dd", again)):
            for name in tracked:
                parts = [x.detach().abs() for slope in found for at, x in slope.items() if at[0] == name]
                size = sum(parts, torch.zeros_like(leaves[name]))
                n = sum(bool(x.any()) for x in parts)
                sizes[f"{order} {name}"] = (float(size.max()) if size.numel() else 0.0, n if order == "d" else 1)
        return sizes

    def differences(self) -> list[str]:
        """What the package has otherwise than the definition, and by how much."""
        truth, finite = self.results(lambda o: self.definition(o, Noise(0.0)), self.exact(), None)
        actual = self.measured(finite)
        # a second derivative, and a product in the dtype of the operands, add up what single pairs give: each is moved
        pairwise = self.call.order > 1 or (self.call.order == 1 and self.multiplied_low())
        back = self.low if pairwise and self.low > self.unit else 0.0  # sums of this unit have the size of their parts
        parts = self.parts(finite) if self.call.order else {}
        moved = []
        for seed in range(4 * DRAWS if back else DRAWS):
            noise = Noise(self.unit, self.call.seed + seed, self.solved, back)
            moved.append(self.results(lambda o, noise=noise: self.definition(o, noise), self.exact(), finite)[0])
        found = []
        for name, want in truth.items():
            if name not in actual:
                continue  # a second derivative that was refused in the package's own words
            got = actual[name]
            if got.shape != want.shape:
                found.append(f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
                continue
            beyond = ~want.isfinite()
            same = (got.double() == want) | (got.isnan() & want.isnan())
            if not bool(same[beyond].all()) or not bool(got[~beyond].isfinite().all()):
                found.append(f"{name}: inf or nan in other places: {got} for {want}")
            elif not bool(beyond.all()):
                error = float((got.double() - want)[~beyond].abs().max())
                order = {"d ": 1, "dd": 2}.get(name[:2], 0)
                size, n = parts.get(name, (float(want[~beyond].abs().max()), 7))
                # on a GPU the weights of a state's moment are rounded as its operands are, native keeps them in float32
                coarse = order or (name == "expectation" and partita.backend() == "triton")
                # what is added is rounded n times, and once more by what a kernel rounds on the way
                last = (n + 1) * size * (self.low if coarse else torch.finfo(got.dtype).eps / 2)
                bound = allowed(want, [x[name] for x in moved], self.unit * self.own(order), last, size)
                self.worst = max(self.worst, (error / max(bound, 1e-300), name))
                if error > bound:
                    found.append(f"{name}: error {error:.3g}, rounding does {bound:.3g}")
        return found + self.miscounts()

    def own(self, order: int) -> float:
        """Units of what is computed after the scores: terms of a variance, or of a derivative, that may cancel."""
        return self.call.spread**2 * max(1.0, self.call.steep) ** order * max(1, self.call.rows) ** 0.5

    def measured(self, finite: dict[str, Tensor]) -> Results:
        leaves = self.given()
        if self.call.order < 2:
            return self.results(self.package, leaves, finite)[0]
        try:
            return self.results(self.package, leaves, finite)[0]
        except PartitaError:
            once = Judged(replace(self.call, order=1))
            return once.results(once.package, leaves, finite)[0]

    def multiplied_low(self) -> bool:
        """Whether the products of a derivative have operands as they are given, and not in float32."""
        found = native.library.load()
        pairs = partita.backend() == "native" and found is not None and found.pairs
        return partita.backend() == "triton" or (pairs and torch.bfloat16 in (self.dtype, self.cast))

    def miscounts(self) -> list[str]:
        if self.call.counts is None or self.cast or self.call.spoiled:
            return []
        operands = {name: x.requires_grad_(False) for name, x in self.given().items()}
        with torch.no_grad():
            found = self.call.counts(operands, self.unit)
        return [
            f"{name}: {got} outside of {low} to {high}"
            for name, (got, low, high) in found.items()
            if not bool(((got >= low) & (got <= high)).all())
        ]


def serving_for(backend: str, call: Call) -> contextlib.AbstractContextManager[None]:
    """Tiles of a few keys where they are few, of a usual size where they are many."""
    key = next(x for name, x in call.operands.items() if name in ("key", "weights", "query"))
    many = call.operands.get("query", call.operands.get("input", key)).shape[-2] * key.shape[-2] > LARGE
    return serving("tiled-64x64" if backend.startswith("tiled") and many else backend)


def draw_calls(count: int, seed: int, judge: Callable[[Call], None]) -> list[str]:
    """This many random calls; what differs in each search, shrunk to its smallest.

    A few in each search: past ten, hypothesis mostly varies those that it has made.
    """
    found = []
    for start in range(0, count, TOGETHER):
        # the first of a search is always the simplest there is
        few = settings(max_examples=min(TOGETHER, count - start) + 1, derandomize=False, database=None, **SILENT)
        try:
            hypothesis.seed(1000 * seed + start)(few(given(call=calls())(judge)))()
        except AssertionError as difference:
            found.append(str(difference))
    return found


def test_random_calls_are_their_definitions(backend):
    def judge(call: Call) -> None:
        with serving_for(backend, call):
            differences = Judged(call).differences()
        assert not differences, f"{call}\n" + "\n".join(differences)

    found = draw_calls(COUNT, SEED, judge)
    assert not found, "\n\n".join(found)
