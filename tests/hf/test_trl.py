"""partita.adapters.trl against the real package: its function and its trainers, with ours in place and without."""

from __future__ import annotations

import importlib
import itertools
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from partita.errors import BackendError, ValueRangeError
from partita.hf import logit_free, logits_again
from tests.hf.models import tokenizer, transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="pip install trl to test its adapter")
    datasets = pytest.importorskip("datasets")
    utils = importlib.import_module("trl.trainer.utils")
    distillation = importlib.import_module("trl.trainer.distillation_trainer")
from partita.adapters.trl import Installed, divergence, install, log_probs

pytestmark = pytest.mark.filterwarnings("ignore")  # of trl, datasets and transformers
FUNCTION, DIVERGENCE = utils._ChunkedLogProbFunction, distillation.ChunkedDivergenceFunction
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
CHUNK = 8  # of trl's: several in a vocabulary of 31
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _ends_with_trls_own():
    yield
    assert utils._ChunkedLogProbFunction is FUNCTION
    assert distillation.ChunkedDivergenceFunction is DIVERGENCE


# ---- the functions ---------------------------------------------------------------------------------------------------


def head(dtype, bias: bool, dim: int = 6, rows: int = 9, vocabulary: int = 31) -> list[Tensor | None]:
    sizes = ((rows, dim), (vocabulary, dim), (vocabulary,))
    found: list[Tensor | None] = [torch.randn(size, dtype=dtype) for size in sizes]
    return found if bias else [*found[:2], None]


def logits(hidden, weight, bias, temperature, softcap, logit_scale) -> Tensor:
    z = hidden @ weight.mT if bias is None else hidden @ weight.mT + bias
    z = z * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def dense(z: Tensor, targets: Tensor) -> list[Tensor]:
    log_p = z.log_softmax(-1)
    at = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return [at, entropy, (2 * log_p).logsumexp(-1), z.mean(-1), z.argmax(-1) == targets]


def leaves(given, dtype=None) -> list[Tensor | None]:
    return [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in given]


def gradients(total: Tensor, given) -> list[Tensor]:
    return list(torch.autograd.grad(total, [x for x in given if x is not None]))


def assert_as_exact(ours, theirs, exact, dtype, half=False):
    """Of the same dtype, and at most twice as far from float64 as trl's; or a few roundings of the largest number.

    trl's own must be near the formula too: a function that means something else now is not what ours stands for.
    """
    assert len(ours) == len(theirs) == len(exact)
    for own, their, true in zip(ours, theirs, exact, strict=True):
        assert own.dtype == their.dtype and own.shape == their.shape
        if own.dtype == torch.bool:
            assert torch.equal(own, true if dtype == torch.bfloat16 else their)
            continue
        far, near = ((x.double() - true.double()).abs().max() for x in (own, their))
        rounding = torch.finfo(own.dtype).eps if own.dtype != torch.float64 else EPS
        assert near <= (0.05 if half or dtype == torch.bfloat16 else 64 * EPS) * (1 + true.double().abs().max()), (
            "trl drifted"
        )
        assert far <= 2 * near + 8 * rounding * true.abs().max()


WANTED = [("log_probs",), ("log_probs", "entropy"), ("log_probs", "entropy", "is_top1"), OUTPUTS]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", WANTED, ids=len)
def test_every_output_is_that_of_trl(dtype, bias, outputs):
    for softcap, logit_scale, temperature in itertools.product((None, 3.0), (1.0, 0.3), (1.0, 0.7)):
        given = head(dtype, bias)
        exact = leaves(given, torch.float64)
        z = logits(*exact, temperature, softcap, logit_scale)
        targets = torch.randint(31, (9,))
        targets[:4] = z.argmax(-1)[:4]
        truth = [x if name in outputs else None for name, x in zip(OUTPUTS, dense(z, targets), strict=True)]
        row = torch.linspace(-1, 2, 9)
        found = []
        for function in (log_probs, FUNCTION.apply, lambda *_, truth=truth: truth):
            operands = exact if len(found) == 2 else leaves(given)
            out = function(*operands, targets, temperature, CHUNK, softcap, logit_scale, outputs)
            assert [x is None for x in out] == [name not in outputs for name in OUTPUTS]
            total = (out[0] * row).sum() + (0 if out[1] is None else (out[1] * row.square()).sum())
            if len(found) < 2:
                assert [x.requires_grad for x in out if x is not None] == [n in OUTPUTS[:2] for n in outputs]
            found.append([*(x.detach() for x in out if x is not None), *gradients(total, operands)])
        assert_as_exact(*found, dtype)


@pytest.mark.parametrize("read", [0, 1])
def test_one_of_two_outputs_may_be_left_unread(read):
    found = []
    for function in (log_probs, FUNCTION.apply):
        torch.manual_seed(0)
        operands, targets = leaves(head(torch.float64, True)), torch.arange(9)
        out = function(*operands, targets, 0.7, CHUNK, None, 1.0, OUTPUTS)
        found.append(gradients(out[read].sum(), operands))
    torch.testing.assert_close(*found, atol=2e-6, rtol=1e-5)


def test_the_first_of_those_that_tie_is_the_likeliest():
    hidden, weight = torch.ones(3, 1), torch.tensor([[1.0], [2.0], [2.0], [0.0]])
    targets = torch.tensor([1, 2, 0])
    for function in (log_probs, FUNCTION.apply):
        top = function(hidden, weight, None, targets, 1.0, CHUNK, None, 1.0, ("is_top1",))[-1]
        assert top.tolist() == [True, False, False]


def test_no_rows_and_heads_of_another_dtype():
    weight = torch.randn(31, 6, requires_grad=True)
    hidden = torch.zeros(0, 6, requires_grad=True)
    out = log_probs(hidden, weight, None, torch.zeros(0, dtype=torch.int64), 1.0, CHUNK)
    out[0].sum().backward()
    assert [x.shape for x in out] == [(0,)] * 5 and not weight.grad.any()
    hidden, targets = torch.randn(9, 6, requires_grad=True), torch.arange(9)  # a head in half of the dtype
    half = torch.randn(31, 6).bfloat16().requires_grad_()
    exact = leaves([hidden, half], torch.float64)
    found = []
    for function in (log_probs, FUNCTION.apply, None):
        operands = (hidden, half) if function else exact
        out = function(*operands, None, targets, 1.0, CHUNK) if function else dense(exact[0] @ exact[1].mT, targets)
        found.append([*(x.detach() for x in out), *gradients(out[0].sum() + out[1].sum(), operands)])
    assert_as_exact(*found, torch.float32, half=True)


def test_autocast_lowers_products_and_no_results():
    given, targets = head(torch.float32, False), torch.arange(9)
    exact = leaves([x if x is None else x.bfloat16() for x in given], torch.float64)
    truth = dense(logits(*exact, 1.0, None, 1.0), targets)
    found = []
    for function in (log_probs, FUNCTION.apply, None):
        operands = leaves(given) if function else exact
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*operands, targets, 1.0, CHUNK) if function else truth
        found.append([*out[:3], *gradients(out[0].sum() + out[1].sum(), operands)])
    found = [[x.detach() for x in row] for row in found]
    assert all(x.dtype == torch.float32 for x in found[0])
    assert_as_exact([x.bfloat16() for x in found[0]], [x.bfloat16() for x in found[1]], found[2], torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_is_that_of_trl(dtype, beta):
    for softcap, bias in itertools.product((None, 3.0), (False, True)):
        student, teacher = head(dtype, bias), head(dtype, bias, dim=4)
        exact = leaves(student, torch.float64)
        s, t = (
            logits(*x, 0.7, softcap, scale).log_softmax(-1)
            for x, scale in ((exact, 0.5), ([None if x is None else x.double() for x in teacher], 1.5))
        )
        m = torch.logaddexp(s + torch.tensor(1 - beta).log(), t + torch.tensor(beta).log())
        kl_t, kl_s = ((p.exp() * (p - q)).sum(-1) for p, q in ((t, s if beta == 0 else m), (s, t if beta == 1 else m)))
        true = kl_t if beta == 0 else kl_s if beta == 1 else beta * kl_t + (1 - beta) * kl_s
        truth = [true, -(s.exp() * s).sum(-1).detach()]
        found = []
        for function in (divergence, DIVERGENCE.apply, lambda *_, truth=truth: truth):
            operands, raised = exact if len(found) == 2 else leaves(student), leaves(teacher)
            out = function(*operands, *raised, beta, 0.7, 0.5, softcap, 1.5, softcap)
            assert not out[1].requires_grad
            total = (out[0] * torch.linspace(1, 2, 9)).sum()
            total.backward()
            assert all(x is None or x.grad is None for x in raised)  # the teacher learns nothing
            found.append([*(x.detach() for x in out), *(x.grad for x in operands if x is not None)])
        assert_as_exact(*found, dtype)


# ---- the models of its trainers --------------------------------------------------------------------------------------

WORDS = 64


def llama(seed: int = 0, **more):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        initializer_range=0.3, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def fused(model, labels, installed: bool, **more):
    """What trl's forward gives, with the gradients of its parameters."""
    utils.add_fused_lm_head(model, temperature=0.8, outputs=OUTPUTS, **more)
    if installed:
        with install():
            out = model(input_ids=labels.clamp(min=2), labels=labels, fused_lm_head=True)
            (out.loss + out.entropy.sum()).backward()
    else:
        out = model(input_ids=labels.clamp(min=2), labels=labels, fused_lm_head=True)
        (out.loss + out.entropy.sum()).backward()
    return dict(out), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("raised", [False, True])
def test_ignored_labels_count_nothing_in_trls_forward(ignored, raised):
    labels = torch.randint(2, WORDS, (3, 7), generator=torch.Generator().manual_seed(1))
    labels[torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < ignored] = -100
    (a, g), (b, h) = (fused(llama(), labels, installed, cast_lm_head_to_fp32=raised) for installed in (False, True))
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(b[name], a[name], atol=2e-6, rtol=1e-5)
    for name in OUTPUTS:
        assert not b[name][labels[:, 1:] == -100].any()
    torch.testing.assert_close(h, g, atol=5e-6, rtol=1e-5)


def rows(kind: str) -> list[dict]:
    random = torch.Generator().manual_seed(3)

    def text(n: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(WORDS - 4, (n,), generator=random).tolist())

    made = []
    for i in range(8):
        row = {"prompt": text(3)}
        if kind in ("SFT", "KTO"):
            row["completion"] = " " + text(2 + i % 4)
        if kind in ("DPO", "CPO", "ORPO"):
            row |= {"chosen": " " + text(2 + i % 4), "rejected": " " + text(3 + i % 2)}
        made.append(row | ({"label": i % 3 != 0} if kind == "KTO" else {}))
    return made


def even(completion_ids, **_):
    return [sum(i % 2 == 0 for i in row) / max(len(row), 1) for row in completion_ids]


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients of every step."""

    def __init__(self):
        self.kept = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.kept += [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(kind: str, folder, given: dict, peft: bool = False) -> tuple[list[dict], list[Tensor]]:
    """The log of two steps, and the gradients of both."""
    llama().save_pretrained(folder / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(folder / "model")
    assert model.dtype == torch.float64
    options = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.1,
        "optim": "sgd", "report_to": "none", "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
        "disable_tqdm": True, "seed": 0, "bf16": False, "gradient_checkpointing": False,
    }  # fmt: skip
    extra, callback = {}, Gradients()
    if kind in ("GRPO", "RLOO"):
        options |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "temperature": 0.8}
        extra["reward_funcs"] = even
    elif kind in ("DPO", "KTO"):
        extra["ref_model"] = llama(1)
    if peft:
        extra["peft_config"] = pytest.importorskip("peft").LoraConfig(
            target_modules=["q_proj"], init_lora_weights=False
        )
    home = importlib.import_module(f"trl.experimental.{kind.lower()}") if kind in WHOLE_LOGITS else trl
    arguments = getattr(home, f"{kind}Config")(**{**options, **given})
    transformers.set_seed(0)
    trainer = getattr(home, f"{kind}Trainer")(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows(kind)), callbacks=[callback],
        processing_class=tokenizer(*(f"w{i}" for i in range(WORDS - 4))), **extra,
    )  # fmt: skip
    trainer.train()
    clocks = ("time", "per_second")
    log = [{k: v for k, v in row.items() if not any(c in k for c in clocks)} for row in trainer.state.log_history]
    return log, callback.kept


WHOLE_LOGITS = ("CPO", "ORPO")
CASES = [
    ("SFT", {}),
    ("SFT", {"loss_type": "dft"}),
    ("SFT", {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}),
    ("DPO", {}),
    ("DPO", {"use_weighting": True, "loss_type": ["ipo"]}),
    ("KTO", {}),
    ("GRPO", {}),
    ("GRPO", {"entropy_coef": 0.1, "cast_lm_head_to_fp32": False, "num_iterations": 2}),
    ("GRPO", {"top_entropy_quantile": 0.5, "loss_type": "dr_grpo", "beta": 0.0}),
    ("RLOO", {}),
]


@pytest.mark.parametrize(("kind", "given"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
def test_a_trainer_logs_and_learns_the_same(tmp_path, monkeypatch, kind, given):
    assert_same(train(kind, tmp_path, given), ours(tmp_path, monkeypatch, kind, given))


def test_low_rank_updates_learn_the_same(tmp_path, monkeypatch):
    assert_same(train("SFT", tmp_path, {}, peft=True), ours(tmp_path, monkeypatch, "SFT", {}, peft=True))


READ = [(kind, name) for kind, given in CASES if not given for name in ("log_probs", "entropy")]
READ += [("SFT", "is_top1"), ("KTO", "mean_logits")]


@pytest.mark.parametrize(("kind", "output"), READ)
def test_each_trainer_reads_what_ours_gives(tmp_path, monkeypatch, kind, output):
    """With one output off by a thousandth, logs or gradients differ from trl's: agreement above is not idle."""

    def off(*args):
        found = dict(zip(OUTPUTS, log_probs(*args), strict=True))
        if found[output] is not None:
            found[output] = ~found[output] if found[output].dtype == torch.bool else 1.001 * found[output]
        return tuple(found.values())

    theirs, mine = train(kind, tmp_path, {}), ours(tmp_path, monkeypatch, kind, {}, off)
    with pytest.raises(AssertionError):
        assert_same(theirs, mine)


def ours(tmp_path, monkeypatch, kind, given, function=log_probs, peft=False):
    """A training in which the function serves, and trl's own is not called."""
    calls = []

    def counted(*args):
        calls.append(1)
        return function(*args)

    with install(), monkeypatch.context() as patch:
        assert utils._ChunkedLogProbFunction.apply is log_probs
        patch.setattr(utils._ChunkedLogProbFunction, "apply", counted)
        patch.setattr(FUNCTION, "apply", None)
        found = train(kind, tmp_path, given, peft)
    assert len(calls) >= 2
    return found


def assert_same(theirs, mine):
    """Everything is float64 but trl's results, which are float32: what differs is their rounding."""
    (log, grads), (own, found) = theirs, mine
    assert len(log) == len(own) == 3 and len(grads) == len(found) > 0
    for a, b in zip(log, own, strict=True):
        assert b == pytest.approx(a, rel=2e-6, abs=3e-6)
    size = max(g.abs().max() for g in grads)
    assert size > 0.01
    for a, b in zip(grads, found, strict=True):
        assert (a - b).abs().max() <= 3e-6 * size


@pytest.mark.parametrize("kind", WHOLE_LOGITS)
def test_trainers_that_make_whole_logits_stay_as_they_are(tmp_path, monkeypatch, kind):
    """They call nothing that is replaced; once trl moves them to its function, they belong among the cases above."""
    log, grads = train(kind, tmp_path, {})
    with install(), monkeypatch.context() as patch:
        patch.setattr(utils._ChunkedLogProbFunction, "apply", None)
        patch.setattr(FUNCTION, "apply", None)
        own, found = train(kind, tmp_path, {})
    assert log == own and len(log) == 3
    assert len(grads) == len(found) > 0 and all(map(torch.equal, grads, found))


def test_the_example_goes_the_same_way(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("grpo")
    theirs, mine = (example.train(3, ours) for ours in (False, True))
    assert len(mine) == len(theirs) == 3
    for a, b in zip(theirs, mine, strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-6)
    assert example.copied(["3"], ["3 3 1"]) == [2 / example.LENGTH]


# ---- put in place, and taken out -------------------------------------------------------------------------------------


def attributes() -> dict[tuple[str, str], int]:
    """What every module of trl that is loaded holds, by identity."""
    held = [(name, vars(module)) for name, module in sys.modules.items() if name.split(".")[0] == "trl"]
    return {(name, key): id(value) for name, own in held for key, value in own.items()}


def test_undone_by_a_call_or_by_leaving():
    before = attributes()
    undo = install()
    assert isinstance(undo, Installed) and utils._ChunkedLogProbFunction.apply is log_probs
    assert distillation.ChunkedDivergenceFunction.apply is divergence
    assert before.keys() == attributes().keys()
    assert {key for key, value in attributes().items() if value != before[key]} == {
        ("trl.trainer.utils", "_ChunkedLogProbFunction"),
        ("trl.trainer.distillation_trainer", "ChunkedDivergenceFunction"),
    }
    undo()
    assert attributes() == before
    undo()  # once more does nothing
    with pytest.raises(ZeroDivisionError), install():
        1 / 0  # noqa: B018
    assert attributes() == before


def test_a_second_time_is_refused():
    with install(), pytest.raises(BackendError, match="installed already"):
        install()


def test_another_trl_is_refused(monkeypatch):
    class Other:
        @staticmethod
        def forward(ctx, hidden, weight, targets): ...

        apply = None

    for module, name in ((utils, "_ChunkedLogProbFunction"), (distillation, "ChunkedDivergenceFunction")):
        for other, said in ((Other, "takes (hidden, weight, targets)"), (None, "is not there")):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, other)
                with pytest.raises(BackendError) as caught:
                    install()
                assert said in str(caught.value) and "made for trl 1.16.0" in str(caught.value)
                assert getattr(module, name) is other


def test_a_head_in_pieces_is_refused():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    weight.ds_id = 0
    with pytest.raises(BackendError, match=r"ZeRO stage 3 .* undo"):
        log_probs(torch.zeros(1, 2), weight, None, torch.zeros(1, dtype=torch.int64), 1.0, CHUNK)


def test_logit_free_in_a_trainer_says_what_to_call():
    labels = torch.randint(2, WORDS, (2, 5))
    model = logit_free(llama())
    with pytest.warns(UserWarning, match=r"partita\.adapters\.trl\.install"):
        fused(model, labels, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with install():
            model(input_ids=labels, labels=labels, fused_lm_head=True)
        model(input_ids=labels, labels=labels)
        logits_again(model)
        model(input_ids=labels, labels=labels, fused_lm_head=True)
    with pytest.raises(ValueRangeError, match=r"partita\.adapters\.trl\.install"):
        logit_free(model)
