"""Run a model on text at several lengths, watched."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from partita.cli import UsageError
from partita.monitor import Finding, Watch
from partita.monitor.options import positions
from partita.monitor.record import clean
from partita.monitor.report.verdict import sentence

# Lewis Carroll, 1865
TEXT = """\
Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: once or twice
she had peeped into the book her sister was reading, but it had no pictures or conversations in it, "and what is the
use of a book," thought Alice "without pictures or conversations?" So she was considering in her own mind (as well as
she could, for the hot day made her feel very sleepy and stupid), whether the pleasure of making a daisy-chain would
be worth the trouble of getting up and picking the daisies, when suddenly a White Rabbit with pink eyes ran close by
her. There was nothing so very remarkable in that; nor did Alice think it so very much out of the way to hear the
Rabbit say to itself, "Oh dear! Oh dear! I shall be late!" (when she thought it over afterwards, it occurred to her
that she ought to have wondered at this, but at the time it all seemed quite natural); but when the Rabbit actually
took a watch out of its waistcoat-pocket, and looked at it, and then hurried on, Alice started to her feet, for it
flashed across her mind that she had never before seen a rabbit with either a waistcoat-pocket, or a watch to take out
of it, and burning with curiosity, she ran across the field after it, and fortunately was just in time to see it pop
down a large rabbit-hole under the hedge. In another moment down went Alice after it, never once considering how in
the world she was to get out again. The rabbit-hole went straight on like a tunnel for some way, and then dipped
suddenly down, so suddenly that Alice had not a moment to think about stopping herself before she found herself
falling down a very deep well. Either the well was very deep, or she fell very slowly, for she had plenty of time as
she went down to look about her and to wonder what was going to happen next."""
BATCH = 4
NUMBERS = ("normalized_entropy", "effective_width", "max_score", "sink_first", "sink_top", "score_variance")
UNKNOWN = 0.9  # share of unknown tokens above which a text is of no use for the model


def inspect(target: str, *, text: Path | None, max_length: int, rows: int | None, as_bytes: bool) -> Watch:
    """Watch one pass at each length 16, 32, 64, ... that the model and the text allow."""
    words = read_text(text)
    model, tokenizer = load(target)
    model.eval()
    source = text.name if text else "built-in text"
    if as_bytes:
        tokenizer = None
    elif tokenizer is None and not is_factory(target):
        raise UsageError(
            f"{target} has no tokenizer, so the text cannot become the tokens it was trained on. Put the tokenizer's "
            f"files next to the model, use FILE.py:factory that returns (model, tokenizer), or give --bytes to feed "
            f"the bytes of the text, which shows shapes and scales and nothing of what the model does with words."
        )
    ids = encode(words, model, tokenizer)
    longest = min(max_length, positions(model) or max_length, len(ids))
    if longest < 2:
        raise UsageError(f"the text has {len(ids)} tokens; at least two are needed.")
    unit = "tokens" if tokenizer is not None else "bytes"
    fed = f"{len(ids)} {unit} of {source}"
    if tokenizer is None:
        fed += f", modulo a vocabulary of {_vocabulary(model)}, in place of tokens: no tokenizer"
    lengths = sorted({*(n for n in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n < longest), longest})
    watched = Watch(model, rows=rows, received=True, title=f"{type(model).__name__} on {source}")
    with watched, torch.no_grad():
        about = watched.record.provenance
        about["fed"], about["step_names"] = fed, {}
        for length in lengths:
            starts = [int(i * max(0, len(ids) - length) / max(1, BATCH - 1)) for i in range(BATCH)]
            batch = torch.stack([ids[s : s + length] for s in dict.fromkeys(starts)])
            try:
                run(model, batch)
            except UsageError:
                if length == lengths[0]:
                    raise
                break  # a limit on the length that the config does not have
            about["step_names"][str(watched.step)] = f"{length} {unit}"
    return watched


def is_factory(target: str) -> bool:
    """FILE.py:factory."""
    left, colon, _ = target.rpartition(":")
    return bool(colon) and left.endswith(".py")


def run(model: nn.Module, ids: torch.Tensor) -> Any:
    """input_ids by name where the model has that argument, else as the first one; encoder-decoders get them twice."""
    config = getattr(model, "config", None)
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    named = code is not None and "input_ids" in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        if getattr(config, "is_encoder_decoder", False):
            return model(input_ids=ids, decoder_input_ids=ids)
        return model(input_ids=ids) if named else model(ids)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"the model does not run on input_ids of length {ids.shape[-1]}: {type(error).__name__}: "
            f"{_first_line(error)}"
        ) from error


def load(target: str, *, head: bool = False) -> tuple[nn.Module, Any]:
    """FILE.py:factory, or a Hugging Face folder or name that needs no network; `head`: with its language model head."""
    if is_factory(target):
        left, _, right = target.rpartition(":")
        return _factory(Path(left), right)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = _package_folder(target)
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(
            "Hugging Face models need transformers: pip install transformers. Your own model: partita inspect "
            "FILE.py:factory"
        )
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model = _auto(transformers, folder or target, head).from_pretrained(folder or target, local_files_only=True)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{target!r} is not a model available here ({_first_line(error)}). Give a folder, a cached name, or "
            f"FILE.py:factory."
        ) from error
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder or target, local_files_only=True)
        if not tokenizer.get_vocab() or len(tokenizer) <= len(tokenizer.all_special_ids):
            tokenizer = None  # made of nothing but a configuration: it knows no word
    except Exception:
        tokenizer = None
    return model, tokenizer


def _auto(transformers: Any, target: str, head: bool) -> Any:
    """The class that loads a model: bare, or as the kind of language model it was saved as."""
    if not head:
        return transformers.AutoModel
    config = transformers.AutoConfig.from_pretrained(target, local_files_only=True)
    saved = " ".join(getattr(config, "architectures", None) or [])
    if "MaskedLM" in saved:
        return transformers.AutoModelForMaskedLM
    if "CausalLM" in saved or "LMHead" in saved:
        return transformers.AutoModelForCausalLM
    raise UsageError(
        f"{target} was saved as {saved or 'no kind of model'}, without the head of a language model, so it predicts no "
        f"token and no loss can be taken. FILE.py:factory may put one on it: examples/encoder_with_head.py does."
    )


def _factory(path: Path, name: str) -> tuple[nn.Module, Any]:
    if not path.is_file():
        raise UsageError(f"{path} does not exist.")
    spec = importlib.util.spec_from_file_location("partita_inspected", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{path} cannot be imported: {_theirs(error, path)}") from error
    finally:
        sys.path.pop(0)
    factory: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(factory):
        known = sorted(n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_"))
        raise UsageError(f"{path} has no function {name!r}; it has {', '.join(known) or 'none'}.")
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name}() raised {_theirs(error, path)}") from error
    model, tokenizer = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name}() must return a torch.nn.Module or (model, tokenizer); it returned {type(model).__name__}."
        )
    return model, tokenizer


def _theirs(error: BaseException, path: Path) -> str:
    """The error and the last line of the user's file it came through."""
    import traceback

    own = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
    line = own[-1].lineno if own else getattr(error, "lineno", None)
    return f"{type(error).__name__}: {_first_line(error)}" + (f" ({path}, line {line})" if line else "")


def _package_folder(name: str) -> str | None:
    """The demo's encoder by the name of the package that carries it."""
    package = name.replace("-", "_")
    if Path(name).exists() or not package.isidentifier() or importlib.util.find_spec(package) is None:
        return None
    from importlib import resources

    folder = resources.files(package) / "model"
    return str(folder) if folder.is_dir() else None


def read_text(path: Path | None) -> str:
    """What the file holds, or the built-in text."""
    if path is None:
        return TEXT
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def encode(text: str, model: nn.Module, tokenizer: Any) -> torch.Tensor:
    """Token ids, one dimension; without a tokenizer bytes, folded into the vocabulary."""
    if tokenizer is not None:
        try:
            found = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        except TypeError:
            found = tokenizer(text)
        ids = found["input_ids"] if isinstance(found, dict) or hasattr(found, "keys") else found
        made = torch.as_tensor(ids, dtype=torch.long).flatten()
        unknown = getattr(tokenizer, "unk_token_id", None)
        if unknown is not None and len(made) and (share := float((made == unknown).float().mean())) > UNKNOWN:
            raise UsageError(
                f"the tokenizer knows almost nothing of this text: {share:.0%} of the tokens are its unknown token. "
                f"Check that its files belong to the model, or give --bytes."
            )
        return made
    return torch.tensor(list(text.encode()), dtype=torch.long) % _vocabulary(model)


def _vocabulary(model: nn.Module) -> int:
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 256)


def summary(watched: Watch, findings: list[Finding]) -> dict[str, Any]:
    """What --json prints: sentence, findings, a row per layer at the longest length."""
    record = watched.finished()
    last = max((b.step for b in record.blocks), default=None)
    layers = [
        {"layer": b.layer, "name": record.sites[b.layer].name, "heads": b.heads} | {n: b.overall(n) for n in NUMBERS}
        for b in record.blocks
        if b.step == last
    ]
    return {
        "schema": "partita.inspect/1",
        "sentence": sentence(record, findings),
        "fed": record.provenance.get("fed"),
        "coverage": clean(record.coverage),
        "overhead": clean(record.overhead),
        "findings": [clean(f.as_dict()) for f in findings],
        "layers": clean(layers),
    }


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
