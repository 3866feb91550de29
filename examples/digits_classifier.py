"""Train a digits classifier and let its statistics speak: accuracy, rank, confidence, calibration, and other losses.

Run it with `python examples/digits_classifier.py`. It needs scikit-learn for the 1,797 handwritten digits. With --study
it repeats the comparison of losses over seeds; `partita study run loss_choice` does so with intervals and a figure.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from partita import metrics
from partita.calibration import fit_temperature
from partita.losses import LossStats, cross_entropy, focal_loss, linear_cross_entropy, mae_loss, mse_loss

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("This example reads the digits of scikit-learn: pip install scikit-learn")

STEPS = 20 if "--quick" in sys.argv else 150


def row(label: str, value: float, note: str = "") -> None:
    print(f"  {label:<44}{value:>9.4f}   {note}".rstrip())


def data() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order[:1000], order[1000:1400], order[1400:]
    return tuple(t for part in parts for t in (x[part], y[part]))  # type: ignore[return-value]


def train(x: Tensor, y: Tensor, loss: str, seed: int = 0) -> tuple[nn.Module, nn.Linear]:
    torch.manual_seed(seed)
    body, head = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 10)
    optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=0.01)
    explicit = {
        "focal": focal_loss,
        "squared": mse_loss,
        "absolute": mae_loss,
        "smoothed": lambda z, y: cross_entropy(z, y, label_smoothing=0.1),
        "weighted": lambda z, y: cross_entropy(z, y, weight=1 / y.bincount(minlength=10).clamp(min=1)),
    }
    for _ in range(STEPS):
        if loss == "cross entropy":
            value = linear_cross_entropy(body(x), head.weight, y, linear_bias=head.bias)
        else:
            value = explicit[loss](head(body(x)), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return body, head


def disturb(y: Tensor, share: float, seed: int) -> Tensor:
    """A share of the labels replaced by random ones."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=generator) < share
    return torch.where(wrong, torch.randint(10, y.shape, generator=generator), y)


@torch.no_grad()
def judge(body: nn.Module, head: nn.Linear, x: Tensor, y: Tensor, temperature: float = 1.0) -> LossStats:
    _, stats = linear_cross_entropy(
        body(x), head.weight, y, scale=1 / temperature, linear_bias=head.bias / temperature, return_stats=True
    )
    assert isinstance(stats, LossStats)
    return stats


def main() -> None:
    x, y, x_tune, y_tune, x_test, y_test = data()

    print("Cross entropy, held-out digits: all of this from one pass")
    body, head = train(x, y, "cross entropy")
    stats = judge(body, head, x_test, y_test)
    row("loss", stats.nll.mean().item())
    row("accuracy", metrics.top_k_accuracy(stats).item())
    row("accuracy, best two", metrics.top_k_accuracy(stats, 2).item())
    row("mean reciprocal rank", metrics.mean_reciprocal_rank(stats).item())
    row("effective number of classes, exp(H)", stats.entropy.exp().mean().item(), "1 is certain, 10 knows nothing")
    hard = stats.nll.argmax().item()
    row("the most surprising digit", stats.nll[hard].item(), f"a {y_test[hard]}, rank {int(stats.target_rank[hard])}")

    print("\nThe same head made five times too sharp, and cured with one number")
    with torch.no_grad():
        head.weight *= 5
        head.bias *= 5
    before = judge(body, head, x_test, y_test)
    temperature = fit_temperature(body(x_tune).detach(), head.weight, y_tune, bias=head.bias).item()
    after = judge(body, head, x_test, y_test, temperature)
    row("temperature found by Newton steps", temperature)
    for name, s in (("before", before), ("after", after)):
        row(f"calibration error {name}", metrics.expected_calibration_error(s).item(), f"loss {s.nll.mean():.4f}")

    print("\nWith 40 % of the training labels replaced by random ones, on clean digits")
    noisy = disturb(y, 0.4, 0)
    for name in ("cross entropy", "focal", "squared", "absolute"):
        stats = judge(*train(x, noisy, name), x_test, y_test)
        ece = metrics.expected_calibration_error(stats).item()
        row(name, metrics.top_k_accuracy(stats).item(), f"accuracy; calibration error {ece:.3f}")


def study(seeds: int = 5) -> None:
    """Accuracy (mean and standard error over seeds) of every loss under clean, noisy and imbalanced training labels."""
    x, y, _, _, x_test, y_test = data()
    keep = torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < torch.where(y < 5, 1.0, 0.04)
    conditions = {
        "clean": lambda seed: (x, y),
        "40 % random labels": lambda seed: (x, disturb(y, 0.4, seed)),
        "classes 5-9 rare, 1:25": lambda seed: (x[keep], y[keep]),
    }
    print("| loss | " + " | ".join(conditions) + " | accuracy on the rare classes | calibration error, clean |")
    print("|---|" + "---|" * (len(conditions) + 2))
    for name in ("cross entropy", "smoothed", "weighted", "focal", "squared", "absolute"):
        cells, balanced, error = [], torch.zeros(seeds), torch.zeros(seeds)
        for condition, make in conditions.items():
            right = torch.zeros(seeds)
            for seed in range(seeds):
                stats = judge(*train(*make(seed), name, seed), x_test, y_test)
                right[seed] = metrics.top_k_accuracy(stats)
                if condition == "clean":
                    error[seed] = metrics.expected_calibration_error(stats)
                if "rare" in condition:
                    balanced[seed] = stats.correct[y_test >= 5].float().mean()
            cells.append(f"{right.mean():.3f} ± {right.std() / seeds**0.5:.3f}")
        print(f"| {name} | {' | '.join(cells)} | {balanced.mean():.3f} | {error.mean():.3f} |", flush=True)


if __name__ == "__main__":
    study() if "--study" in sys.argv else main()
