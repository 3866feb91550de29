"""A recall task trained at 64 pairs and read at up to 4096: does a log n scale win back what dilution takes?

A row of n pairs (key, value); a query names a key, and the value that stands beside it is asked for. There are no
positions, so that nothing is new at a longer row but the number of keys that share the attention: dilution is the whole
difficulty. Keys are random directions, made noisy; one attention layer with learned projections reads them.

Expected, written before the run: accuracy falls with n under 1/sqrt(d); at every n beyond 64, LogLength loses less in
nats than 1/sqrt(d), seed by seed; a constant factor of 1/sqrt(d) that is chosen well at 4096 does about as well there
and worse at 64.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

import partita
from partita import scale
from partita.lab.figure import Figure, Panel
from partita_studies.experiment import Experiment, Row, Settings, Size, Verdict, grid, mean_by, paired
from partita_studies.experiments._series import note, only, series

TRAINED = 64
USUAL, LOG = "1/sqrt(d)", "LogLength"
FACTORS = (0.7, 1.5, 2.0, 3.0)


class Recall(nn.Module):
    """Logits of the value beside the asked key."""

    def __init__(self, dim: int, values: int) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.value = nn.Embedding(values, dim)

    def forward(self, asked: Tensor, keys: Tensor, values: Tensor, policy: scale.Policy | None) -> Tensor:
        beside = self.value(values)
        out = partita.attention(self.query(asked), self.key(keys), beside, scale=policy)
        logits: Tensor = out @ self.value.weight.mT
        return logits


def rows_of(n: int, asked: int, dim: int, values: int, noise: float, source: torch.Generator) -> tuple[Tensor, ...]:
    """One row of n pairs, some queries, and their answers; all but the row's size is the same for every n."""
    keys = nn.functional.normalize(torch.randn(n, dim, generator=source), dim=-1) * dim**0.5
    beside = torch.randint(values, (n,), generator=source)
    which = torch.randint(n, (asked,), generator=source)
    query = keys[which] + noise * torch.randn(asked, dim, generator=source)
    return query, keys, beside, beside[which]


@functools.lru_cache(maxsize=16)
def trained(dim: int, values: int, noise: float, steps: int, batch: int, seed: int) -> Recall:
    torch.manual_seed(seed)
    source = torch.Generator().manual_seed(seed)
    model = Recall(dim, values)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        query, keys, beside, answer = rows_of(TRAINED, batch, dim, values, noise, source)
        loss = nn.functional.cross_entropy(model(query, keys, beside, None), answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def policies() -> dict[str, scale.Policy | None]:
    return {
        USUAL: None,
        LOG: scale.LogLength(TRAINED),
        "SqrtLogLength": scale.SqrtLogLength(TRAINED),
        **{f"{f:g} / sqrt(d)": scale.InverseSqrt(f) for f in FACTORS},
    }


@torch.no_grad()
def run(settings: Settings, seed: int) -> Iterable[Row]:
    dim, values, noise = int(settings["dim"]), int(settings["values"]), float(settings["noise"])
    with torch.enable_grad():
        model = trained(dim, values, noise, int(settings["steps"]), int(settings["batch"]), seed)
    n = TRAINED
    while n <= int(settings["longest"]):
        for way, policy in policies().items():
            source = torch.Generator().manual_seed(1_000_003 * seed + n)  # every way is asked the same
            nll = right = 0.0
            for _ in range(int(settings["rows"])):
                query, keys, beside, answer = rows_of(n, 256, dim, values, noise, source)
                logits = model(query, keys, beside, policy)
                nll += nn.functional.cross_entropy(logits, answer).item()
                right += (logits.argmax(-1) == answer).float().mean().item()
            count = int(settings["rows"])
            yield {
                "noise": noise, "scale": way, "n": n, "seed": seed, "nll": nll / count, "accuracy": 100 * right / count
            }  # fmt: skip
        n *= 4


def judge(rows: list[Row]) -> Verdict:
    parts, held = [], []
    for noise in sorted({row["noise"] for row in rows}):
        own = only(rows, noise=noise)
        lengths = sorted({row["n"] for row in own})
        beyond, last = [n for n in lengths if n > TRAINED], lengths[-1]
        lead = {n: paired(only(own, n=n), "nll", "scale", USUAL, LOG) for n in lengths}
        falls = paired(only(own, scale=USUAL), "accuracy", "n", last, TRAINED)
        mean = mean_by(own, "accuracy", "scale", "n")
        best = min(
            dict.fromkeys(r["scale"] for r in own), key=lambda w: mean_by(own, "nll", "scale", "n")[w, last].mean
        )
        held += [falls.high < 0, *(lead[n].low > 0 for n in beyond)]
        parts.append(
            f"noise {noise:g}, accuracy at {'/'.join(map(str, lengths))}: "
            + "; ".join(
                f"{w} {'/'.join(f'{mean[w, n].mean:.1f}' for n in lengths)}"
                for w in dict.fromkeys(r["scale"] for r in own)
            )
            + f"; LogLength gains {', '.join(f'{lead[n]} at {n}' for n in beyond)} nats; best at {last}: {best}"
        )
    says = ". ".join(parts) + "."
    if all(held):
        return Verdict("holds", says)
    if not any(held):
        return Verdict("does not hold", says)
    return Verdict("holds within", says, f"{sum(held)} of {len(held)} claims")


def figure(rows: list[Row]) -> Figure:
    panels = []
    for noise in sorted({row["noise"] for row in rows})[:2]:
        own = only(rows, noise=noise)
        for y, label in (("nll", "nats"), ("accuracy", "accuracy (percent)")):
            ways = list(dict.fromkeys(row["scale"] for row in own))
            lines = [series(only(own, scale=w), w, "n", y, "data" if k < 4 else "context") for k, w in enumerate(ways)]
            panels.append(Panel(f"noise {noise:g}", "pairs", label, lines, log_x=True))
    return Figure(EXPERIMENT.question, panels, note(rows))


def _settings(noise: list[float], dim: int, values: int, steps: int, batch: int, longest: int, count: int) -> list[Row]:
    fixed = {"dim": dim, "values": values, "steps": steps, "batch": batch, "longest": longest, "rows": count}
    return grid(noise=noise, **{key: [value] for key, value in fixed.items()})


EXPERIMENT = Experiment(
    name="recall_longer",
    question="Recall trained at 64 pairs and read at up to 4096: does a log n scale win back what dilution takes?",
    expected="Accuracy falls with n under 1/sqrt(d); beyond 64 pairs LogLength loses less in nats at every n, seed by "
    "seed.",
    ids=("M-SCL-0", "M-SCL-1", "M-SCL-7", "M-SCL-14"),
    sizes={
        "tiny": Size(_settings([0.5], 8, 4, 20, 16, 256, 1), seeds=2, seconds=0.2),
        "quick": Size(_settings([0.5], 16, 8, 300, 32, 4096, 2), seeds=3, seconds=4.0),
        "full": Size(_settings([0.3, 0.7], 32, 16, 3000, 64, 4096, 16), seeds=8, seconds=30.0),
    },
    run=run,
    judge=judge,
    figure=figure,
)
