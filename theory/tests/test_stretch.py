"""partita stretch: the same tokens at every length, cells that survive a stop, a verdict that follows the numbers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from partita.attn import YaRN
from partita.cli import UsageError, main
from partita.scale import LogLength
from partita_theory import stretch as command
from partita_theory.stretch import Question, page
from partita_theory.stretch.question import Cells
from partita_theory.stretch.reader import OWN, Setting, reader

FACTORY = """
import torch
from torch import nn
from partita.nn import TransformerEncoderLayer

class Model(nn.Module):
    trained_length = 8
    def __init__(self, causal, rotary):
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([TransformerEncoderLayer(16, 2, 16, 0.0, batch_first=True, rotary=rotary)] * 2)
    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, is_causal=self.causal)
        return x @ self.embed.weight.mT

def make(causal=True, rotary=True):
    torch.manual_seed(0)
    return Model(causal, rotary).eval()

def plain():
    return make(rotary=False)

def foreign():
    return nn.Embedding(64, 64)
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "small.py").write_text(FACTORY)
    (tmp_path / "text.txt").write_text("".join(chr(97 + (7 * i * i + i) % 26) for i in range(200)))
    return tmp_path / "small.py", tmp_path / "text.txt"


def ask(files: tuple[Path, Path], name: str, *more: str) -> int:
    model, text = files
    out = str(model.parent / "out")
    return main(["stretch", f"{model}:{name}", "--text", str(text), "--to", "32", "-o", out, "--targets", "32", *more])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("longest", [16, 40])
def test_every_length_scores_the_same_tokens(causal: bool, longest: int) -> None:
    ids = torch.arange(1000)
    question = Question.of(ids, 10, longest, 60, causal)
    scored = []
    for window in range(len(question.starts)):
        each = [question.passage(window, n)[question.places(window, n)].tolist() for n in question.lengths]
        assert all(one == each[0] for one in each)
        assert all(len(question.passage(window, n)) == n for n in question.lengths)
        scored += each[0]
    assert len(set(scored)) == len(scored) == question.targets >= 60  # no token counts twice
    parts = question.batches(longest)
    assert [k for part in parts for k in part] == list(range(len(question.starts)))
    for part in parts:
        passages, places = question.asked(part, longest)
        assert passages.shape == (len(part), longest)
        assert len({len(at) for at in places}) == 1
    assert question.lengths[0] == 10
    assert question.lengths[-1] == longest


def test_a_text_that_is_too_short_is_told() -> None:
    with pytest.raises(UsageError, match=r"63 tokens; 8 windows.*need 75"):
        Question.of(torch.arange(63), 10, 40, 60, True)


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_is_that_of_the_model(files: tuple[Path, Path], causal: bool) -> None:
    space: dict[str, Any] = {}
    exec(files[0].read_text(), space)
    model = space["make"](causal)
    reads = reader(model, None if causal else 63)
    assert reads.causal is causal
    ids, at = torch.randint(60, (20,), generator=torch.Generator().manual_seed(1)), [12, 15, 19]
    with torch.no_grad():
        if causal:
            logits = model(ids[None])[0][torch.tensor(at) - 1]
        else:
            hidden = ids.clone()
            hidden[at] = 63
            logits = model(hidden[None])[0][at]
    want = torch.nn.functional.cross_entropy(logits, ids[at]).item()
    assert reads.nll(ids[None], [at])[0] == pytest.approx(want, rel=1e-5)
    reads.apply(Setting(YaRN(4.0, 8), LogLength(8)))
    assert reads.nll(ids[None], [at])[0] != pytest.approx(want, rel=1e-5)
    reads.apply(OWN)
    assert reads.nll(ids[None], [at])[0] == pytest.approx(want, rel=1e-5)


def test_a_run_is_whole_and_is_not_repeated(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(files, "make") == 0
    first = capsys.readouterr().out
    out = files[0].parent / "out"
    found = json.loads((out / "stretch.json").read_text())
    assert found["lengths"] == [8, 16, 32]
    assert len(found["settings"]) == 6 + 2 * 6
    assert found["says"] in first
    assert re.search(r"\[18/18\] .* at 32: ", first)
    assert {row["length"] for row in found["heads"]} == {8, 16, 32}
    assert len(found["heads"]) == 2 * 2 * 3
    for row in found["heads"]:
        assert row["critical"] > 0
        assert 0 <= row["entropy"] <= math.log(row["length"]) + 1e-6
    html = (out / "stretch.html").read_text()
    assert "<script" not in html
    assert all(setting["name"].split(" with ")[0] in html for setting in found["settings"])
    lines = (out / "cells.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 18 * 3
    # a stop in the middle of a line: that cell alone is made again, and nothing else changes
    (out / "cells.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])
    assert ask(files, "make") == 0
    again = capsys.readouterr().out
    assert again.count(" nats (") == 1
    assert json.loads((out / "stretch.json").read_text()) == found
    # another question does not mix with these cells
    assert ask(files, "make", "--trained", "4") == 2
    assert "another model, text or question" in capsys.readouterr().err


def test_an_interrupted_run_says_that_it_goes_on(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, kept = Cells.add, list[tuple[Any, ...]]()

    def stop(cells: Cells, *cell: Any) -> None:
        if len(kept) == 2 * 3:  # two settings, at three lengths
            raise KeyboardInterrupt
        kept.append(cell)
        add(cells, *cell)

    monkeypatch.setattr(Cells, "add", stop)
    assert ask(files, "make") == 130
    assert "goes on from them" in capsys.readouterr().err
    assert len((files[0].parent / "out" / "cells.jsonl").read_text().splitlines()) == 1 + 2 * 3


def test_without_turning_positions_the_scales_are_left(files: tuple[Path, Path]) -> None:
    assert ask(files, "plain", "--json") == 0
    found = json.loads((files[0].parent / "out" / "stretch.json").read_text())
    assert len(found["settings"]) == 1 + 6


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("foreign", (), "neither a model of transformers nor"),
        ("make", ("--to", "8"), "above the length of training"),
        ("make", ("--to", "4000"), "windows with different tokens"),
        ("make", ("--targets", "0"), "--targets"),
    ],
)
def test_what_cannot_be_asked_is_told(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], name: str, more: tuple[str, ...], message: str
) -> None:
    assert ask(files, name, *more) == 2
    assert message in capsys.readouterr().err


# ---- the verdict, from planted losses --------------------------------------------------------------------------------


class _Planted:
    causal = turns = True

    def code(self, setting: Setting) -> str:
        return f"use({setting.name!r})"


def verdict(tmp_path: Path, own: float, short: float, other: float, noise: float) -> dict[str, Any]:
    """Two settings over 20 windows; losses vary by window, and a little between settings."""
    question = Question.of(torch.arange(1000), 10, 40, 100, True)
    cells = Cells(tmp_path / "cells.jsonl", {})
    shared = torch.randn(20, generator=torch.Generator().manual_seed(0))
    apart = noise * torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    better = Setting(YaRN(4.0, 10))
    for n in question.lengths:
        level = short if n == 10 else own
        cells.known[OWN.name, n] = (level + shared + (apart[0] if n > 10 else 0)).tolist()
        cells.known[better.name, n] = ((short if n == 10 else other) + shared + (apart[1] if n > 10 else 0)).tolist()
    found = command._judged(_Planted(), question, cells, [OWN, better])
    found.update(model="Model", heads=[])
    page.render(found)
    return found


YARN = "YaRN(4.0, trained=10)"


@pytest.mark.parametrize(
    ("losses", "recommended", "begins", "ends"),
    [
        ({"own": 4.0, "other": 2.8, "noise": 0.01}, YARN, YARN, "longer text pays."),
        ({"own": 4.0, "other": 3.2, "noise": 0.01}, YARN, YARN, "cutting it off costs nothing."),
        ({"own": 4.0, "other": 3.0, "noise": 1.0}, None, f"Nothing helps: {YARN} did best on the windows that choose",
         "than the unmodified model, which is within the interval."),
        ({"own": 3.0, "other": 3.0 - 1e-6, "noise": 0.0}, None, "Nothing helps",
         "0.000 nats better than the unmodified model, which is rounding."),
        ({"own": 3.0, "other": 3.5, "noise": 0.01}, None, "Nothing helps: of all settings", ""),
    ],
    ids=["beyond its interval", "cutting the text has it too", "within its interval", "rounding", "none is better"],
)  # fmt: skip
def test_a_gain_is_recommended_beyond_its_interval_and_beyond_rounding(
    tmp_path: Path, losses: dict[str, float], recommended: str | None, begins: str, ends: str
) -> None:
    found = verdict(tmp_path, short=3.0, **losses)
    assert found["recommended"] == recommended
    assert found["code"] == (f"use({recommended!r})" if recommended else None)
    assert found["says"].startswith(begins) and found["says"].endswith(ends)
    if losses["other"] == 2.8:
        assert found["gain"]["mean"] == pytest.approx(1.2, abs=0.02)
    if losses["other"] == 3.2:
        assert "worse than that model with 10 tokens alone" in found["says"]
    if losses["noise"] == 0.0:
        assert found["gain"]["mean"] - found["gain"]["half"] > 0


# ---- the model in the repository -------------------------------------------------------------------------------------

SMALL = Path(__file__).parents[2] / "examples" / "small_causal"
there = pytest.mark.skipif(not (SMALL / "model.pt").exists(), reason="the source archive leaves the weights out")


def small(tmp_path: Path, name: str, to: int, targets: int) -> dict[str, Any]:
    target, text = f"{SMALL.parent / 'small_causal_model.py'}:{name}", str(SMALL / "held_out.txt")
    sizes = ["--to", str(to), "--targets", str(targets)]
    assert main(["stretch", target, "--text", text, *sizes, "-o", str(tmp_path / name), "--json"]) == 0
    found: dict[str, Any] = json.loads((tmp_path / name / "stretch.json").read_text())
    return found


def losses(found: dict[str, Any], setting: str) -> list[float]:
    (row,) = [s for s in found["settings"] if s["name"] == setting]
    return [at["loss"]["mean"] for at in row["at"]]


@there
def test_the_model_of_the_repository_is_small_trained_and_loses_beyond_its_length(tmp_path: Path) -> None:
    assert (SMALL / "model.pt").stat().st_size < 3e6 and (SMALL / "held_out.txt").stat().st_size < 3e5
    found = small(tmp_path, "trained", 256, 256)
    assert (found["kind"], found["trained"], found["lengths"]) == ("causal", 64, [64, 128, 256])
    own = losses(found, "unmodified")
    assert own[0] < 2.2  # log 71 = 4.3 is to know the letters and nothing else
    assert own[2] > own[0] + 0.1  # distances it has never seen
    assert losses(found, "Clipped(63)")[2] < own[2] - 0.1


@there
def test_where_no_byte_sees_further_back_than_in_training_length_costs_nothing(tmp_path: Path) -> None:
    found = small(tmp_path, "windowed", 128, 256)
    own = losses(found, "unmodified")
    assert own[1] < own[0] + 0.05
    assert losses(found, "Clipped(63)")[1] == pytest.approx(own[1], abs=1e-5)  # no distance is longer


def test_hugging_face_models_are_read_as_they_were_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers to test partita.hf")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**small, vocab_size=64, max_position_embeddings=8)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    transformers.BertModel(transformers.BertConfig(**small, vocab_size=64)).save_pretrained(tmp_path / "bert")
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + (7 * i * i + i) % 26) for i in range(200)))
    common = ["--text", str(text), "--to", "16", "--bytes", "-o", str(tmp_path / "out"), "--targets", "32"]
    assert main(["stretch", str(tmp_path / "llama"), *common, "--json"]) == 0
    found = json.loads((tmp_path / "out" / "stretch.json").read_text())
    assert found["kind"] == "causal"
    assert len({row["at"][-1]["loss"]["mean"] for row in found["settings"]}) > 8  # settings act
    assert any("partita.hf.set_positions(model, partita.attn.Clipped(7))" in row["code"] for row in found["settings"])
    capsys.readouterr()
    assert main(["stretch", str(tmp_path / "bert"), *common, "--trained", "4"]) == 2
    assert "without the head of a language model" in capsys.readouterr().err
