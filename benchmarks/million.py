"""A million keys once: time, memory and entropy of a few rows over 10^6 keys, by policy.

    python -m benchmarks.million [--keys 1000000] [--rows 64] [--dim 64]

Prints one JSON line per policy: seconds of a pass with all statistics, peak bytes beyond the operands, mean entropy and
effective width. Keys and queries are of unit variance, so that log n - H is known beforehand (M-SCL-12).
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time

import torch

import partita
from partita import scale


def policies(keys: int, dim: int) -> dict[str, scale.Policy]:
    return {
        "1/sqrt(dim)": scale.InverseSqrt(),
        "log n, reference 512": scale.LogLength(512),
        "kappa log n / dim, calibrated at n": scale.CalibratedLog(keys, math.sqrt(dim)),
        "entropy 6 nats, Gaussian": scale.GaussianEntropy(6.0, math.sqrt(dim)),
        "entropy 6 nats, solved": scale.TargetEntropy(entropy=6.0),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


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
    for name, policy in policies(given.keys, given.dim).items():
        before, start = peak_bytes(), time.perf_counter()
        p = partita.Gibbs(query, key, scale=policy)
        p.expectation(value)
        entropy = p.entropy()
        row = {
            "policy": name, "keys": given.keys, "rows": given.rows, "dim": given.dim,
            "seconds": round(time.perf_counter() - start, 3), "more_bytes": peak_bytes() - before,
            "entropy": round(entropy.mean().item(), 3), "log_n": round(math.log(given.keys), 3),
            "width": round(entropy.exp().mean().item(), 1), "threads": torch.get_num_threads(),
            "backend": str(partita.explain(p)).split()[0],
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
