"""logit_free: the loss and the gradients of the plain model, and no logits on the way."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import partita
from partita.errors import ValueRangeError
from partita.hf import logit_free, logits_again
from tests.hf.models import GROUPED, SMALL, TOKENS, inputs, make, spread, transformers

needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="the Trainer needs it")


def build(name):
    """The model in float64 without dropout, with inputs and labels of which some are ignored."""
    if name in ("bert", "gpt2", "llama", "t5", "whisper"):
        model, (given, _) = make(name, "sdpa"), inputs(name, "right")
    else:
        torch.manual_seed(1)
        model = {
            "tied": lambda: transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**GROUPED, **TOKENS, tie_word_embeddings=True)
            ),
            "cohere": lambda: transformers.CohereForCausalLM(
                transformers.CohereConfig(**{**GROUPED, **TOKENS}, logit_scale=0.3)
            ),
            "granite": lambda: transformers.GraniteForCausalLM(
                transformers.GraniteConfig(**GROUPED, **TOKENS, logits_scaling=4.0)
            ),
            "gemma2-cap": lambda: transformers.Gemma2ForCausalLM(
                transformers.Gemma2Config(**GROUPED, **TOKENS, final_logit_softcapping=0.7)
            ),
            "bart": lambda: transformers.BartForConditionalGeneration(
                transformers.BartConfig(
                    vocab_size=99, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
                    decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40,
                    pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
                )
            ),
            "roberta": lambda: transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, **TOKENS)),
            "opt": lambda: transformers.OPTForCausalLM(
                transformers.OPTConfig(
                    hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
                    **TOKENS,
                )
            ),
        }[name]()  # fmt: skip
        model, (given, _) = spread(model), inputs("llama", "right")
    model = model.double().eval()  # no dropout
    given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
    labels = given.get("decoder_input_ids", given.get("input_ids")).clone()
    labels[labels == 0] = -100
    labels[0, 2:5] = -100
    given.pop("decoder_input_ids", None), given.pop("decoder_attention_mask", None)
    return model, {**given, "labels": labels}


NAMES = [
    "gpt2", "llama", "tied", "cohere", "granite", "gemma2-cap", "opt", "bert", "roberta", "t5", "bart",
    "whisper",
]  # fmt: skip


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def assert_same(model, given, free, rtol=1e-9):
    expected = model(**given).loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # logits made after all
        out = free(**given)
    torch.testing.assert_close(out.loss, expected, rtol=rtol, atol=0)
    mine, plain = gradients(free, out.loss), gradients(model, expected)
    for name, gradient in plain.items():
        if gradient is None:
            assert mine[name] is None or not mine[name].any(), name
        else:
            # sums of terms that cancel: relative to the largest, or to 1 where all is rounding (biases of keys)
            torch.testing.assert_close(
                mine[name], gradient, rtol=rtol, atol=4 * rtol * float(gradient.abs().max()) + 1e-15
            )
    return out


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_plain_models(name):
    model, given = build(name)
    # models that upcast their logits to float32 lose what float64 had: 2^-24 per logit, twice that in a loss
    upcast = name not in ("bert", "roberta", "t5", "bart", "whisper")
    out = assert_same(model, given, logit_free(copy.deepcopy(model)), rtol=1e-6 if upcast else 1e-10)
    assert out.logits is None and "logits" not in out


@pytest.mark.parametrize("name", ["gpt2", "gemma2-cap"])
def test_the_token_count_of_gradient_accumulation_divides(name):
    model, given = build(name)
    free = logit_free(copy.deepcopy(model))
    assert_same(model, {**given, "num_items_in_batch": torch.tensor(37)}, free, rtol=1e-6)
    count = (given["labels"][:, 1:] != -100).sum()
    whole = free(**given).loss
    torch.testing.assert_close(free(**given, num_items_in_batch=2 * count).loss * 2, whole)


class Largest(TorchDispatchMode):
    """The largest tensor that any operator gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.numel = max(self.numel, one.numel())
        return out


def test_no_tensor_of_the_size_of_the_logits_is_made():
    config = transformers.LlamaConfig(**GROUPED, **{**TOKENS, "vocab_size": 5003})
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(3, 5003, (4, 64))
    sizes = []
    for one in (model, logit_free(copy.deepcopy(model))):
        with Largest() as seen:
            one(input_ids=ids, labels=ids).loss.backward()
        sizes.append(seen.numel)
    logits, weight = 4 * 64 * 5003, 5003 * 32
    assert sizes[0] >= logits and sizes[1] <= weight < logits


def test_without_labels_nothing_changes():
    model, given = build("llama")
    del given["labels"]
    free = logit_free(copy.deepcopy(model))
    assert torch.equal(free(**given).logits, model(**given).logits)
    assert inspect.signature(free.forward) == inspect.signature(model.forward)  # the Trainer reads it


def test_bfloat16_gives_a_loss_in_float32_at_least_as_good():
    model, given = build("llama")
    exact = model(**given).loss
    half = copy.deepcopy(model).to(torch.bfloat16)
    plain, free = half(**given).loss, logit_free(half)(**given).loss
    assert free.dtype == plain.dtype == torch.float32
    # hidden states are the same; only what is done with them differs: plain rounds its logits to bfloat16
    assert (free - exact).abs() <= 2 * (plain - exact).abs() + 2**-8 * exact.abs()


def test_label_smoothing_is_torchs():
    model, given = build("t5")
    logits = model(**given).logits
    expected = F.cross_entropy(logits.flatten(0, 1), given["labels"].flatten(), label_smoothing=0.2)
    torch.testing.assert_close(logit_free(model, label_smoothing=0.2)(**given).loss, expected)


def test_a_copy_is_a_model_of_its_own_and_it_can_be_undone():
    model, given = build("gpt2")
    free = logit_free(model)
    twin = copy.deepcopy(free)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert twin(**given).loss.item() == pytest.approx(torch.tensor(99.0).log().item())
    assert free(**given).loss.item() != pytest.approx(twin(**given).loss.item())
    assert logits_again(logit_free(model)) is model
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__
    assert model(**given).logits is not None


def test_a_tuple_has_no_logits_either():
    model, given = build("llama")
    free = logit_free(copy.deepcopy(model))
    out = free(**given, return_dict=False)
    torch.testing.assert_close(out[0], free(**given).loss)
    assert all(x.shape[-1] != 99 for x in out if isinstance(x, torch.Tensor) and x.dim() > 0)


def test_whoever_looks_at_the_logits_gets_them_and_hears_of_it():
    model, given = build("llama")
    free = logit_free(copy.deepcopy(model))
    free.loss_function = lambda logits, labels, **_: logits.softmax(-1).square().sum()
    expected = model(**{k: v for k, v in given.items() if k != "labels"}).logits.softmax(-1).square().sum()
    with pytest.warns(UserWarning, match="made after all"):
        torch.testing.assert_close(free(**given).loss, expected)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_a_model_without_a_language_head_is_refused(kind):
    model = getattr(transformers, kind)(transformers.BertConfig(**SMALL, **TOKENS))
    with pytest.raises(ValueRangeError, match="no linear output embeddings"):
        logit_free(model)


def test_the_loss_is_seen_by_a_watch():
    model, given = build("llama")
    free = logit_free(model.float())
    with partita.watch(free) as w:
        free(**given)
    assert any("linear_cross_entropy" in row["name"] for row in w.record.losses)


def train(model, rows, folder, **options):
    """Losses of a short training, and by how much it moved the weights."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, report_to=[],
        disable_tqdm=True, logging_steps=1, save_strategy="no", use_cpu=True, seed=1, max_grad_norm=0.0, optim="sgd",
        **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    moved = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    return [*losses, trainer.evaluate()["eval_loss"]], moved


def low_rank(model, targets):
    """The model with low-rank updates that are not zero, as they are at first."""
    peft = pytest.importorskip("peft", reason="pip install peft to test low-rank heads")
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2) if "lora" in name else None
    return model


@needs_accelerate
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gemma2-cap", "low-rank head"])
def test_a_trainer_cannot_tell(tmp_path, name, accumulation, smoothing):
    """Gradient descent moves weights by the gradients, which are the plain Trainer's, its own label smoothing too."""
    model, given = build("llama" if name == "low-rank head" else name)
    if name == "low-rank head":
        model = low_rank(model, ["q_proj", "lm_head"])
    ids, labels = (given[key].repeat(6, 1) for key in ("input_ids", "labels"))
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    options = {"gradient_accumulation_steps": accumulation}
    plain, moved = train(copy.deepcopy(model), rows, tmp_path / "plain", **options, label_smoothing_factor=smoothing)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*made after all")
        mine, others = train(
            logit_free(copy.deepcopy(model), label_smoothing=smoothing), rows, tmp_path / "free", **options
        )
    assert mine == pytest.approx(plain, rel=1e-6, abs=1e-4)  # the log has four digits
    largest = max(float(step.abs().max()) for step in moved.values())
    assert largest > 1e-4
    for key, step in moved.items():
        # the plain model rounds its logits to float32: 1e-6 of the largest gradient for each of three steps, and the
        # weights of a step carry those before
        torch.testing.assert_close(others[key], step, rtol=0, atol=1e-5 * largest)


@needs_accelerate
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_trainers_log_speaks_of_tokens(tmp_path, accumulation):
    """Accuracy, log-probability and entropy of the step, from the logits of a plain copy."""
    model, given = build("llama")
    model = model.float()
    ids, labels = (given[name].repeat(4, 1) for name in ("input_ids", "labels"))
    rows = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    count = 2 * accumulation
    with torch.no_grad():
        logits = copy.deepcopy(model)(input_ids=ids[:count]).logits[:, :-1]
    free = logit_free(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, learning_rate=0.0, report_to=[],
        disable_tqdm=True, logging_steps=1, save_strategy="no", use_cpu=True, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=free, args=arguments, train_dataset=rows, callbacks=[partita.hf.token_log_callback()]
    )
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
    trainer.train()
    said = next(row for row in trainer.state.log_history if "loss" in row)
    target = labels[:count, 1:]
    kept = target != -100
    log_p = logits.log_softmax(-1)[kept]
    of = log_p.gather(1, target[kept][:, None])
    assert said["token_log_prob"] == pytest.approx(of.mean().item(), rel=1e-5)
    assert said["token_log_prob"] == pytest.approx(-said["loss"], rel=1e-3)
    assert said["token_entropy"] == pytest.approx(torch.special.entr(log_p.exp()).sum(-1).mean().item(), rel=1e-4)
    assert said["token_accuracy"] == pytest.approx((log_p.argmax(-1) == target[kept]).float().mean().item())
    from partita.hf.lazy_logits import LISTENERS

    assert not LISTENERS


@needs_accelerate
def test_the_example_learns_the_same_and_draws(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "logit_free_trainer.py"
    spec = importlib.util.spec_from_file_location("logit_free_trainer", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    runs = {name: example.train(free, 3, vocabulary=256) for name, free in (("with logits", False), ("without", True))}
    (plain, nothing, _), (mine, accuracy, _) = runs.values()
    assert len(mine) == 3 and mine == pytest.approx(plain, rel=1e-3)
    assert not nothing and len(accuracy) == 3 and all(0 <= a <= 1 for a in accuracy)
    example.draw(runs, str(tmp_path / "figure.svg"))
    assert (tmp_path / "figure.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_low_rank_updates_of_the_head_are_part_of_it(targets):
    model, given = build("llama")
    model = low_rank(model, targets)
    assert_same(model, given, logit_free(copy.deepcopy(model)), rtol=1e-6)
