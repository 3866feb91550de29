"""A recall task trained at 64 pairs and read at up to 4096.

A row of n pairs (key, value); a query names a key, and the value next to it is the answer. There are no positions, so
that nothing is new at a longer row but the number of keys that share the attention: dilution is the whole difficulty.
Keys are random directions, made noisy; one attention layer with learned projections reads them. A constant factor of
1/sqrt(d) that is chosen well at 4096 should do about as well there, and worse at 64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import partita
from partita import scale
from partita_theory.experiment import Size, experiment, geometric, grid
from partita_theory.experiments._training import descend
from partita_theory.figure import Panel
from partita_theory.results import Row, distinct, lines, mean_by, only, paired, said
from partita_theory.verdict import Verdict, settle

TRAINED = 64
USUAL, LOG = "1/sqrt(d)", "LogLength"
FACTORS = (0.7, 1.5, 2.0, 3.0)


class Recall(nn.Module):
    """Logits of the value next to the named key."""

    def __init__(self, dim: int, values: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value = nn.Embedding(values, dim)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor, policy: scale.Policy | None) -> Tensor:
        out = partita.attention(self.query(asked), self.key(keys), self.value(values), scale=policy)
        logits: Tensor = out @ self.value.weight.mT
        return logits


def rows_of(n: int, asked: int, dim: int, values: int, noise: float, source: torch.Generator) -> tuple[Tensor, ...]:
    """One row of n pairs, some queries, and their answers; all but the row's size is the same for every n."""
    keys = nn.functional.normalize(torch.randn(n, dim, generator=source), dim=-1) * dim**0.5
    named = torch.randint(values, (n,), generator=source)
    which = torch.randint(n, (asked,), generator=source)
    query = keys[which] + noise * torch.randn(asked, dim, generator=source)
    return query, keys, named, named[which]


@functools.lru_cache(maxsize=16)
def trained(dim: int, values: int, noise: float, steps: int, batch: int, seed: int) -> Recall:
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    model = Recall(dim, values)

    def loss() -> Tensor:
        query, keys, named, answer = rows_of(TRAINED, batch, dim, values, noise, source)
        return cross_entropy(model(query, keys, named, None), answer)

    list(descend(torch.optim.Adam(model.parameters(), lr=3e-3), steps, loss))
    return model.eval()


def policies() -> dict[str, scale.Policy | None]:
    return {
        USUAL: None,
        LOG: scale.LogLength(TRAINED),
        "SqrtLogLength": scale.SqrtLogLength(TRAINED),
        **{f"{f:g} / sqrt(d)": scale.InverseSqrt(f) for f in FACTORS},
    }


@torch.no_grad()
def measure(seed: int, noise: float, longest: int, rows: int, dim: int, values: int, **plan: Any) -> Iterable[Row]:
    with torch.enable_grad():
        model = trained(dim, values, noise, seed=seed, **plan)
    for n in geometric(TRAINED, longest):
        for way, policy in policies().items():
            source = torch.Generator().manual_seed(1_000_003 * seed + n)  # every way is asked the same
            nll = right = 0.0
            for _ in range(rows):
                query, keys, named, answer = rows_of(n, 256, dim, values, noise, source)
                logits = model(query, keys, named, policy)
                nll += cross_entropy(logits, answer).item()
                right += (logits.argmax(-1) == answer).float().mean().item()
            yield {"scale": way, "n": n, "nll": nll / rows, "accuracy": 100 * right / rows}


def judge(rows: list[Row]) -> Verdict:
    parts, held = [], []
    ways = list(dict.fromkeys(row["scale"] for row in rows))
    for noise in distinct(rows, "noise"):
        own = only(rows, noise=noise)
        lengths = distinct(own, "n")
        last = lengths[-1]
        lead = {n: paired(only(own, n=n), "nll", "scale", USUAL, LOG) for n in lengths if n > TRAINED}
        falls = paired(only(own, scale=USUAL), "accuracy", "n", last, TRAINED)
        mean, loss = mean_by(own, "accuracy", "scale", "n"), mean_by(only(own, n=last), "nll", "scale")
        best = min(ways, key=lambda way: loss[way].mean)
        held += [falls.high < 0, *(found.low > 0 for found in lead.values())]
        parts.append(
            f"noise {noise:g}, accuracy at {'/'.join(map(str, lengths))}: "
            + "; ".join(f"{w} {'/'.join(f'{mean[w, n]:.1f}' for n in lengths)}" for w in ways)
            + f"; LogLength gains {said(lead, '{1} at {0}')} nats; best at {last}: {best}"
        )
    within = f"{sum(held)} of {len(held)} claims"
    return settle(". ".join(parts) + ".", holds=any(held), whole=all(held), within=within)


def panels(rows: list[Row]) -> list[Panel]:
    found = []
    for noise in distinct(rows, "noise")[:2]:
        own = only(rows, noise=noise)
        ways = list(dict.fromkeys(row["scale"] for row in own))
        for y, label in (("nll", "nats"), ("accuracy", "accuracy (percent)")):
            drawn = lines(own, "n", y, "scale", ways[:4]) + lines(own, "n", y, "scale", ways[4:], kind="context")
            found.append(Panel(f"noise {noise:g}", "pairs", label, drawn, log_x=True))
    return found


EXPERIMENT = experiment(
    __name__,
    question="Recall trained at 64 pairs and read at up to 4096: does a log n scale win back what dilution takes?",
    expected="Accuracy falls with n under 1/sqrt(d); beyond 64 pairs LogLength loses less in nats at every n, seed by "
    "seed.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-7", "M-SCL-14"),
    tiny=Size(grid(noise=0.5, dim=8, values=4, longest=256, steps=20, batch=16, rows=1), seeds=2, seconds=0.2),
    quick=Size(grid(noise=0.5, dim=16, values=8, longest=4096, steps=300, batch=32, rows=2), seeds=3, seconds=4.0),
    full=Size(
        grid(noise=[0.3, 0.7], dim=32, values=16, longest=4096, steps=3000, batch=64, rows=16), seeds=8, seconds=30.0
    ),
)
