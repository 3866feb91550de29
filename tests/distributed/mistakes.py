"""Calls in which the last rank alone makes a mistake: the error of each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import partita
from partita import distributed, scale, support
from partita.contrastive import Queue
from tests.distributed.checks import error_of

N, DIM, HEADS = 4, 6, 2


class Moody(scale.Policy):
    """A policy that works on some ranks only."""

    def __init__(self, broken: bool):
        self.broken = broken

    def __call__(self, visible: Any, dim: int, query: Any = None) -> Any:
        if self.broken:
            raise RuntimeError("this policy cannot count")
        return torch.ones_like(visible)


def _attention(odd: bool, group: Any, **wrong: Any) -> object:
    """`wrong` on the last rank; on the others what is right: the second of each pair, or nothing."""
    total = N * group.size()
    x = torch.ones(HEADS, N, DIM)
    given: dict[str, Any] = {"query": x, "key": x, "value": x}
    right = {
        "attn_mask": torch.ones(total, total, dtype=torch.bool),
        "bias": torch.zeros(total, total),
        "sink": torch.zeros(HEADS),
        "support": support.causal(),
        "scale": Moody(False),
    }
    given |= {name: value if odd else right.get(name, given.get(name)) for name, value in wrong.items()}
    if "dropout_p" in wrong:
        given["dropout_p"] = wrong["dropout_p"] if odd else 0.0
    return partita.attention(**given, group=group)


def _classes(odd: bool, group: Any, **wrong: Any) -> object:
    given: dict[str, Any] = {
        "input": torch.ones(N, DIM),
        "linear_weight": torch.ones(N, DIM),
        "target": torch.arange(N),
    }
    return partita.linear_cross_entropy(**(given | wrong if odd else given), group=group)


def _pairs(odd: bool, group: Any, face: Any = partita.info_nce_loss, **wrong: Any) -> object:
    right = {
        "labels": torch.arange(N),
        "negative_keys": torch.ones(3, DIM),
        "queue": Queue(3, DIM),
        "temperature": 0.5,
    }
    symmetric = {"symmetric": True} if "symmetric" in wrong else {}
    wrong.pop("symmetric", None)
    given: dict[str, Any] = {"query": torch.ones(N, DIM), "positive_key": torch.ones(N, DIM)} | symmetric
    if face is not partita.info_nce_loss:
        given = wrong.pop("given")
    given |= {name: value if odd else right.get(name, given.get(name)) for name, value in wrong.items()}
    return face(**given, group=group)


def _supcon(odd: bool, group: Any, **wrong: Any) -> object:
    given: dict[str, Any] = {"embeddings": torch.ones(N, DIM), "labels": torch.arange(N) // 2}
    given |= {"ref_emb": torch.ones(3, DIM), "ref_labels": torch.arange(3)}
    return partita.supcon_loss(**(given | wrong if odd else given), group=group)


Call = Callable[[bool, Any], object]
# what the last rank does wrong, and the kind of error it gets
CALLS: dict[str, tuple[Call, str]] = {
    "dropout_p": (lambda odd, g: _attention(odd, g, dropout_p=1.5), "ValueRangeError"),
    "dropout_p, no number": (lambda odd, g: _attention(odd, g, dropout_p="much"), "ValueRangeError"),
    "attn_mask, rows": (lambda odd, g: _attention(odd, g, attn_mask=torch.ones(3, 5) > 0), "ShapeError"),
    "attn_mask, batch": (
        lambda odd, g: _attention(odd, g, attn_mask=torch.ones(3, N * g.size(), N * g.size()) > 0),
        "ShapeError",
    ),
    "attn_mask, dtype": (lambda odd, g: _attention(odd, g, attn_mask=torch.ones(1, 1).long()), "DtypeError"),
    "bias, columns": (lambda odd, g: _attention(odd, g, bias=torch.zeros(N, N + 1)), "ShapeError"),
    "bias, no tensor": (lambda odd, g: _attention(odd, g, bias=1.0), "DtypeError"),
    "sink": (lambda odd, g: _attention(odd, g, sink=torch.zeros(HEADS + 1)), "ShapeError"),
    "lengths, too long": (lambda odd, g: _attention(odd, g, support=support.lengths(99)), "ValueRangeError"),
    "lengths, batch": (
        lambda odd, g: _attention(odd, g, support=support.lengths(torch.ones(3).long())),
        "ShapeError",
    ),
    "segments": (lambda odd, g: _attention(odd, g, support=support.segments(torch.arange(N + 1))), "ShapeError"),
    "support, no support": (lambda odd, g: _attention(odd, g, support="causal"), "DtypeError"),
    "support, an unready one": (lambda odd, g: _attention(odd, g, support=support.Support()), "TypeError"),
    "scale of a policy": (lambda odd, g: _attention(odd, g, scale=Moody(True)), "RuntimeError"),
    "value": (lambda odd, g: _attention(odd, g, value=torch.ones(HEADS, N + 1, DIM)), "ShapeError"),
    "query, none": (lambda odd, g: _attention(odd, g, query=None), "Error"),
    "linear_weight, none": (lambda odd, g: _classes(odd, g, linear_weight=None), "Error"),
    "target, none": (lambda odd, g: _classes(odd, g, target=None), "Error"),
    "target, shape": (lambda odd, g: _classes(odd, g, target=torch.arange(N + 1)), "ShapeError"),
    "target, probabilities": (lambda odd, g: _classes(odd, g, target=torch.ones(N, N)), "ValueRangeError"),
    "class weights": (lambda odd, g: _classes(odd, g, weight=torch.ones(N + 1)), "ShapeError"),
    "z_loss": (lambda odd, g: _classes(odd, g, z_loss=-1.0), "ValueRangeError"),
    "reduction": (lambda odd, g: _classes(odd, g, reduction="most"), "ValueRangeError"),
    "positive_key, none": (lambda odd, g: _pairs(odd, g, positive_key=None), "Error"),
    "labels": (lambda odd, g: _pairs(odd, g, labels=torch.arange(N + 1)), "ShapeError"),
    "negative_keys": (lambda odd, g: _pairs(odd, g, negative_keys=torch.ones(3, DIM + 1)), "ShapeError"),
    "negative_keys, dtype": (lambda odd, g: _pairs(odd, g, negative_keys=torch.ones(3, DIM).double()), "DtypeError"),
    "queue": (lambda odd, g: _pairs(odd, g, queue=Queue(3, DIM + 1)), "ShapeError"),
    "queue, no queue": (lambda odd, g: _pairs(odd, g, queue="long"), "Error"),
    "temperature": (lambda odd, g: _pairs(odd, g, temperature=0.0), "ValueRangeError"),
    "temperature of each row": (
        lambda odd, g: _pairs(odd, g, temperature=torch.ones(N), symmetric=True),
        "ValueRangeError",
    ),
    "logit_scale": (
        lambda odd, g: _pairs(
            odd,
            g,
            partita.clip_loss,
            given={"image_features": torch.ones(N, DIM), "text_features": torch.ones(N, DIM), "logit_scale": 1.0},
            **({"logit_scale": torch.ones(2)} if odd else {}),
        ),
        "ShapeError",
    ),
    "labels of supcon": (lambda odd, g: _supcon(odd, g, labels=torch.ones(N)), "DtypeError"),
    "ref_emb": (lambda odd, g: _supcon(odd, g, ref_emb=torch.ones(3, DIM + 1)), "ShapeError"),
    "a state": (lambda odd, g: distributed.merge("state" if odd else state(), g), "DtypeError"),
    "gather": (lambda odd, g: distributed.gather(torch.ones(2, 3), g, 5 if odd else 0), "ShapeError"),
    "gather_bytes": (lambda odd, g: distributed.gather_bytes("text" if odd else b"text", g), "DtypeError"),
}


def state() -> Any:
    return partita.Gibbs(torch.ones(2, 3), torch.ones(4, 3)).state()


def one_rank(group: Any, what: str) -> str:
    """The error of this rank."""
    return error_of(lambda: CALLS[what][0](group.rank() == group.size() - 1, group))


def all_right(group: Any, what: str) -> str:
    """The same call without the mistake: otherwise the check above would show nothing."""
    return error_of(lambda: CALLS[what][0](False, group))


def texts(group: Any) -> list[bytes]:
    """Bytes of every kind, and none."""
    return distributed.gather_bytes(text(group.rank()), group)


def text(rank: int) -> bytes:
    return b"" if rank == 1 else bytes(range(256)) * rank + "Zustandssumme \u00fc".encode()
