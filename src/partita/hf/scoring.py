"""Score texts without logits: log p, entropy, rank and more of every token that a Hugging Face model predicts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partita._checks import check_whole, shape_text
from partita.errors import BackendError, ShapeError, ValueRangeError
from partita.hf.lazy_logits import LazyLogits
from partita.hf.logit_free import base_model, language_heads, lazy_logits
from partita.losses import TokenStats

__all__ = ["token_stats"]

IGNORED = -100  # the label that transformers leaves out of a loss


@overload
def token_stats(  # type: ignore[overload-overlap]
    model: nn.Module, input_ids: Tensor | list[Any] | tuple[Any, ...], attention_mask: Tensor | None = None, *,
    labels: Any = None, want: str | Iterable[str] = ("log_prob", "entropy"), batch_size: int | None = None,
    shift: int | None = None, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    min_p: float | None = None, kept: Any = None, grad: bool = False, progress: bool = False, **inputs: Any,
) -> TokenStats: ...  # fmt: skip
@overload
def token_stats(
    model: nn.Module, input_ids: Iterable[Any], attention_mask: None = None, *, labels: None = None,
    want: str | Iterable[str] = ("log_prob", "entropy"), batch_size: int | None = None, shift: None = None,
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, min_p: float | None = None,
    grad: bool = False, progress: bool = False,
) -> Iterator[TokenStats]: ...  # fmt: skip
def token_stats(
    model: nn.Module,
    input_ids: Any,  # (batch, length), a list of sequences, or an iterable of sequences or of rows of a data set
    attention_mask: Tensor | None = None,  # (batch, length)
    *,
    labels: Any = None,  # (batch, length), or (batch, length, K)
    want: str | Iterable[str] = ("log_prob", "entropy"),
    batch_size: int | None = None,
    shift: int | None = None,  # 1 for decoders, 0 with an encoder
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    kept: Any = None,  # (batch, length, k)
    grad: bool = False,
    progress: bool = False,
    **inputs: Any,  # further arguments of the model's forward; tensors have the batch first
) -> TokenStats | Iterator[TokenStats]:
    """`partita.token_stats` of every token that a Hugging Face language model predicts, without its logits.

        log p(token t + 1 | tokens 1 .. t)        with the model's own head, its bias, factor and softcap

    A decoder's results are (batch, length - 1): position t predicts token t + 1. With an encoder, `labels` are required
    and results have their shape. Padding, ignored labels and what would be predicted from padding are 0; a text padded
    on the left has the results of the text alone.

        token_stats(model, **tokenizer(texts, padding=True, return_tensors="pt")).log_prob.sum(-1)

    input_ids: a list of sequences of any length gives one result, padded with 0. Another iterable, of sequences or of
        rows with "input_ids" (and "labels"), is read in batches and gives an iterator: the result of each, unpadded.
    labels: what is predicted, by default the input; the rows of a prompt with labels of -100 skip the head.
    shift: 0 if labels are already those of the next token, (batch, length); results are then (batch, length).
    want, temperature, top_k, top_p, min_p: as in `partita.token_stats`.
    kept: the ids a sampler kept for each of the labels, -1 fills up; of a list one (length, k) per text, of an iterable
        "kept" of its rows.
    batch_size: texts per forward; by default all of a tensor or list, 8 of an iterable.
    grad: keep the graph, where gradients are enabled. progress: show a bar (tqdm).
    """
    if batch_size is not None:
        check_whole("batch_size", batch_size, least=1)
    options = {"want": want, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    inner: Any = base_model(model)
    heads = language_heads(inner, "token_stats")
    if not inner.can_generate():
        raise ValueRangeError(
            f"token_stats scores models that predict one token after another; {type(inner).__name__} does not generate."
        )
    if shift is None:
        shift = 0 if inner.config.is_encoder_decoder else 1
    elif shift not in (0, 1) or (shift == 1 and inner.config.is_encoder_decoder) or (shift == 0 and labels is None):
        raise ValueRangeError(
            f"shift must be 1 for a decoder's own tokens, or 0 with labels= that are already shifted; got {shift!r}."
        )
    scorer = _Scorer(model, inner, heads, options, shift, grad, progress)
    if isinstance(input_ids, Tensor):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, "kept": kept, **inputs}
        return scorer.tensors({name: value for name, value in given.items() if value is not None}, batch_size)
    if attention_mask is not None or inputs:
        named = ", ".join(["attention_mask"] * (attention_mask is not None) + list(inputs))
        raise ValueRangeError(f"{named}: give input_ids as a tensor beside these; sequences are padded by token_stats.")
    if isinstance(input_ids, list | tuple):
        if labels is not None and len(labels) != len(input_ids):
            raise ShapeError(f"labels must be one sequence per text, {len(input_ids)}; got {len(labels)}.")
        if kept is not None and len(kept) != len(input_ids):
            raise ShapeError(f"kept must be one (length, k) per text, {len(input_ids)}; got {len(kept)}.")
        own, ids = ([None] * len(input_ids) if x is None else x for x in (labels, kept))
        return scorer.listed([scorer.row(*given) for given in zip(input_ids, own, ids, strict=True)], batch_size)
    if labels is not None or kept is not None:
        raise ValueRangeError(
            "labels and kept of an iterable stand in its rows: {'input_ids': ..., 'labels': ..., 'kept': ...}."
        )
    return scorer.stream(input_ids, batch_size or 8)


Row = tuple[Tensor, Tensor | None, Tensor | None]  # ids, labels and kept ids of one text


@dataclass(frozen=True, eq=False)
class _Scorer:
    model: nn.Module
    inner: Any  # the language model in it
    heads: list[nn.Linear]
    options: dict[str, Any]  # of partita.token_stats
    shift: int
    grad: bool
    progress: bool

    @property
    def aligned(self) -> bool:
        """Whether labels are one per token of the input: there is no encoder."""
        return not self.inner.config.is_encoder_decoder

    def tensors(self, given: dict[str, Any], batch_size: int | None) -> TokenStats:
        """Of a padded batch, `batch_size` rows at a time."""
        ids, mask = given["input_ids"], given.get("attention_mask")
        if mask is not None and tuple(mask.shape) != tuple(ids.shape[:2]):
            raise ShapeError(
                f"attention_mask must be (batch, length) = {tuple(ids.shape[:2])}; got {shape_text(mask)}."
            )
        n = len(ids)
        parts = (
            {k: v[at] if isinstance(v, Tensor) and len(v) == n else v for k, v in given.items()}
            for at in self.slices(n, batch_size)
        )
        return _joined([self.batch(part) for part in parts])

    def listed(self, rows: list[Row], batch_size: int | None) -> TokenStats:
        """Of texts of any length, the longest first, in the order they were given."""
        if not rows:
            raise ShapeError("token_stats needs a text at least; got an empty list.")
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        parts = (self.padded([rows[i] for i in order[at]]) for at in self.slices(len(rows), batch_size))
        joined = _joined([self.batch(part) for part in parts], max(self.width(row) for row in rows))
        back = torch.tensor(order, dtype=torch.int64, device="cpu").argsort()
        return TokenStats({k: v if v.dim() == 0 else v[back.to(v.device)] for k, v in vars(joined).items()})

    def slices(self, n: int, step: int | None) -> Iterator[slice]:
        """Of n texts, `step` at a time; one of no texts."""
        step = step or max(n, 1)
        with self.bar(n) as bar:
            for i in range(0, max(n, 1), step):
                yield slice(i, i + step)
                bar.update(min(step, n - i))

    def stream(self, texts: Iterable[Any], batch_size: int) -> Iterator[TokenStats]:
        """Of each text, unpadded, as batches are read."""
        source = iter(texts)
        with self.bar(len(texts) if isinstance(texts, Sized) else None) as bar:
            while rows := [self.row(x) for x in islice(source, batch_size)]:
                found = vars(self.batch(self.padded(rows)))
                for i, row in enumerate(rows):
                    yield TokenStats({k: v[i, : self.width(row)] for k, v in found.items() if v.dim()})
                bar.update(len(rows))

    def batch(self, given: dict[str, Any]) -> TokenStats:
        """One forward of the model with heads that give no logits, and the statistics of its tokens."""
        device = self.inner.device
        given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
        labels, ids, mask = given.pop("labels", None), given.pop("input_ids"), given.get("attention_mask")
        kept = given.pop("kept", None)
        takes = inspect.signature(self.inner.forward).parameters
        if self.aligned:
            labels = _of_real(ids if labels is None else labels, mask, self.shift)
            if mask is not None and "position_ids" in takes and not bool(mask[:, :1].all()):
                given.setdefault("position_ids", (mask.long().cumsum(-1) - 1).clamp(min=0))  # as generate() counts
        elif labels is None:
            raise ValueRangeError(f"{type(self.inner).__name__} has an encoder: give labels=, the tokens to score.")
        elif "decoder_input_ids" not in given:
            prepare = getattr(self.inner, "prepare_decoder_input_ids_from_labels", None)
            first = labels if labels.dim() == 2 else labels[..., 0]
            given.update({"labels": first} if prepare is None else {"decoder_input_ids": prepare(labels=first)})
        if "use_cache" in takes:
            given.setdefault("use_cache", False)
        given[self.inner.main_input_name] = ids  # features of sounds, for Whisper
        with torch.set_grad_enabled(self.grad and torch.is_grad_enabled()):
            with lazy_logits(self.heads):
                outputs = self.model(**given)
            logits = outputs.logits if hasattr(outputs, "logits") else outputs[0]
            if not isinstance(logits, LazyLogits):
                raise BackendError(
                    f"{type(self.inner).__name__} makes its logits in a way that is not followed: compute them, and "
                    f"read partita.Gibbs or torch.log_softmax."
                )
            logits = logits[:, -labels.shape[1] :]  # virtual tokens of PEFT come first
            kept = None if kept is None else kept.to(logits.device)
            found: TokenStats = logits.token_stats(
                labels.to(logits.device), shift=self.shift, kept=kept, **self.options
            )
        return found

    def row(self, text: Any, labels: Any = None, kept: Any = None) -> Row:
        """A sequence of ids, or a row of a data set, which may be padded."""
        mask = None
        if isinstance(text, Mapping):
            labels = text.get("labels") if labels is None else labels
            kept = text.get("kept") if kept is None else kept
            text, mask = text["input_ids"], text.get("attention_mask")
        ids, labels = _whole(text), None if labels is None else _whole(labels)
        kept = None if kept is None else torch.as_tensor(kept, device=ids.device).long()
        if mask is not None:
            real = _whole(mask).bool()
            labels, kept = (x[real] if x is not None and self.aligned else x for x in (labels, kept))
            ids = ids[real]
        if labels is not None and self.aligned and len(labels) != len(ids):
            raise ShapeError(f"labels of a text must be one per token, {len(ids)}; got {len(labels)}.")
        length = len(ids if labels is None else labels)
        if kept is not None and (kept.dim() != 2 or len(kept) != length):
            raise ShapeError(f"kept of a text must be {(length, 'k')}, ids for each label; got {shape_text(kept)}.")
        return ids, labels, kept

    def padded(self, rows: list[Row]) -> dict[str, Tensor]:
        """A batch, padded on the right."""
        pad = getattr(self.inner.config.get_text_config(), "pad_token_id", None)
        ids, labels, kept = ([x for x in column if x is not None] for column in zip(*rows, strict=True))
        real = _stacked([torch.ones_like(x, device="cpu") for x in ids], 0)
        batch = {"input_ids": _stacked(ids, pad if isinstance(pad, int) and pad >= 0 else 0), "attention_mask": real}
        if labels:
            batch["labels"] = _stacked([own if y is None else y for own, y, _ in rows], IGNORED)
        if kept:
            if len(kept) < len(rows):
                raise ShapeError(f"kept must be given for each text, {len(rows)}; got {len(kept)}.")
            most = max(x.shape[1] for x in kept)
            batch["kept"] = _stacked([F.pad(x, (0, most - x.shape[1]), value=-1) for x in kept], -1)
        return batch

    def width(self, row: Row) -> int:
        """How many tokens of a text have results."""
        ids, labels, _ = row
        return max(len(ids) - 1, 0) if self.shift else 0 if labels is None else len(labels)

    def bar(self, total: int | None) -> Any:
        from tqdm.auto import tqdm

        return tqdm(total=total, disable=not self.progress, unit="text")


def _of_real(labels: Tensor, mask: Tensor | None, shift: int) -> Tensor:
    """Labels without those of padding and those that padding would predict."""
    if mask is None:
        return labels
    real = mask.bool()
    if shift:
        real = real & F.pad(real[:, :-1], (1, 0), value=True)
    return torch.where(real if labels.dim() == 2 else real[..., None], labels, torch.full_like(labels, IGNORED))


def _joined(parts: list[TokenStats], width: int | None = None) -> TokenStats:
    """Batches in one, of this width; counts add up."""

    def joined(column: list[Tensor]) -> Tensor:
        if column[0].dim() == 0:
            return torch.stack(column).sum()
        missing = [0 if width is None else width - x.shape[1] for x in column]
        return torch.cat([F.pad(x, (0, 0) * (x.dim() - 2) + (0, n)) for x, n in zip(column, missing, strict=True)])

    return TokenStats({name: joined([vars(part)[name] for part in parts]) for name in vars(parts[0])})


def _stacked(rows: list[Tensor], value: int) -> Tensor:  # (n, longest, ...), of length 1 at least
    least = rows[0].new_empty(1, *rows[0].shape[1:])
    return nn.utils.rnn.pad_sequence([*rows, least], batch_first=True, padding_value=value)[:-1]


def _whole(ids: Any) -> Tensor:
    found = torch.as_tensor(ids, device=None if isinstance(ids, Tensor) else "cpu").long()
    if found.dim() != 1:
        raise ShapeError(
            f"a text must be a sequence of token ids, one per position; got {shape_text(found)}. A single text stands "
            f"in a list, [ids]."
        )
    return found
