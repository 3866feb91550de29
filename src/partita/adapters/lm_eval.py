"""A model of lm-evaluation-harness 0.4 that scores texts without logits."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partita.hf import token_stats

__all__ = ["PartitaLM", "WithoutLogits"]

PartitaLM: Any  # made when it is first used: lm-eval is optional

_log = logging.getLogger("lm_eval")


@dataclass(frozen=True)
class _Text:
    """Requests that differ in their last token alone: one row of the model's batch."""

    tokens: list[int]  # what the model reads
    labels: list[int]  # what it predicts; the last is that of the first request
    requests: list[tuple[int, int, int]] = field(default_factory=list)  # number, length of the continuation, last token


class WithoutLogits:
    """The scoring of `HFLM` by `partita.hf.token_stats`; put it before a class of lm-eval that inherits from HFLM.

        loglikelihood = sum of log p(continuation | context)        greedy: every token of it is the likeliest

    Requests, truncation, batch sizes ("auto" too), prefix tokens, PEFT and the cache are HFLM's own; so is generation.
    Continuations of one context that differ in their last token, as those of multiple choice, share a row.
    """

    def _loglikelihood_tokens(
        self: Any,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        from tqdm import tqdm

        texts = sorted(self._texts(requests), key=lambda x: -len(x.tokens) - len(x.labels))
        answers: list[Any] = [None] * len(requests)
        sizes: dict[int, int] = {}
        at = 0
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        ) as bar:
            while at < len(texts):
                size = override_bs if self.batch_size == "auto" else self.batch_size
                if not size:
                    turn = at * int(self.batch_schedule) // len(texts)
                    size = sizes[turn] = sizes.get(turn) or self._detect_batch_size(texts, at)
                for text, log_prob, top in zip(
                    texts[at : at + size], *self._token_scores(texts[at : at + size]), strict=True
                ):
                    for k, (i, length, _) in enumerate(text.requests):
                        n = len(text.labels)
                        own = [*log_prob[n - length : n - 1, 0].tolist(), float(log_prob[n - 1, k])]
                        answers[i] = (sum(own), bool(top[n - length : n - 1, 0].all() and top[n - 1, k]))
                        if requests[i][0] is not None:  # windows of a rolling request have none
                            self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
                    bar.update(len(text.requests))
                at += size
        return answers

    def _texts(self: Any, requests: Any) -> list[_Text]:
        found: dict[Any, _Text] = {}
        for i, (_, context, continuation) in enumerate(requests):
            if self.backend == "causal":
                whole = (context + continuation)[-(self.max_length + 1) :]
                if len(whole) < len(context) + len(continuation):
                    _log.warning(
                        f"Combined length of context ({len(context)}) and continuation ({len(continuation)}) exceeds "
                        f"the model's maximum length ({self.max_length}): cut on the left."
                    )
                tokens, labels = whole[:-1], whole[1:]
            else:
                tokens, labels = context[-self.max_length :], continuation[-self.max_length :]
            text = found.setdefault((tuple(tokens), tuple(labels[:-1])), _Text(tokens, labels))
            text.requests.append((i, min(len(continuation), len(labels)), labels[-1]))
        return list(found.values())

    def _token_scores(self: Any, texts: list[_Text]) -> tuple[Tensor, Tensor]:  # (batch, length, K) each
        """log p of each label, and whether it is the likeliest token."""
        width, tall = max(len(x.tokens) for x in texts), max(len(x.labels) for x in texts)
        most = max(len(x.requests) for x in texts)
        ids = torch.zeros(len(texts), width, dtype=torch.int64, device="cpu")
        mask, labels = torch.zeros_like(ids), torch.full((len(texts), tall, most), -100, device="cpu")
        for row, text in enumerate(texts):
            ids[row, : len(text.tokens)] = torch.tensor(text.tokens, device="cpu")
            mask[row, : len(text.tokens)] = 1
            n = len(text.labels)
            first = n - max(length for _, length, _ in text.requests)  # what comes before is context
            labels[row, first:n, 0] = torch.tensor(text.labels[first:], device="cpu")
            labels[row, n - 1, : len(text.requests)] = torch.tensor([last for *_, last in text.requests], device="cpu")
        lower = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, dtype=lower, enabled=lower is not None):
            want = ("log_prob", "is_top" if most == 1 else "top_k:1")  # ranks of K ids take K passes
            found = token_stats(self.model, ids, mask, labels=labels, shift=0, want=want)
        top: Tensor = found.is_top.cpu() if most == 1 else found.top_k_ids.cpu() == labels
        return found.log_prob.double().cpu(), top

    def _detect_batch_size(self: Any, requests: list[_Text] | None = None, pos: int = 0) -> int:
        """The largest batch of the text at `pos`, or of the longest there can be, that fits in memory."""
        from accelerate import find_executable_batch_size

        ones = [1] * int(self.max_length)
        text = requests[pos] if requests else _Text(ones, ones, [(0, len(ones), 1)])

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)  # type: ignore[untyped-decorator]
        def fits(batch_size: int) -> int:
            self._token_scores([text] * batch_size)
            return batch_size

        size = int(fits())
        if self.world_size > 1:
            size = int(self.all_gather(torch.tensor([size], device=self.device)).min())
        return size


@functools.cache
def _model() -> Any:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    made = type("PartitaLM", (WithoutLogits, HFLM), {"__module__": __name__, "__doc__": WithoutLogits.__doc__})
    return register_model("partita")(made)


def __getattr__(name: str) -> Any:
    """`PartitaLM`, which is `HFLM` with this scoring, and the model "partita" of lm-eval's registry."""
    if name == "PartitaLM":
        return _model()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
