"""A two-minute tour of partita: one distribution, read three ways, on real text, with real numbers.

Run it with `make tour`, or `python examples/tour.py`. It needs nothing but partita: the text is the language
reference that ships inside Python itself.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor

import partita

QUICK = "--quick" in sys.argv
WIDTH, CONTEXT, STEPS = 48, 4, 30 if QUICK else 250


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def row(label: str, value: object, note: str = "") -> None:
    shown = f"{value:.4f}" if isinstance(value, float) else str(value)
    print(f"  {label:<44}{shown:>12}   {note}".rstrip())


# ---- 1. classification: the keys are the words of a vocabulary ----


def classification() -> tuple[Tensor, Tensor]:
    """Train a small next-word model; return its word vectors and the words of the held-out text as numbers."""
    pages = [re.findall(r"[a-z_]+|[^\sa-z_]", topics[name].lower()) for name in sorted(topics)]
    vocabulary = [word for word, count in Counter(word for page in pages for word in page).most_common() if count > 1]
    index = {word: i for i, word in enumerate(vocabulary)}
    n_word = len(vocabulary)

    def numbers(pages: list[list[str]]) -> Tensor:
        return torch.tensor([index[word] for page in pages for word in page if word in index])

    train, held_out = numbers([page for i, page in enumerate(pages) if i % 8]), numbers(pages[::8])
    title(f"1. Classification: the next of {n_word} words, {len(train)} words of Python's own reference")

    embedding = (0.1 * torch.randn(n_word, WIDTH)).requires_grad_()
    mixing = (torch.randn(CONTEXT * WIDTH, WIDTH) / math.sqrt(CONTEXT * WIDTH)).requires_grad_()
    output = torch.zeros(n_word, WIDTH, requires_grad=True)
    optimizer = torch.optim.Adam([embedding, mixing, output], lr=0.01)

    def hidden(of: Tensor, at: Tensor) -> Tensor:
        before = of[at[:, None] + torch.arange(CONTEXT)]
        return torch.tanh(F.embedding(before, embedding).flatten(1) @ mixing)

    start, losses = time.perf_counter(), []
    for _ in range(STEPS):
        at = torch.randint(len(train) - CONTEXT, (256,))
        loss = partita.linear_cross_entropy(hidden(train, at), output, train[at + CONTEXT])  # no logits anywhere
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    row("loss at the first step", losses[0], f"log {n_word} = {math.log(n_word):.4f}: it knows nothing yet")
    row(f"loss after {STEPS} steps", sum(losses[-10:]) / 10, f"{time.perf_counter() - start:.1f} s")

    with torch.no_grad():
        at = torch.arange(len(held_out) - CONTEXT)[:1024]
        p, target = partita.Gibbs(hidden(held_out, at), output), held_out[at + CONTEXT]
        rank = p.target_rank(target)
        surprise, expected = p.nll(target).mean().item(), p.entropy().mean().item()
        row("held-out loss, mean of -log p(word)", surprise)
        verdict = "below the loss: too sure of itself" if expected < surprise else "above the loss: too modest"
        row("entropy, mean: the loss it expects", expected, verdict)
        row("words it really hesitates between", p.effective_width().median().item(), "exp(entropy), median")
        row("right word first / among the first ten", f"{percent(rank < 1)} / {percent(rank < 10)}", "rank, same pass")
    return embedding.detach(), held_out


# ---- 2. contrast: the keys are the other members of the batch ----


def contrast(embedding: Tensor, text: Tensor) -> None:
    """Which half sentence goes with which? Word vectors trained to tell, with a symmetric InfoNCE loss."""
    n_pair = 256
    half = text[: n_pair * 24].view(n_pair, 2, 12) if len(text) >= n_pair * 24 else text.new_zeros(0)
    title(f"2. Contrast: {n_pair} pieces of text cut in two, find the other half (the pairs it trains on)")
    table = embedding.clone().requires_grad_()
    optimizer = torch.optim.Adam([table], lr=0.01)
    for step in range(STEPS // 5 + 1):
        left, right = (F.embedding(half[:, side], table).mean(1) for side in (0, 1))
        loss, stats = partita.info_nce_loss(left, right, temperature=0.1, symmetric=True, return_stats=True)
        if step in (0, STEPS // 5):
            hit = partita.Gibbs(F.normalize(left, dim=-1), F.normalize(right, dim=-1), scale=10.0)
            recall = percent(hit.target_rank(torch.arange(n_pair)) < 1)
            row("before training: loss" if step == 0 else f"after {step} steps: loss", loss.item())
            row("  other half found at once", recall)
            row(
                "  information, at least (log n - loss)",
                math.log(n_pair) - loss.item(),
                f"at most log n = {math.log(n_pair):.4f}",
            )
            row("  candidates still in play, exp(entropy)", stats.entropy.exp().mean().item(), f"of {n_pair}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- 3. attention: the keys are the other positions, and a value is averaged ----


def attention(embedding: Tensor, text: Tensor) -> None:
    heads, n = 4, 512
    x = embedding[text[:n]].view(1, n, heads, WIDTH // heads).transpose(1, 2) * 6
    title(f"3. Attention: {n} words look back at each other, {heads} heads")
    out, stats = partita.attention(x, x, x, is_causal=True, return_stats=True)
    expected = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    row("largest difference to torch's own kernel", f"{(out - expected).abs().max().item():.1e}")
    print("  and what that kernel cannot say:")
    for head in range(heads):
        width = stats.entropy[0, head, -1].exp().item()
        peak = stats.max_score[0, head].max().item()
        print(f"    head {head}: the last word looks at {width:6.1f} of {n} words; largest score {peak:6.2f}")


# ---- 4. scales: how sharp, as the number of visible keys grows ----


def lengths() -> None:
    dim, n_query = 64, 32
    title("4. Length: how much of a row's mass stays on its one matching key as others join")
    policies = {
        "1/sqrt(dim)": partita.scale.InverseSqrt(),
        "log-length": partita.scale.LogLength(reference=512),
        "half its entropy": partita.scale.TargetEntropy(fraction=0.5),
    }
    print(f"  {'visible keys':<16}" + "".join(f"{name:>20}" for name in policies))
    query = torch.randn(n_query, dim)
    for n in (128, 512, 2048, 8192) if QUICK else (128, 512, 2048, 8192, 32768):
        key = torch.cat([query, torch.randn(n - n_query, dim)])  # key i matches query i
        mass = []
        for policy in policies.values():
            p = partita.Gibbs(query, key, scale=policy)
            mass.append(p.log_prob(torch.arange(n_query)).exp().mean().item())
        print(f"  {n:<16}" + "".join(f"{100 * x:>19.1f}%" for x in mass))
    print("  The usual scale dilutes: trained at 512, it no longer finds its key at 32768.")


# ---- 5. states: parts of the keys, anywhere, in any order ----


def merging() -> None:
    title("5. Merge: blocks of keys are reduced apart and put together exactly")
    query, key, value = torch.randn(64, 32), torch.randn(5000, 32), torch.randn(5000, 8)
    scale = 32**-0.5
    cuts = [0, 7, 1200, 1201, 4000, 5000]
    states = [partita.Gibbs(query, key[a:b], scale=scale).state(value[a:b]) for a, b in pairwise(cuts)]
    merged = partita.merge(*reversed(states))
    whole = partita.Gibbs(query, key, scale=scale)
    row("blocks of 7, 1193, 1, 2799 and 1000 keys", "", "merged in reverse order")
    row("entropy of a row: merged", merged.stats().entropy[0].item())
    row("entropy of a row: whole", whole.entropy()[0].item())
    row("largest difference of E[value]", f"{(merged.expectation() - whole.expectation(value)).abs().max().item():.1e}")


# ---- 6. memory: nothing of size n_query * n_key ----


def memory() -> None:
    n = 2048 if QUICK else 6144
    title(f"6. Memory: causal attention and its entropy, forward and backward, {n} positions, one head")
    if not Path("/proc/self/clear_refs").exists():
        print("  left out: the peak of a process is read from Linux's /proc")
        return
    for name, label in (("streamed", "partita"), ("eager", "plain torch, which holds the scores")):
        command = [sys.executable, __file__, "--peak", name, str(n)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        extra, elapsed = map(float, out.split())
        row(label, f"{extra / 2**20:.0f} MB", f"{elapsed:.2f} s")


def peak(name: str, n: int) -> None:
    """Runs in a process of its own: peak memory beyond the inputs in bytes, gradients included, and seconds."""
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    partita.attention(q[..., :9, :], k[..., :9, :], v[..., :9, :]).sum().backward()  # loads the code
    q.grad = k.grad = v.grad = None
    before, start = resident("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    if name == "streamed":
        out, stats = partita.attention(q, k, v, is_causal=True, return_stats=True)
        (out.sum() + stats.entropy.sum()).backward()
    else:
        score = (q @ k.mT / 8).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -1e9)
        log_p = score.log_softmax(-1)
        p = log_p.exp()
        ((p @ v).sum() - (p * log_p).sum()).backward()
    elapsed = time.perf_counter() - start
    print(resident("VmHWM") - before, elapsed)


def resident(field: str) -> int:
    """Resident memory of this process in bytes, now (VmRSS) or at its peak (VmHWM)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1)) if found else 0


def percent(which: Tensor) -> str:
    return f"{100 * which.double().mean().item():.0f}%"


def main() -> None:
    if "--peak" in sys.argv:
        return peak(sys.argv[-2], int(sys.argv[-1]))
    torch.manual_seed(0)
    start = time.perf_counter()
    print("partita: one partition function, three faces")
    print("    p(j|i) = exp(scale_i * <query_i, key_j> + bias_ij) / Z_i       j in the support of i")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the first three are small: a second thread would mostly wait for the first
    embedding, text = classification()
    contrast(embedding, text)
    attention(embedding, text)
    torch.set_num_threads(threads)
    lengths()
    merging()
    memory()
    print(f"\nThat took {time.perf_counter() - start:.1f} s on {torch.get_num_threads()} threads.")


if __name__ == "__main__":
    main()
