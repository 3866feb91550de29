"""token_stats of Hugging Face models: the log-softmax of their own logits, which are not made."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F

from partita.errors import ShapeError, ValueRangeError
from partita.hf import logit_free, token_stats
from tests.hf.models import GROUPED, TOKENS, make, spread, transformers
from tests.hf.test_logit_free import Largest, build

EVERYTHING = (
    "log_prob", "rank", "is_top", "entropy", "varentropy", "log_sum_sq", "max_logit", "mean_logit", "logsumexp",
    "top_k:3",
)  # fmt: skip
BUILT = ["llama", "gpt2", "tied", "cohere", "granite", "gemma2-cap", "opt", "bart", "t5", "whisper"]


def decoder(name):
    """A model with a window shorter than the texts, or with normalised queries; float64 where its eager code has it."""
    if name == "qwen3":
        torch.manual_seed(3)
        return spread(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, **TOKENS)), 0.3).double()
    if name == "opt":
        return build("opt")[0]
    if name == "gemma2":  # float64 masks overflow in its float32 softmax
        return make(name, "eager")
    return make(name, "sdpa").double()


def dense(logits, ids):
    """Every statistic from float64 logits."""
    log_p = logits.double().log_softmax(-1)
    p, own = log_p.exp(), log_p.gather(-1, ids.clamp(min=0)[..., None])
    top, at = log_p.topk(3)
    entropy = -(p * log_p).sum(-1)
    return {
        "log_prob": own[..., 0], "rank": (log_p > own).sum(-1), "is_top": ~(log_p > own).any(-1), "entropy": entropy,
        "varentropy": (p * (log_p + entropy[..., None]) ** 2).sum(-1), "log_sum_sq": (2 * log_p).logsumexp(-1),
        "max_logit": logits.double().amax(-1), "mean_logit": (p * logits).sum(-1),
        "logsumexp": logits.double().logsumexp(-1), "top_k_log_prob": top, "top_k_ids": at,
    }  # fmt: skip


def assert_stats(found, expected, counts, tol=1e-9):
    assert set(vars(found)) == set(expected)
    for name, want in expected.items():
        got = getattr(found, name)
        want = torch.where(counts if want.dim() == 2 else counts[..., None], want, torch.zeros_like(want))
        torch.testing.assert_close(got, want, rtol=tol, atol=tol, check_dtype=False, msg=lambda m, n=name: f"{n}: {m}")
        assert not got.requires_grad


def texts(lengths=(12, 9, 5, 1)):
    torch.manual_seed(7)
    return [torch.randint(3, 99, (n,)) for n in lengths]


def padded(rows, side="right", *, value=0):
    width = max(map(len, rows))
    pad = {"right": lambda n: (0, width - n), "left": lambda n: (width - n, 0)}[side]
    return torch.stack([F.pad(x, pad(len(x)), value=value) for x in rows]), torch.stack(
        [F.pad(torch.ones_like(x), pad(len(x))) for x in rows]
    )


@pytest.mark.parametrize("name", BUILT)
def test_every_statistic_is_that_of_the_models_logits(name):
    """Heads that are tied, with a bias, a factor, a softcap; decoders, and encoders with decoders."""
    model, given = build(name)
    labels, free = given.pop("labels"), dict(given)
    free["input_ids"] = free.pop(model.main_input_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # logits made after all
        found = token_stats(model, **free, labels=labels, want=EVERYTHING)
    with torch.no_grad():
        logits = model(**given, labels=labels).logits
    if not model.config.is_encoder_decoder:
        logits, labels = logits[:, :-1], labels[:, 1:]
    # models that upcast their logits to float32 lose what float64 had
    assert_stats(found, dense(logits, labels), labels != -100, 1e-9 if logits.dtype == torch.float64 else 2e-6)


DECODERS = ["llama", "gpt2", "gemma2", "mistral", "qwen3", "opt"]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_padding_changes_nothing_and_gives_zero(name, side):
    model, rows = decoder(name), texts()
    tol = 1e-10 if model.dtype == torch.float64 else 1e-5
    ids, mask = padded(rows, side)
    found = token_stats(model, ids, mask, want=("log_prob", "entropy", "rank", "top_k:3"))
    assert found.log_prob.shape == (4, 11)
    for i, x in enumerate(rows):
        n = len(x) - 1
        at = slice(0, n) if side == "right" else slice(11 - n, 11)
        with torch.no_grad():
            expected = dense(model(x[None]).logits[:, :-1], x[None, 1:])
        for field, got in vars(found).items():
            torch.testing.assert_close(got[i, at], expected[field][0], rtol=tol, atol=tol, check_dtype=False)
            assert got[i].count_nonzero() == got[i, at].count_nonzero(), field


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "t5"])
def test_batches_lists_and_data_sets_agree(name):
    model = decoder(name)
    rows, labels = texts((9, 12, 1, 5, 12)), None
    if name == "t5":
        labels = texts((3, 7, 2, 7, 1))
    tol = {"rtol": 1e-10, "atol": 1e-10} if model.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    wide = None if labels is None else padded(labels, value=-100)[0]
    want = ("log_prob", "entropy", "is_top", "top_k:2")
    whole = vars(token_stats(model, *padded(rows), labels=wide, want=want))
    data = [{"input_ids": x.tolist()} | ({} if labels is None else {"labels": labels[i]}) for i, x in enumerate(rows)]
    lists = [x.tolist() for x in rows]
    for found in (
        token_stats(model, *padded(rows), labels=wide, want=want, batch_size=2),
        token_stats(model, lists, labels=labels, want=want),
        token_stats(model, tuple(rows), labels=labels, want=want, batch_size=2),
        token_stats(model, data, want=want, batch_size=3),
    ):
        for field, x in vars(found).items():
            torch.testing.assert_close(x, whole[field], **tol)
    one_by_one = token_stats(model, (x for x in data), want=want, batch_size=2)
    assert iter(one_by_one) is one_by_one
    for i, found in enumerate(one_by_one):
        n = len(rows[i]) - 1 if labels is None else len(labels[i])
        for field, x in vars(found).items():
            assert len(x) == n
            torch.testing.assert_close(x, whole[field][i, :n], **tol)
    assert i == 4


def test_a_padded_data_set_is_read_by_its_mask():
    model, rows = decoder("llama"), texts((6, 3))
    ids, mask = padded(rows, "left")
    data = [{"input_ids": x, "attention_mask": m, "labels": x} for x, m in zip(ids, mask, strict=True)]
    for row, found in zip(rows, token_stats(model, iter(data)), strict=True):
        torch.testing.assert_close(found.log_prob, token_stats(model, row[None]).log_prob[0], rtol=1e-10, atol=1e-10)


def test_labels_of_minus_100_and_of_several_ids():
    model, (x,) = decoder("llama"), texts((8,))
    every = token_stats(model, x[None]).log_prob
    labels = x[None].clone()
    labels[:, :4] = -100
    some = token_stats(model, x[None], labels=labels)
    assert not some.log_prob[:, :3].any() and not some.entropy[:, :3].any()
    torch.testing.assert_close(some.log_prob[:, 3:], every[:, 3:])
    several = torch.full((1, 8, 3), -100)
    several[..., 0], several[0, -1] = x, torch.tensor([int(x[-1]), 5, 7])
    found = token_stats(model, x[None], torch.ones(1, 8).long(), labels=several, want=("log_prob", "top_k:1"))
    torch.testing.assert_close(found.log_prob[..., 0], every)
    with torch.no_grad():
        last = model(x[None]).logits[0, -2].log_softmax(-1)
    torch.testing.assert_close(found.log_prob[0, -1, 1:], last[[5, 7]])
    assert found.top_k_ids[0, -1] == last.argmax()


def test_labels_that_are_shifted_already():
    model, (x,) = decoder("llama"), texts((8,))
    every = token_stats(model, x[None]).log_prob
    ids, mask = F.pad(x[None, :-1], (0, 2)), F.pad(torch.ones(1, 7).long(), (0, 2))
    found = token_stats(model, ids, mask, labels=F.pad(x[None, 1:], (0, 2), value=5), shift=0).log_prob
    torch.testing.assert_close(found, F.pad(every, (0, 2)))


def test_a_samplers_distribution():
    model, (x,) = decoder("llama"), texts((8,))
    found = token_stats(model, x[None], temperature=0.7, top_k=20, want=("log_prob", "entropy", "kept_mass"))
    with torch.no_grad():
        scores = model(x[None]).logits[:, :-1] / 0.7
    left = scores.masked_fill(scores < scores.topk(20).values[..., -1:], -torch.inf).log_softmax(-1)
    torch.testing.assert_close(found.log_prob, left.gather(-1, x[None, 1:, None])[..., 0])
    torch.testing.assert_close(found.entropy, -(left.exp() * left.clamp(min=-1e3)).sum(-1))
    two = token_stats(model, x.expand(2, -1), temperature=0.7, top_k=20, batch_size=1)
    assert int(two.outside) == 2 * int(found.outside) == 2 * int(found.log_prob.isinf().sum()) > 0


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_ids_a_sampler_kept(name):
    """Given with the labels: of a padded batch, of a list, in the rows of a data set."""
    model, rows = decoder(name), texts((8, 5))
    labels = rows if name == "llama" else texts((6, 4))
    lists = [torch.stack([torch.randperm(99)[:n] for _ in x]) for x, n in zip(labels, (20, 30), strict=True)]
    for kept, own in zip(lists, labels, strict=True):
        kept[::2, 0] = own[::2]  # half of the labels are kept
        kept[1, 5:] = -1
    found = []
    for x, own, kept in zip(rows, labels, lists, strict=True):
        with torch.no_grad():
            given = {"labels": own[None]} if name == "t5" else {}
            logits = model(x[None], **given).logits[0]
        if name == "llama":
            logits, own, kept = logits[:-1], own[1:], kept[1:]
        keep = torch.zeros(len(own), 100).scatter(1, torch.where(kept < 0, 99, kept), 1.0)[:, :99].bool()
        left = logits[:, :99].masked_fill(~keep, -torch.inf).log_softmax(-1)
        found.append(left.gather(-1, own[:, None])[:, 0])
    assert torch.cat(found).isneginf().any() and torch.cat(found).isfinite().any()
    given = None if name == "llama" else labels
    want = ("log_prob", "kept_mass")
    listed = token_stats(model, rows, labels=given, kept=lists, want=want, batch_size=1)
    wide = torch.full((2, max(map(len, labels)), 30), -1)
    for i, kept in enumerate(lists):
        wide[i, : len(kept), : kept.shape[1]] = kept
    more = {} if given is None else {"labels": padded(labels, value=-100)[0]}
    whole = token_stats(model, *padded(rows), **more, kept=wide, want=want)
    data = [
        {"input_ids": x, "kept": k} | ({} if given is None else {"labels": y})
        for x, y, k in zip(rows, labels, lists, strict=True)
    ]
    streamed = list(token_stats(model, iter(data), want=want))
    for i, expected in enumerate(found):
        for one in (listed.log_prob[i], whole.log_prob[i], streamed[i].log_prob):
            torch.testing.assert_close(one[: len(expected)], expected, rtol=1e-9, atol=1e-9)
            assert not one[len(expected) :].any()
    assert listed.outside == whole.outside == sum(x.isneginf().sum() for x in found)
    with pytest.raises(ShapeError, match=r"one \(length, k\) per text"):
        token_stats(model, rows, labels=given, kept=lists[:1])
    with pytest.raises(ShapeError, match="ids for each label"):
        token_stats(model, rows, labels=given, kept=[x[1:] for x in lists])


def test_a_graph_only_where_it_is_asked_for():
    model, (x,) = decoder("gpt2"), texts((8,))
    assert not token_stats(model, x[None]).log_prob.requires_grad
    with torch.no_grad():
        assert not token_stats(model, x[None], grad=True).log_prob.requires_grad
    with torch.inference_mode():
        token_stats(model, x[None])
    found = []
    for log_prob in (
        token_stats(model, x[None], grad=True).log_prob,
        model(x[None]).logits[:, :-1].log_softmax(-1).gather(-1, x[None, 1:, None])[..., 0],
    ):
        model.zero_grad()
        log_prob.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for ours, want in zip(*found, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-9)


def test_no_logits_are_made_and_the_model_is_left_as_it_was():
    config = transformers.LlamaConfig(**GROUPED, **{**TOKENS, "vocab_size": 5003})
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 5003, (4, 64))
    with Largest() as seen:
        token_stats(model, ids)
    assert seen.numel < 4 * 64 * 5003 and "forward" not in model.lm_head.__dict__
    with pytest.raises(ValueError):
        token_stats(model, ids, inputs_embeds=torch.zeros(3))
    assert "forward" not in model.lm_head.__dict__
    assert model(ids).logits.shape == (4, 64, 5003)
    free = logit_free(copy.deepcopy(model))
    torch.testing.assert_close(token_stats(free, ids).log_prob, token_stats(model, ids).log_prob)
    assert free(input_ids=ids, labels=ids).logits is None


def test_an_interrupted_stream_keeps_what_it_has_and_leaves_the_model():
    def data():
        yield from texts((5, 6))
        raise KeyboardInterrupt

    model, found = decoder("llama"), []
    with pytest.raises(KeyboardInterrupt):
        found.extend(token_stats(model, data(), batch_size=1))
    assert [len(x.log_prob) for x in found] == [4, 5] and "forward" not in model.lm_head.__dict__


def test_a_progress_bar_when_it_is_asked_for(capsys):
    model = decoder("llama")
    token_stats(model, texts(), batch_size=2)
    assert capsys.readouterr().err == ""
    token_stats(model, texts(), batch_size=2, progress=True)
    list(token_stats(model, iter(texts()), progress=True))
    assert "4/4" in (err := capsys.readouterr().err) and "text" in err


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_peft(kind):
    """A low-rank update of the head is part of it; virtual tokens come before the text."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    config = {
        "lora": peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, init_lora_weights=False),
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(decoder("llama"), config).double().eval()
    ids, mask = padded(texts((12, 9, 5)))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -12:-1]
    found = token_stats(model, ids, mask)
    expected = {k: v for k, v in dense(logits, ids[:, 1:]).items() if k in vars(found)}
    assert_stats(found, expected, mask[:, 1:].bool())


def test_mistakes():
    model, (x,) = decoder("llama"), texts((8,))
    for call, error, says in (
        (lambda: token_stats(model, x[None], torch.ones(1, 3)), ShapeError, r"attention_mask must be .*\(1, 8\)"),
        (lambda: token_stats(model, [x], torch.ones(1, 8)), ValueRangeError, "attention_mask: give input_ids as a te"),
        (lambda: token_stats(model, [1, 2]), ShapeError, r"A single text stands in a list"),
        (lambda: token_stats(model, []), ShapeError, "empty list"),
        (lambda: token_stats(model, [x], labels=[x, x]), ShapeError, "one sequence per text, 1; got 2"),
        (lambda: token_stats(model, [x], labels=[x[:3]]), ShapeError, "one per token, 8; got 3"),
        (lambda: token_stats(model, iter([x]), labels=[x]), ValueRangeError, "stand in its rows"),
        (lambda: token_stats(model, x[None], batch_size=0), ValueRangeError, "batch_size"),
        (lambda: token_stats(model, x[None], shift=0), ValueRangeError, "shift must be 1 for a decoder's own tokens"),
        (lambda: token_stats(make("bert", "sdpa"), x[None]), ValueRangeError, "BertForMaskedLM does not generate"),
        (lambda: token_stats(torch.nn.Linear(2, 2), x[None]), ValueRangeError, "token_stats takes a transformers"),
        (lambda: token_stats(decoder("t5"), x[None]), ValueRangeError, "has an encoder: give labels="),
        (lambda: token_stats(model, x[None], want="perplexity"), ValueRangeError, "perplexity"),
    ):
        with pytest.raises(error, match=says):
            call()
