"""PartitaLM scores as lm-eval's own `hf` model. `make test-peers` brings lm-eval in a folder of its own."""

from __future__ import annotations

import random

import pytest
import torch

from tests.hf.models import GROUPED, spread, tokenizer, transformers
from tests.hf.test_logit_free import Largest

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval stands in a folder of its own: make test-peers")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from partita.adapters.lm_eval import PartitaLM  # noqa: E402

WORDS = [f"w{i}" for i in range(90)]


def language(name):
    torch.manual_seed(4)
    tokens = {"vocab_size": 94, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = {
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**GROUPED, **tokens, max_position_embeddings=24)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=24, **tokens)
        ),
        "t5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=94, pad_token_id=0,
                decoder_start_token_id=0, eos_token_id=2,
            )
        ),
    }[name]()  # fmt: skip
    return spread(model, 0.3).double()


def pair(name, **options):
    """lm-eval's class and ours of one model."""
    given = {
        "pretrained": language(name),
        "tokenizer": tokenizer(*WORDS),
        "device": "cpu",
        "batch_size": 3,
        "max_length": 24,
    } | options
    return HFLM(**given), PartitaLM(**given)


def words(seed, n):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(n))


def choices():
    """Questions with answers of one word, of several, and longer than the model reads."""
    found = []
    for i in range(7):
        question = words(i, 3 + 2 * i if i < 6 else 40)
        answers = [words(100 + 10 * i + k, 1 + (i % 3) * (k + 1)) for k in range(4)]
        found += [(question, f" {answer}") for answer in answers]
    return found


def asked(kind, arguments):
    return [Instance(kind, {}, one if isinstance(one, tuple) else (one,), i) for i, one in enumerate(arguments)]


def assert_same(ours, theirs):
    assert [x[1] for x in ours] == [x[1] for x in theirs]
    torch.testing.assert_close([x[0] for x in ours], [x[0] for x in theirs], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_multiple_choice(name):
    plain, ours = pair(name)
    requests = asked("loglikelihood", choices())
    assert_same(ours.loglikelihood(requests, disable_tqdm=True), plain.loglikelihood(requests, disable_tqdm=True))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_greedy_answers_are_recognised(name):
    plain, ours = pair(name)
    questions = [words(i, 5) for i in range(4)]
    with torch.no_grad():
        best = [plain.model(torch.tensor([plain.tok_encode(q)])).logits[0, -1].argmax() for q in questions]
    arguments = [(q, " " + plain.tok_decode([int(b)])) for q, b in zip(questions, best, strict=True)]
    arguments += [(q, " w1") for q in questions]  # of the same contexts
    requests = asked("loglikelihood", arguments)
    found = ours.loglikelihood(requests, disable_tqdm=True)
    assert_same(found, plain.loglikelihood(requests, disable_tqdm=True))
    assert all(greedy for _, greedy in found[:4]) and not all(greedy for _, greedy in found[4:])


@pytest.mark.parametrize("size", [2, "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_perplexity(name, size):
    """Rolling windows: a text of 61 words and a model that reads 24."""
    plain, ours = pair(name, batch_size=size, max_batch_size=4)
    requests = asked("loglikelihood_rolling", [words(1, 61), words(2, 9), words(3, 24)])
    torch.testing.assert_close(
        ours.loglikelihood_rolling(requests, disable_tqdm=True),
        plain.loglikelihood_rolling(requests, disable_tqdm=True),
        rtol=1e-6, atol=1e-6,
    )  # fmt: skip


def test_batches_found_by_trial():
    plain, ours = pair("llama", batch_size="auto:2", max_batch_size=4)
    requests = asked("loglikelihood", choices())
    assert_same(ours.loglikelihood(requests, disable_tqdm=True), plain.loglikelihood(requests, disable_tqdm=True))


def test_generation_is_lm_evals_own():
    plain, ours = pair("llama")
    requests = asked("generate_until", [(words(i, 4 + i), {"until": ["w7"], "max_gen_toks": 6}) for i in range(4)])
    assert ours.generate_until(requests, disable_tqdm=True) == plain.generate_until(requests, disable_tqdm=True)


def test_no_logits_are_made():
    _, ours = pair("llama")
    ours.model.resize_token_embeddings(5003, mean_resizing=False)
    requests = asked("loglikelihood", [(words(1, 20), " w3 w4"), (words(1, 20), " w3 w5"), (words(2, 21), " w4")])
    with Largest() as seen:
        ours.loglikelihood(requests, disable_tqdm=True)
    assert seen.numel < 5003 * 40  # less than the weight of the head and the two rows of logits of HFLM together


def test_tasks_of_the_evaluator():
    """`simple_evaluate` of three tasks, with the class and by its name in lm-eval's registry."""
    from datasets import Dataset, DatasetDict
    from lm_eval.api.registry import get_model
    from lm_eval.api.task import ConfigurableTask

    def data(rows):
        return lambda **_: DatasetDict({"test": Dataset.from_list(rows)})

    def tasks():
        text = [{"text": words(i, 12 + 9 * i)} for i in range(5)]
        quiz = [
            {"question": words(i, 6), "answers": [words(50 + i + 9 * k, 1 + i % 2) for k in range(4)], "right": i % 4}
            for i in range(8)
        ]
        common = {"test_split": "test", "num_fewshot": 0}
        return [
            ConfigurableTask(config={"task": "quiz", "custom_dataset": data(quiz), "output_type": "multiple_choice",
                                     "doc_to_text": "{{question}}", "doc_to_choice": "answers",
                                     "doc_to_target": "right", **common}),
            ConfigurableTask(config={"task": "pages", "custom_dataset": data(text), "doc_to_text": "",
                                     "output_type": "loglikelihood_rolling", "doc_to_target": "text",
                                     "metric_list": [{"metric": "word_perplexity"}], **common}),
            ConfigurableTask(config={"task": "continue", "custom_dataset": data(text), "doc_to_text": "{{text}}",
                                     "output_type": "generate_until", "doc_to_target": "text",
                                     "generation_kwargs": {"until": ["w9"], "max_gen_toks": 5},
                                     "metric_list": [{"metric": "exact_match"}], **common}),
        ]  # fmt: skip

    assert get_model("partita") is PartitaLM
    found = [
        lm_eval.simple_evaluate(model=one, tasks=tasks(), bootstrap_iters=0, log_samples=False, verbosity="ERROR")[
            "results"
        ]
        for one in pair("llama")
    ]
    for task in ("quiz", "pages", "continue"):
        plain, ours = ({k: v for k, v in one[task].items() if isinstance(v, float)} for one in found)
        assert plain.keys() == ours.keys() and plain
        torch.testing.assert_close(list(ours.values()), list(plain.values()), rtol=1e-6, atol=1e-6)
