"""What is recorded of a loss is the loss's own statistics, with any options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import partita
from partita.contrastive import Queue
from partita.monitor import watch
from partita.monitor.hooks import FunctionMode


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def row_of(loss: Any, *args: Any, **options: Any) -> tuple[dict[str, Any], Any]:
    """The recorded row of one call, and what the call gave."""
    model = nn.Linear(2, 2)
    with watch(model) as w:
        model(torch.zeros(1, 2))
        out = loss(*args, **options)
    assert not w.coverage.get("errors"), str(w.coverage)
    (row,) = w.record.losses
    return row, out


def pairs(n: int = 12, dim: int = 5) -> tuple[Tensor, Tensor]:
    q = torch.randn(n, dim)
    return q, q + 0.5 * torch.randn(n, dim)


def dense(scores: Tensor, positive: Tensor) -> dict[str, float]:
    """Numbers of (n, candidates) scores with -inf where there is no candidate, in float64."""
    s = scores.double()
    log_p = s.log_softmax(-1)
    p = log_p.exp()
    rest = s.scatter(1, positive[:, None], -math.inf)
    share = rest.softmax(-1)
    width = (-torch.where(share > 0, share * share.clamp(min=1e-300).log(), 0.0).sum(-1)).exp()
    return {
        "loss": float(-log_p.gather(1, positive[:, None]).mean()),
        "entropy": float(-torch.where(p > 0, p * log_p, 0.0).sum(-1).mean()),
        "confidence": float(p.amax(-1).mean()),
        "accuracy": float((s.argmax(-1) == positive).double().mean()),
        "log_partition": float(s.logsumexp(-1).mean()),
        "max_score": float(s.max()),
        "candidates": float((s > -math.inf).sum(-1).double().mean()),
        "effective_negatives": float(width.mean()),
        "rows": len(s),
    }


def assert_row(row: dict[str, Any], want: dict[str, float]) -> None:
    for name, value in want.items():
        assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), f"{name}: {row[name]}, and it is {value}"


def cosine(q: Tensor, k: Tensor) -> Tensor:
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T


@pytest.mark.parametrize("how", ["number", "tensor", "log_temperature", "keywords"])
def test_a_temperature_is_reported_as_it_is(how: str) -> None:
    q, k = pairs()
    options: dict[str, Any] = {
        "number": {"temperature": 0.3},
        "tensor": {"temperature": torch.tensor(0.3, requires_grad=True)},
        "log_temperature": {"log_temperature": torch.tensor(0.3).log().requires_grad_()},
        "keywords": {"temperature": 0.3, "query": q, "positive_key": k},
    }[how]
    row, loss = row_of(partita.info_nce_loss, *(() if how == "keywords" else (q, k)), **options)
    assert isinstance(loss, Tensor) and row["scale"] == pytest.approx(1 / 0.3)
    assert_row(row, dense(cosine(q, k) / 0.3, torch.arange(12)))
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert row["bound"] == pytest.approx(math.log(12) - row["loss"], abs=1e-5)


def test_a_learned_temperature_is_followed_through_the_module() -> None:
    q, k = pairs()
    module = partita.nn.InfoNCELoss(temperature=0.5, learnable=True)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(math.log(0.1))
    row, _ = row_of(module, q, k)
    assert row["scale"] == pytest.approx(10.0, rel=1e-5)


def test_labels_queue_and_hardness_are_those_of_the_call() -> None:
    q, k = pairs()
    labels = torch.arange(12) % 4
    own = torch.eye(12, dtype=torch.bool)
    same = (labels[:, None] == labels) & ~own
    row, _ = row_of(partita.info_nce_loss, q, k, temperature=0.5, labels=labels)
    assert_row(row, dense((cosine(q, k) / 0.5).masked_fill(same, -math.inf), torch.arange(12)))

    queue = Queue(7, 5)
    queue.push(torch.randn(7, 5))
    row, _ = row_of(partita.info_nce_loss, q, k, temperature=0.5, queue=queue)
    assert_row(row, dense(torch.cat([cosine(q, k), cosine(q, queue.keys)], 1) / 0.5, torch.arange(12)))
    assert row["candidates"] == 19

    row, _ = row_of(partita.info_nce_loss, q, k, temperature=0.5, hardness=1.5)
    tilted = cosine(q, k) * torch.where(own, 2.0, 2.0 + 1.5)
    right = dense(cosine(q, k), torch.arange(12))["accuracy"]  # accuracy is read without the weights
    assert_row(row, dense(tilted, torch.arange(12)) | {"accuracy": right})


@pytest.mark.parametrize("mode", ["unpaired", "paired"])
def test_given_negatives(mode: str) -> None:
    q, k = pairs()
    negatives = torch.randn(7, 5) if mode == "unpaired" else torch.randn(12, 7, 5)
    row, _ = row_of(partita.info_nce_loss, q, k, negatives, temperature=0.5, negative_mode=mode)
    unit = F.normalize(q, dim=-1)
    rest = F.normalize(negatives, dim=-1)
    other = unit @ rest.T if mode == "unpaired" else (unit[:, None] * rest).sum(-1)
    own = (unit * F.normalize(k, dim=-1)).sum(-1, keepdim=True)
    assert_row(row, dense(torch.cat([own, other], 1) / 0.5, torch.zeros(12, dtype=torch.long)))


def test_clip_two_views_and_labels() -> None:
    q, k = pairs()
    row, _ = row_of(partita.clip_loss, q, k, torch.tensor(1.7), 0.3)
    assert_row(row, dense(q @ k.T * 1.7 + 0.3, torch.arange(12)))
    assert row["norm_query"] == pytest.approx(q.norm(dim=-1).mean().item(), rel=1e-5)
    assert row["norm_key"] == pytest.approx(k.norm(dim=-1).mean().item(), rel=1e-5)

    row, _ = row_of(partita.nt_xent_loss, q, k, temperature=0.4)
    both = torch.cat([q, k])
    s = (cosine(both, both) / 0.4).fill_diagonal_(-math.inf)
    assert_row(row, dense(s, torch.arange(24).roll(12)))
    assert row["scale"] == pytest.approx(2.5) and row["bound"] == pytest.approx(math.log(23) - row["loss"], abs=1e-4)

    labels = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4])  # the last anchor has no positive
    row, loss = row_of(partita.supcon_loss, q, labels, temperature=0.2)
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-5) and row["rows"] == 11
    s = (cosine(q, q) / 0.2).fill_diagonal_(-math.inf)
    other = labels[:, None] != labels
    rest = s.masked_fill(~other, -math.inf).double().softmax(-1)
    width = (-(rest * rest.clamp(min=1e-300).log()).sum(-1)).exp()
    assert row["effective_negatives"] == pytest.approx(width[:11].mean().item(), rel=1e-4)
    assert row["candidates"] == pytest.approx(other.sum(-1)[:11].double().mean().item() + 1)
    right = other.logical_not().gather(1, s.argmax(1, keepdim=True))[:11].double().mean().item()
    assert row["accuracy"] == pytest.approx(right)


def test_a_shifted_head_is_read_at_its_targets() -> None:
    x, weight, ids = torch.randn(3, 9, 6), torch.randn(11, 6), torch.randint(0, 11, (3, 9))
    scale = torch.rand(3, 9) + 0.5
    row, loss = row_of(partita.linear_cross_entropy, x, weight, ids, shift=1, scale=scale)
    logits = (scale[:, :-1, None] * (x[:, :-1] @ weight.T)).flatten(0, 1)
    want = dense(logits, ids[:, 1:].flatten())
    assert_row(row, {name: want[name] for name in ("loss", "entropy", "confidence", "accuracy", "max_score", "rows")})
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("ignored", [None, -100, 3])
def test_ignored_rows(ignored: int | None) -> None:
    x, weight, ids = torch.randn(20, 6), torch.randn(11, 6), torch.randint(0, 11, (20,))
    if ignored is not None:
        ids[::3] = ignored
    row, _ = row_of(partita.linear_cross_entropy, x, weight, ids, ignore_index=ignored)
    kept = torch.ones(20, dtype=torch.bool) if ignored is None else ids != ignored
    want = dense((x @ weight.T)[kept], ids[kept])
    assert_row(row, {name: want[name] for name in ("loss", "entropy", "confidence", "accuracy", "rows")})
    if ignored is not None:
        row, _ = row_of(F.cross_entropy, x @ weight.T, ids, ignore_index=ignored)
        assert_row(row, {name: want[name] for name in ("loss", "entropy", "confidence", "accuracy", "rows")})


def test_logits_of_a_batch_of_pairs_are_read_as_contrast() -> None:
    q, k = pairs()
    row, _ = row_of(F.cross_entropy, q @ k.T, torch.arange(12))
    assert row["type"] == "contrastive"
    assert_row(row, dense(q @ k.T, torch.arange(12)))
    row, _ = row_of(partita.cross_entropy, q @ k.T, torch.randint(0, 12, (12,)), scale=0.3)
    assert row["type"] == "classification" and row["max_score"] == pytest.approx((0.3 * q @ k.T).max().item(), rel=1e-5)


def test_watching_changes_no_bit_of_the_loss() -> None:
    x, weight = torch.randn(30, 6, requires_grad=True), torch.randn(11, 6, requires_grad=True)
    ids = torch.randint(0, 11, (30,))
    found = []
    for watched in (False, True):
        if watched:
            _, loss = row_of(partita.linear_cross_entropy, x, weight, ids)
        else:
            loss = partita.linear_cross_entropy(x, weight, ids)
        found.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Encoder(nn.Module):
    """What sentence-transformers calls a model: features in, a dictionary with an embedding out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        out, _ = self.attention(*(features["x"],) * 3)
        return {"sentence_embedding": out.mean(1)}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("columns", [2, 3])
def test_the_loss_of_sentence_transformers_is_seen_and_is_one_step(columns: int, cached: bool) -> None:
    """Each sentence counts once, also where it is embedded again on the way back."""
    from partita.adapters import sentence_transformers as losses

    model = nn.Sequential(Encoder())
    if cached:
        pytest.importorskip("sentence_transformers", reason="pip install sentence-transformers")
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    else:
        loss = losses.MultipleNegativesRankingLoss(model, scale=20.0)
    features = [{"x": torch.randn(6, 4, 8)} for _ in range(columns)]
    with watch(model) as w:
        for _ in range(3):
            out = loss(features, None)
            out.backward()
    assert [r["step"] for r in w.record.losses] == [0, 1, 2]
    assert sorted({r["step"] for r in w.frame(pandas=False)}) == [0, 1, 2]
    assert {r["rows"] for r in w.frame(pandas=False)} == {6 * 4 * columns}
    assert [site.name for site in w.record.sites] == ["0.attention"]
    row = w.record.losses[0]
    assert row["loss"] == pytest.approx(out.item(), abs=1e-4)
    with torch.no_grad():
        q, *docs = (model(f)["sentence_embedding"] for f in features)
    if not cached:
        assert row["name"] == "MultipleNegativesRankingLoss"
        assert_row(row, dense(cosine(q, torch.cat(docs)) * 20.0, torch.arange(6)))
        assert row["scale"] == 20.0 and row["candidates"] == 6 * (columns - 1)


def test_inputs_of_an_evaluation_are_counted_one_by_one() -> None:
    model = nn.Sequential(Encoder())

    class Evaluation(nn.Module):
        def forward(self) -> None:
            for _ in range(3):
                model({"x": torch.randn(2, 4, 8)})

    with watch(model) as w, torch.no_grad():
        Evaluation()()
    assert w.record.steps() == [0, 1, 2]


@pytest.mark.parametrize("name", ["SupConLoss", "NTXentLoss"])
@pytest.mark.parametrize("mined", [False, True])
def test_the_losses_of_metric_learning_are_seen(name: str, mined: bool) -> None:
    from partita.adapters import metric_learning

    loss, x, labels = getattr(metric_learning, name)(0.5), torch.randn(9, 4), torch.arange(9) % 3
    anchor, partner = torch.triu_indices(9, 9, 1)
    same = labels[anchor] == labels[partner]
    tuples = (anchor[same], partner[same], anchor[~same], partner[~same]) if mined else None
    with watch(nn.Identity()) as w:
        w.set_step(0)
        out = loss(x, labels, tuples)
    row = w.loss_frame(pandas=False)[0]
    assert row["name"] == "pair_loss" and row["loss"] == pytest.approx(out.item(), rel=1e-5)
    s = cosine(x, x) / 0.5
    seen = torch.zeros(9, 9, dtype=torch.bool)
    seen[anchor, partner] = True
    seen = seen if mined else ~torch.eye(9, dtype=torch.bool)
    has = (seen & (labels[:, None] == labels)).any(1)
    width = s.double().masked_fill(~(seen & (labels[:, None] != labels)), -torch.inf).softmax(-1)
    width = torch.special.entr(width.nan_to_num(0.0)).sum(-1).exp()
    if not mined:
        assert row["effective_negatives"] == pytest.approx(width[has].mean().item(), rel=1e-4)
    p = s.double().masked_fill(~seen, -torch.inf).softmax(-1)[has]
    assert row["rows"] == int(has.sum())
    assert row["entropy"] == pytest.approx(torch.special.entr(p).sum(-1).mean().item(), rel=1e-4)


class Towers(nn.Module):
    """Two encoders that are called one after the other, as open_clip's encode_image and encode_text do."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text = Encoder(), Encoder()


@pytest.mark.parametrize("name", ["open_clip.ClipLoss", "open_clip.SigLipLoss", "SupConLoss", "NTXentLoss"])
def test_a_training_step_behind_each_other_adapter_is_one_step(name: str) -> None:
    from partita.adapters import metric_learning, open_clip

    model, labels = Towers(), torch.arange(6) % 3
    loss = getattr(open_clip if "." in name else metric_learning, name.removeprefix("open_clip."))()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    with watch(model) as w:
        for _ in range(3):
            image, text = (
                F.normalize(tower({"x": torch.randn(6, 4, 8)})["sentence_embedding"], dim=-1)
                for tower in (model.visual, model.text)
            )
            out = loss(image, text, 5.0, -1.0) if "." in name else loss(image, labels) + 0.0 * text.sum()
            optimizer.zero_grad()
            out.backward()
            optimizer.step()
            if name == "open_clip.ClipLoss":  # of two directions the record has that of the images
                scores = 5.0 * image @ text.T
                out = (scores.logsumexp(1) - scores.diagonal()).mean()
            said.append(out.item())
    assert [row["step"] for row in w.record.losses] == w.record.steps() == [0, 1, 2]
    assert [row["loss"] for row in w.record.losses] == pytest.approx(said, rel=1e-5)
    frame = w.frame(pandas=False)
    assert {row["name"] for row in frame} == {"visual.attention", "text.attention"}
    assert {row["rows"] for row in frame} == {6 * 4}


def test_siglip_is_seen_without_a_distribution() -> None:
    from partita.adapters.open_clip import SigLipLoss

    image, text = torch.randn(5, 4), 2.0 * torch.nn.functional.normalize(torch.randn(5, 4), dim=-1)
    with watch(nn.Identity()) as w:
        w.set_step(0)
        out = SigLipLoss()(image, text, 3.0, -1.0)
    row = w.loss_frame(pandas=False)[0]
    assert row["name"] == "siglip_loss" and row["loss"] == pytest.approx(out.item(), rel=1e-5)
    assert row["norm_key"] == pytest.approx(2.0) and "entropy" not in row
    assert [f.code for f in w.findings()] == ["NOT_NORMALISED"]
    w.finished().summary()


# ---- every loss ------------------------------------------------------------------------------------------------------


def every_loss() -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for each public loss, by its name; the test below holds that none is missing."""
    torch.manual_seed(2)
    logits, ids, q, k = torch.randn(9, 5, requires_grad=True), torch.arange(9) % 5, torch.randn(9, 4), torch.randn(9, 4)
    w, w2, heads = torch.randn(5, 4), torch.randn(5, 3), torch.randn(2, 3, 6, 4)
    classes = {name: ((logits, ids), {}) for name in ("cross_entropy", "focal_loss", "brier_loss", "mae_loss")}
    return {
        **classes,
        "linear_cross_entropy": ((q, w, ids), {}),
        "distillation_loss": ((logits, torch.randn(9, 5)), {"temperature": 2.0}),
        "linear_distillation_loss": ((q, w, torch.randn(9, 3), w2), {}),
        "attention_divergence": ((heads, heads + 1, heads - 1, heads * 2), {"is_causal": True}),
        "nce_loss": ((torch.randn(9), torch.randn(9, 3), torch.zeros(9), torch.zeros(9, 3)), {}),
        "gaussian_nll_loss": ((q, k, 0.7), {}),
        "laplace_nll_loss": ((q, k), {"reduction": "none"}),
        "joint_loss": ((torch.zeros(9), partita.State.of(q @ k.T)), {}),
        "info_nce_loss": ((q, k), {}),
        "clip_loss": ((F.normalize(q), F.normalize(k), torch.tensor(3.0)), {}),
        "siglip_loss": ((F.normalize(q), F.normalize(k), torch.tensor(3.0)), {}),
        "nt_xent_loss": ((q, k), {}),
        "supcon_loss": ((q, ids), {}),
    }


def public_losses() -> dict[Any, str]:
    """Every public function that is a loss, by the name it was written under."""
    places = (partita, partita.losses, partita.contrastive, partita.attn)
    found = {getattr(place, name) for place in places for name in place.__all__ if not name.startswith("_")}
    ends = ("_loss", "cross_entropy", "attention_divergence")
    losses = [f for f in found if callable(f) and getattr(f, "__name__", "").endswith(ends)]
    return {f: f.__name__ for f in sorted(losses, key=lambda f: str(f.__name__))}  # workers must agree on the order


@pytest.mark.parametrize("before", [False, True], ids=["after the model", "before the model"])
@pytest.mark.parametrize(("loss", "name"), public_losses().items(), ids=public_losses().values())
def test_every_loss_is_recorded_as_it_was(loss: Any, name: str, before: bool) -> None:
    args, options = every_loss()[name]
    plain = loss(*args, **options)
    model = nn.Linear(2, 2)
    with watch(model) as w:
        if not before:
            model(torch.zeros(1, 2))
        out = loss(*args, **options)
        if before:
            model(torch.zeros(1, 2))
    assert torch.equal(out, plain) and out.requires_grad == plain.requires_grad
    assert not w.coverage.get("errors"), str(w.coverage)
    (row,) = w.record.losses
    assert row["name"] == name and row["step"] == 0 and row["nonfinite"] == 0
    if name != "clip_loss":  # of its two directions the record has that of the images
        assert row["loss"] == pytest.approx(out.mean().item(), rel=1e-5)
    if name in ("focal_loss", "brier_loss", "mae_loss"):
        (other,) = row_of(F.cross_entropy, *args)[:1]
        assert {**other, "name": name, "loss": row["loss"]} == row
    w.finished().summary()


@pytest.mark.parametrize("name", ["FocalLoss", "BrierLoss", "MAELoss", "DistillationLoss"])
def test_a_module_is_recorded_with_a_handle(name: str) -> None:
    """No block, and the model was not called: the loss that is called first is the first step."""
    logits, ids = torch.randn(9, 5), torch.arange(9) % 5
    w = watch(nn.Linear(2, 2))
    out = getattr(partita.nn, name)()(logits, torch.randn(9, 5) if name == "DistillationLoss" else ids)
    w.detach()
    (row,) = w.record.losses
    assert row["loss"] == pytest.approx(out.item(), rel=1e-5)


def test_a_loss_that_is_called_first_and_the_model_after_it_are_one_step() -> None:
    model, ids = nn.Linear(5, 5), torch.arange(9) % 5
    with watch(model, every=2) as w:
        for _ in range(4):
            F.cross_entropy(torch.randn(9, 5), ids)
            model(torch.randn(9, 5))
    assert w.step == 3 and w.record.steps() == [0, 2]
    with w:  # attached again
        partita.focal_loss(torch.randn(9, 5), ids)
    assert w.record.steps() == [0, 2, 4]


def test_soft_targets_have_a_loss_and_no_right_class() -> None:
    logits, target = torch.randn(9, 5, 3), torch.rand(9, 5, 3)
    target = target / target.sum(1, keepdim=True)
    entropy = torch.special.entr(logits.softmax(1)).sum(1).mean().item()
    flat, rows = torch.randn(9, 4), torch.randn(9, 5).softmax(-1)
    for loss, args, want in (
        (F.cross_entropy, (logits, target), entropy),
        (partita.cross_entropy, (logits, target), entropy),
        (partita.brier_loss, (logits, target), entropy),
        (partita.linear_cross_entropy, (flat, w := torch.randn(5, 4), rows), None),
    ):
        row, out = row_of(loss, *args)
        assert row["loss"] == pytest.approx(out.item(), rel=1e-5)
        want = torch.special.entr((flat @ w.T).softmax(-1)).sum(-1).mean().item() if want is None else want
        assert row["entropy"] == pytest.approx(want, rel=1e-4)
        assert row.get("accuracy") is None and not row.get("bins")


def test_a_compiled_model_reports_its_losses_too() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
            return partita.focal_loss(x, ids) + partita.distillation_loss(x, teacher, kind="js")

    args = torch.randn(9, 5), torch.arange(9) % 5, torch.randn(9, 5)
    model = torch.compile(Model(), backend="aot_eager")
    with watch(model) as w:
        model(*args)
    assert not w.coverage.get("errors"), str(w.coverage)
    found = {row["name"].split()[0]: row["loss"] for row in w.record.losses}
    assert found == pytest.approx(
        {
            "focal_loss": partita.focal_loss(*args[:2]).item(),
            "distillation_loss": partita.distillation_loss(args[0], args[2], kind="js").item(),
        },
        rel=1e-5,
    )


# ---- optimizers ------------------------------------------------------------------------------------------------------


def test_the_mode_is_suspended_during_an_optimizer_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(3, 3), torch.randn(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model) as w:
        model(x).sum().backward()
        asked: list[Any] = []
        inner = FunctionMode.__torch_function__
        monkeypatch.setattr(FunctionMode, "__torch_function__", lambda *a, **k: asked.append(a) or inner(*a, **k))
        optimizer.step()
        assert all("profiler" in str(a[1]) for a in asked)  # what torch writes down around a step
        asked.clear()
        F.cross_entropy(x, torch.zeros(5, dtype=torch.long))  # seen again afterwards
        assert asked
    assert len(w.loss_frame(False)) == 1
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_step_that_raises_or_calls_the_model_does_not_blind_the_watch() -> None:
    model, x = nn.Linear(3, 3), torch.randn(5, 3)
    target = torch.zeros(5, dtype=torch.long)

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no step")

    with watch(model) as w:
        with pytest.raises(RuntimeError, match="no step"):
            Broken(model.parameters()).step()
        F.cross_entropy(model(x), target)
        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure() -> Any:
            lbfgs.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            return loss

        lbfgs.step(closure)
    assert len(w.loss_frame(False)) >= 3
    assert not torch.overrides._get_current_function_mode_stack()
