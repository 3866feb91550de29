"""What a call is for (training, evaluation, generation), errors of sampled rows, and a budget of time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partita
from partita.monitor import handle, measure, observer
from partita.monitor.record import SAMPLED_MEANS, Record


class Layer(nn.Module):
    """Self-attention with a cache of keys, as a decoder has it."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
        query, key, value = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            if past_key_values:
                key, value = (torch.cat(pair, 2) for pair in zip(past_key_values, (key, value), strict=True))
            past_key_values[:] = key, value
        out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=x.shape[1] > 1)
        return out.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Layer()

    def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
        out: Tensor = self.attention(x, past_key_values)
        return out


def train(model: nn.Module, x: Tensor) -> None:
    model.train()(x).sum().backward()


def evaluate(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.eval()(x)


def generate(model: nn.Module, x: Tensor) -> None:
    cache: list[Tensor] = []
    with torch.no_grad():
        model.train()(x, past_key_values=cache)  # as trainers of policies do it, in training mode
        model(x[:, :1], past_key_values=cache)


def score(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model.train()(x)


CALLS = {"train": train, "eval": evaluate, "generate": generate, "other": score}


def frame(w: Any) -> list[dict[str, Any]]:
    return list(w.frame(pandas=False))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_one_step_keeps_its_phases_apart(compiled: bool) -> None:
    """Each phase has the numbers of a watch that saw that phase alone."""
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(2, 6, 8)
    calls = {name: call for name, call in CALLS.items() if not (compiled and name == "generate")}
    run = torch.compile(model, backend="eager") if compiled else model
    with partita.watch(run) as w:
        w.set_step(3)
        for call in calls.values():
            call(run, x)
    assert {row["step"] for row in frame(w)} == {3}
    assert sorted({row["phase"] for row in frame(w)}) == sorted(calls)
    for name, call in calls.items():
        with partita.watch(model) as alone:
            alone.set_step(3)
            call(model, x)
        mine, right = [row for row in frame(w) if row["phase"] == name], frame(alone)
        assert [row["phase"] for row in right] == [name] * len(right)
        for a, b in zip(mine, right, strict=True):
            assert (a["entropy"], a["rows"], a["length"]) == (
                pytest.approx(b["entropy"], abs=1e-6),
                b["rows"],
                b["length"],
            )


def test_phases_are_kept_in_a_file_and_over_ranks(tmp_path: Any) -> None:
    model, x = Decoder(), torch.randn(2, 6, 8)
    with partita.watch(model) as w:
        w.set_step(0)
        train(model, x)
        generate(model, x)
    path = w.save(tmp_path / "run.jsonl")
    loaded = partita.load_record(path)
    assert [b.phase for b in loaded.blocks] == [b.phase for b in w.record.blocks] == ["generate", "train"]
    older = path.read_text().replace(',"phase":"generate"', "").replace(',"phase":"train"', "")
    path.write_text(older)
    assert {b.phase for b in partita.load_record(path).blocks} == {"train"}  # their modules were in training mode
    assert [b.phase for b in partita.monitor.record.merge_records([loaded, loaded]).blocks] == ["generate", "train"]


def test_a_run_is_judged_by_its_training_and_then_by_what_else_it_did() -> None:
    """A head that averages in training and in evaluation is one finding, one that does so while generating another."""
    model, x = Decoder(), torch.randn(2, 40, 8)
    with torch.no_grad():
        model.attention.project.weight.zero_()
        model.attention.project.bias.zero_()
    with partita.watch(model) as w:
        w.set_step(0)
        evaluate(model, x)
        train(model, x)
    uniform = [f for f in w.findings() if f.code == "HEAD_UNIFORM"]
    assert [f.where.endswith("(eval)") for f in uniform] == [False]
    sharp = Decoder()
    with torch.no_grad():
        sharp.attention.project.weight.mul_(30)
    with partita.watch(sharp) as w:
        w.set_step(0)
        train(sharp, x)
        with torch.no_grad():
            sharp.attention.project.weight.zero_()
            sharp.attention.project.bias.zero_()
        evaluate(sharp, x)
    assert [f.where.endswith("(eval)") for f in w.findings() if f.code == "HEAD_UNIFORM"] == [True]
    assert [(phase, len(part.blocks)) for phase, part in w.finished().by_phase()] == [("train", 1), ("eval", 1)]


# ---- sampled rows ----------------------------------------------------------------------------------------------------


def test_sampled_rows_have_the_error_of_their_mean() -> None:
    """sqrt(Var / m * (1 - m / n)) over the m rows taken of n, against the dense definition in float64."""
    torch.manual_seed(0)
    n, m = 64, 16
    model, x = Decoder().eval(), torch.randn(1, n, 8)
    with partita.watch(model, rows=m) as w, torch.no_grad():
        model(x)
    query, key, _ = model.attention.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).detach().double()
    scores = (query @ key.mT / 2).masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
    log_p = scores.log_softmax(-1)
    entropy = -(log_p.exp() * log_p.nan_to_num(0, 0, 0)).sum(-1)[0]
    taken = ((torch.arange(m) + w.observer.count * observer.GOLDEN % 1.0) * (n / m)).long()
    taken = taken[taken > 0]  # the first row sees one key
    for row in frame(w):
        of = entropy[row["head"], taken]
        assert row["entropy"] == pytest.approx(of.mean().item(), rel=1e-5)
        assert row["entropy_se"] == pytest.approx((of.var() / len(of) * (1 - m / n)).sqrt().item(), rel=1e-4)


def test_nothing_is_uncertain_where_every_row_is_looked_at() -> None:
    model, x = Decoder().eval(), torch.randn(1, 16, 8)
    for rows in (None, 16, 99):
        with partita.watch(model, rows=rows) as w, torch.no_grad():
            model(x)
        assert all(row[f"{name}_se"] == 0 for row in frame(w) for name in SAMPLED_MEANS)


def test_the_error_of_several_ranks_is_that_of_independent_means() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    with partita.watch(model, rows=8) as w, torch.no_grad():
        model(torch.randn(2, 32, 8))
    one: Record = w.finished()
    both = partita.monitor.record.merge_records([one, one])
    for a, b in zip(one.blocks[0].column("entropy_se"), both.blocks[0].column("entropy_se"), strict=True):
        assert b == pytest.approx(a / math.sqrt(2), rel=1e-12)


# ---- a budget --------------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes by hand: a second in the model, half a second in what is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_a_budget_bounds_the_share_of_the_time(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, steps = Clock(), 200
    monkeypatch.setattr(handle, "time", clock)
    monkeypatch.setattr(observer, "time", clock)
    whole = measure.measure

    def half_a_second(*args: Any, **kwargs: Any) -> None:
        clock.now += 0.5
        whole(*args, **kwargs)

    monkeypatch.setattr(measure, "measure", half_a_second)

    class Slow(Decoder):
        def forward(self, x: Tensor, past_key_values: list[Tensor] | None = None) -> Tensor:
            clock.now += 1.0
            return super().forward(x, past_key_values)

    model = Slow().eval()
    with partita.watch(model, budget=budget) as w, torch.no_grad():
        for _ in range(steps):
            model(torch.randn(1, 4, 8))
    assert w.overhead["watch_s"] <= budget * steps + 0.5  # and the step that went over it
    assert w.overhead["watch_s"] >= budget * steps - 0.5  # what may be spent is
    assert len({row["step"] for row in frame(w)}) == w.overhead["observed_steps"] == round(w.overhead["watch_s"] / 0.5)


def test_a_budget_takes_rows_and_is_a_share() -> None:
    model = Decoder()
    assert partita.watch(model, budget=0.01).options.rows == 256
    assert partita.watch(model, budget=0.01, rows=32).options.rows == 32
    for wrong in (0, 1, -0.1, True, "1%", math.nan):
        with pytest.raises(ValueError, match=r"budget must be None or a share of the time, such as 0\.01; got"):
            partita.watch(model, budget=wrong)  # type: ignore[arg-type]
