"""A million keys once: time, memory and entropy of a few rows over 10^6 keys, by policy.

    python -m benchmarks.million [--keys 1000000] [--rows 64] [--dim 64]

Prints one JSON line per policy: seconds of a pass for the mean value and one for the entropy, by the clock and of the
processor, peak bytes beyond the operands, mean entropy and effective width. Keys and queries are of unit variance, so
that log n - H is known beforehand (M-SCL-12).
"""

from __future__ import annotations

import argparse
import json
import math
import time

import torch

import partita
from partita import scale

from .peak import peak_of


def policies(keys: int, dim: int) -> dict[str, scale.Policy]:
    return {
        "1/sqrt(dim)": scale.InverseSqrt(),
        "log n, reference 512": scale.LogLength(512),
        "kappa log n / dim, calibrated at n": scale.CalibratedLog(keys, math.sqrt(dim)),
        "entropy 6 nats, Gaussian": scale.GaussianEntropy(6.0, math.sqrt(dim)),
        "entropy 6 nats, solved": scale.TargetEntropy(entropy=6.0),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    given = parser.parse_args()
    torch.manual_seed(0)
    query, key = torch.randn(given.rows, given.dim), torch.randn(given.keys, given.dim)
    value = torch.randn(given.keys, given.dim)
    partita.Gibbs(query[:1], key[:64]).stats()  # the libraries are loaded before anything is counted
    for name, policy in policies(given.keys, given.dim).items():

        def read(policy: scale.Policy = policy) -> tuple[partita.Gibbs, torch.Tensor, torch.Tensor]:
            p = partita.Gibbs(query, key, scale=policy)  # a solved scale is solved here
            return p, p.expectation(value), p.entropy()

        busy = time.process_time()
        more, elapsed = peak_of(read)
        busy = time.process_time() - busy
        p, _, entropy = read()
        row = {
            "policy": name, "keys": given.keys, "rows": given.rows, "dim": given.dim,
            "elapsed_s": round(elapsed, 3), "processor_s": round(busy, 3), "peak_bytes": more,
            "entropy": round(entropy.mean().item(), 3), "log_n": round(math.log(given.keys), 3),
            "width": round(entropy.exp().mean().item(), 1), "threads": torch.get_num_threads(),
            "backend": str(partita.explain(p)).split()[0],
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
