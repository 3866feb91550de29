"""What a watch does with a report from a compiled graph: it looks as it would have, had the call been seen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita import Stats
from partita.engine.terms import Term, unpack
from partita.interception import named
from partita.monitor.compiled import SILENT
from partita.monitor.coverage import Coverage
from partita.monitor.losses import FACES
from partita.monitor.modules import Frame, Roll, stacks_layers
from partita.monitor.operator import Site
from partita.monitor.scores import Scores, sdpa_scores
from partita.support import Support

if TYPE_CHECKING:
    from partita.monitor.functions import FunctionMode

BY_NAME = {face.__name__: entry for face, entry in FACES.items()}


@dataclass(frozen=True, eq=False)
class Bound(Support):
    """A support whose terms are known."""

    terms: tuple[Term, ...]

    def bind(self, *_: Any) -> tuple[Term, ...]:
        return self.terms


class Graphs:
    """What one watch knows of the graphs that reported to it."""

    def __init__(self, mode: FunctionMode, roll: Roll, called: dict[str, int]) -> None:
        self.mode, self.roll, self.called = mode, roll, called
        self.seen: set[str] = set()  # modules whose softmax was
        self.unseen: dict[str, None] = {}  # losses that could not be asked
        self.silent = False  # a graph ran that does not report
        self._known: dict[tuple[int, int], tuple[Frame, ...] | None] = {}  # by site and compiled module

    def reported(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A graph tells of one of its calls, while it runs: a graph of the code of the innermost module called."""
        root = self.mode.watch.observer.stack[-1].module
        place = site.number, id(root)
        if place not in self._known:
            self._known[place] = self._frames(site, root)
            if site.about is not None:
                self._read(site.about, root)
        frames = self._known[place]
        if frames is None or site.about is not None or not self.mode.watch.listening():
            return
        observer = self.mode.watch.observer
        depth = len(observer.stack)
        observer.stack.extend(frames)
        try:
            self.mode.watch.guard(lambda: self._look(site, args, kwargs))
        finally:
            del observer.stack[depth:]

    def pass_over(self) -> None:
        self.silent = True

    def remarks(self, found: Coverage, seen: set[str]) -> list[str]:
        """What to say of graphs beside the coverage, of all modules seen; those seen inside graphs are added to it."""
        more = [SILENT] if self.silent else []
        if inside := sorted(self.seen & seen):
            found["in_graphs"] = inside
            more.append(f"{len(inside)} of them inside graphs of torch.compile")
        if self.unseen:
            more.append(f"losses not seen, because objects are no part of a graph: {', '.join(self.unseen)}")
        return more

    def _read(self, about: Any, root: nn.Module) -> None:
        """What a graph says of itself, once."""
        for path in about.modules | about.by_hand:
            with contextlib.suppress(AttributeError):
                module = root.get_submodule(path)
                name = self.roll.name(module)
                if name is not None:
                    self.called[name] = self.called.get(name, 0) + 1
                    if path in about.by_hand:
                        self.mode.watch.observer.by_hand[name] = type(module).__name__

    def _frames(self, site: Site, root: nn.Module) -> tuple[Frame, ...] | None:
        """The modules around a call, below the compiled one; None where the call is not in the watched model."""
        path = site.path + (".self_attn" if site.kind == "encoder layer" else "")
        parts = path.split(".") if path else []
        # a decoder that is told a mask of its own does not inherit that of the model
        two = bool(getattr(getattr(root, "config", None), "is_encoder_decoder", False))
        try:
            chain = [root.get_submodule(".".join(parts[:end])) for end in range(1, len(parts) + 1)]
        except AttributeError:
            return None
        if self.roll.name(chain[-1] if chain else root) is None:
            return None
        known = [(self.roll.name(module), module) for module in chain]
        return tuple(Frame(n, m, None, two and stacks_layers(m), False) for n, m in known if n is not None)

    def _look(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Inside the frames of the call."""
        observer = self.mode.watch.observer
        if site.kind == "face" and args[0] == "attention":
            if not args[3]:
                raise ValueError("a score that is a function of its own, or a position bias too large for a close look")
            self._attention(site.cross, *args[1], **args[2])
        elif site.kind == "face" or site.kind in BY_NAME:
            face, given, more, plain = args if site.kind == "face" else (site.kind, args, kwargs, True)
            title, ask = BY_NAME[face]
            if plain:
                observer.lose(title, ask(*given, **more))
            else:
                self.unseen[title] = None
            return
        elif site.kind == "softmax":
            self.mode.look_softmax(args[0] if args else kwargs["input"], None, site.cross)
        elif site.kind in FUSED:
            scores = FUSED[site.kind](*args, **kwargs)
            if scores is not None:
                observer.attend("MultiheadAttention", scores.first.shape, lambda: scores, False)
        else:
            self.mode.look_sdpa(named(args, kwargs), site.kind, site.cross, kwargs["stats"])
        self.seen.add(observer.stack[-1].name)

    def _attention(
        self,
        cross: bool,
        query: Tensor,
        key: Tensor,
        scale: Any,
        mask: Tensor | None,
        causal: bool,
        softcap: float | None,
        *,
        stats: Any,
        shown: list[Tensor],
        layout: list[int] | None,
        shape: Any,
    ) -> None:
        """Attention of partita, as `traced` has marked it."""
        support = None if layout is None else Bound(unpack(shown, layout))
        call = Scores(query, key, scale, mask, causal, support, softcap)
        self.mode.watch.observer.attend("partita", shape, lambda: call, cross, Stats(*stats))


def _encoder_layer(
    x: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, out_weight: Any, out_bias: Any, gelu: Any,
    norm_first: bool, eps: float, norm_weight: Tensor, norm_bias: Tensor, *rest: Any,
) -> Scores | None:  # fmt: skip
    """The attention inside torch's fused encoder layer."""
    if x.is_nested:
        return None
    given = F.layer_norm(x, (width,), norm_weight, norm_bias, eps) if norm_first else x
    mask, kind = (*rest[6:8], None, None)[:2]
    return _projected(given, heads, weight, bias, mask, kind)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor, out_weight: Any,
    out_bias: Any, mask: Tensor | None = None, need_weights: bool = True, average: bool = True, kind: Any = None,
) -> Scores | None:  # fmt: skip
    """torch's fused self-attention."""
    return None if query.is_nested else _projected(query, heads, weight, bias, mask, kind)


def _projected(x: Tensor, heads: int, weight: Tensor, bias: Tensor, mask: Tensor | None, kind: Any) -> Scores:
    """kind: 0 for a mask (n, n), 1 for padded keys (batch, n), 2 for both, (batch, heads, n, n); True is hidden."""
    rows = 2 * weight.shape[0] // 3
    query, key = (
        t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in F.linear(x, weight[:rows], bias[:rows]).chunk(2, -1)
    )
    if mask is not None:
        mask = ~mask if mask.dtype == torch.bool else mask
        mask = mask[:, None, None, :] if kind == 1 else mask
    return sdpa_scores(query, key, mask, False, query.shape[-1] ** -0.5)


FUSED: dict[str, Callable[..., Scores | None]] = {"encoder layer": _encoder_layer, "fused attention": _fused}
