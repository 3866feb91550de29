"""Every finding of the monitor, provoked on purpose, and what cures it.

Run it with `python examples/provoked_findings.py [--figures FOLDER]`. Each case is a few watched steps before and after
the cure; the finding must be there, and then be gone. docs/guide/findings-explained.md shows the pictures.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.monitor import Record


class Attention(nn.Module):
    """Two heads that attend with the queries and keys they are given."""

    def __init__(self, scale: Any = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        if self.scale is None:
            return F.scaled_dot_product_attention(query, key, key)
        out = partita.attention(query, key, key, scale=self.scale)
        assert isinstance(out, Tensor)
        return out


def attended(queries: list[Tensor], keys: list[Tensor], scale: Any = None, train: bool = True) -> Record:
    model = Attention(scale).train(train)
    with partita.watch(model) as w:
        for query, key in zip(queries, keys, strict=True):
            model(query, key)
    return w.finished()


def drawn(n: int = 32, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(2, 2, n, dim, generator=torch.Generator().manual_seed(seed))


def several(make: Callable[[int], Tensor], steps: int = 8) -> list[Tensor]:
    return [make(step) for step in range(steps)]


KEYS = several(lambda s: drawn(seed=100 + s))
QUERIES = several(lambda s: drawn(seed=s))


def heads(factor: float) -> Record:
    """The first head's queries times a factor."""
    return attended([q * torch.tensor([factor, 1.0])[:, None, None] for q in QUERIES], KEYS)


def sink(strength: float) -> Record:
    """All queries share a direction that the first key answers."""
    towards = F.normalize(drawn(1), dim=-1)
    first = [torch.cat([strength * towards, k[:, :, 1:]], 2) for k in KEYS]
    return attended([q + strength * towards for q in QUERIES], first)


def sharper(steps: list[float]) -> Record:
    queries = [drawn(seed=1) * factor for factor in steps]
    return attended(queries, [drawn(seed=2)] * len(steps))


def lengths(scale: Any) -> Record:
    sizes = [16, 32, 64, 128, 256, 512]
    return attended([drawn(n, seed=1) for n in sizes], [drawn(n, seed=2) for n in sizes], scale, train=False)


def twins(same: bool) -> Record:
    def one(step: int, first: int) -> Tensor:
        q = 3 * drawn(seed=first + step)
        return q[:, :1].expand(-1, 2, -1, -1) if same else q

    return attended(several(lambda s: one(s, 0)), several(lambda s: one(s, 100)))


def broken(bad: bool) -> Record:
    queries = several(lambda s: drawn(seed=s))
    if bad:
        queries[3][0, 0, 5] = math.nan
    return attended(queries, KEYS)


def contrast(n: int, temperature: float, noise: float, normalize: bool = True) -> Record:
    with partita.watch(nn.Identity()) as w:
        for step in range(8):
            w.set_step(step)
            g = torch.Generator().manual_seed(step)
            x, other = (torch.randn(n, 16, generator=g) for _ in range(2))
            partita.info_nce_loss(x, x + noise * other, temperature=temperature, normalize=normalize)
    return w.finished()


def two_towers(logit_scale: float) -> Record:
    with partita.watch(nn.Identity()) as w:
        for step in range(8):
            w.set_step(step)
            g = torch.Generator().manual_seed(step)
            a, b = (F.normalize(torch.randn(32, 16, generator=g), dim=-1) for _ in range(2))
            partita.clip_loss(a, b, logit_scale)
    return w.finished()


class OwnKernel(nn.Module):
    """Attention in one operation of its own; einsum stands for a kernel that nothing shows."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.tells, self.watch = tells, None

    def forward(self, x: Tensor) -> Tensor:
        if self.watch is not None and self.tells:
            self.watch.observe(x, x)
        weight = torch.einsum("bhid,bhjd->bhij", x, x).exp()
        return torch.einsum("bhij,bhjd->bhid", weight / weight.sum(-1, keepdim=True), x)


class WithKernel(nn.Module):
    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.attention = OwnKernel(tells)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)  # type: ignore[no-any-return]


def unseen(tells: bool) -> Record:
    model = WithKernel(tells)
    with partita.watch(model) as w:
        model.attention.watch = w
        for step in range(8):
            model(0.1 * drawn(seed=step))
    return w.finished()


@dataclass(frozen=True)
class Case:
    provoked: Callable[[], Record]
    cured: Callable[[], Record]
    column: str  # the number that decides
    head: int = 0
    limit: float | None = None


GROWING = [1.0] * 6 + [60.0] * 6
CASES = {
    "HEAD_COLLAPSED": Case(lambda: heads(60.0), lambda: heads(1.0), "normalized_entropy_p50", limit=0.01),
    "HEAD_UNIFORM": Case(lambda: heads(0.0), lambda: heads(1.0), "normalized_entropy", limit=0.998),
    "SINK_HEAD": Case(lambda: sink(5.0), lambda: sink(0.0), "sink_first"),
    "LOGIT_GROWTH": Case(lambda: heads(60.0), lambda: heads(1.0), "max_score", limit=50.0),
    "ENTROPY_DROP": Case(lambda: sharper(GROWING), lambda: sharper([1.0] * 12), "normalized_entropy"),
    "LENGTH_DILUTION": Case(
        lambda: lengths(0.25), lambda: lengths(partita.scale.TargetEntropy(width=8.0)), "effective_width"
    ),
    "DUPLICATE_HEADS": Case(lambda: twins(True), lambda: twins(False), "twin_similarity", limit=0.99),
    "NONFINITE": Case(lambda: broken(True), lambda: broken(False), "nonfinite"),
    "NOT_NORMALISED": Case(
        lambda: contrast(32, 0.1, 1.0, False), lambda: contrast(32, 0.1, 1.0), "norm_query", limit=1.05
    ),
    "EFFECTIVE_NEGATIVES_LOW": Case(
        lambda: contrast(64, 0.005, 3.0), lambda: contrast(64, 0.2, 3.0), "effective_negatives", limit=0.05 * 63
    ),
    "MI_SATURATED": Case(lambda: contrast(16, 0.05, 0.0), lambda: contrast(16, 0.2, 2.0), "bound", limit=None),
    "SCALE_AT_CAP": Case(lambda: two_towers(100.0), lambda: two_towers(30.0), "scale", limit=100.0),
    "COVERAGE": Case(lambda: unseen(False), lambda: unseen(True), "rows"),
}


def series(record: Record, case: Case) -> tuple[list[float], list[float]]:
    """Steps and the deciding number."""
    rows = [r for r in record.rows() if r["layer"] == 0 and r["head"] == case.head and case.column in r]
    rows = rows or [r for r in record.losses if r.get(case.column) is not None]
    return [float(r["step"]) for r in rows], [float(r[case.column]) for r in rows]


def draw(code: str, before: Record, after: Record, folder: Path) -> Path:
    from partita_theory.figure import Figure, Line, Panel, svg

    case, lines = CASES[code], []
    for name, record in (("provoked", before), ("cured", after)):
        x, y = series(record, case)
        if x:
            lines.append(Line(name, x, y))
    if case.limit is not None:
        lines.append(Line("threshold", [0.0, max(lines[0].x)], [case.limit, case.limit], kind="theory"))
    path = folder / f"finding_{code.lower()}.svg"
    figure = Figure(code, [Panel(case.column, "step", case.column, lines)], "examples/provoked_findings.py")
    path.write_text(svg(figure), encoding="utf-8")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--figures", type=Path, help="a folder to draw into")
    parser.add_argument("--quick", action="store_true", help="the first three")
    given = parser.parse_args()
    for code, case in list(CASES.items())[: 3 if given.quick else None]:
        before, after = case.provoked(), case.cured()
        there, gone = (any(f.code == code for f in r.findings()) for r in (before, after))
        print(f"{code:<26}{'there' if there else 'MISSED':<8}{'STILL THERE' if gone else 'cured'}")
        if given.figures:
            draw(code, before, after, given.figures)


if __name__ == "__main__":
    main()
