"""How the repository is written: in plain English, in files of at most 600 lines, no six lines twice.

Readers come from everywhere and know *mask, tile, logits, dispatch, in-place, overlap, materialise, no-op*. Each habit
below is listed with what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("src", "theory", "native", "docs", "examples", "benchmarks", "tools", "tests", ".ci")
KINDS = (".py", ".pyi", ".cpp", ".h", ".md", ".toml", ".yml", ".html", ".js", ".sh", ".txt", "")
# The list itself, and a text of other people.
QUOTED = ("tests/test_style.py", "examples/small_causal/")

CODE = (
    "attention autograd backend backends benchmark call calls code command compiler dynamo engine face faces function "
    "functions gibbs gradient graph graphs hook inductor interpreter kernel kernels layer layers library loader loss "
    "losses mask model module modules monitor operator optimizer pass passes policy request score spec state "
    "support tensor tensors test tests tile tiles torch tracer triton wheel"
).replace(" ", "|")
HABITS = {
    r"\b(nobody|somebody|whoever)\b": "name it: autograd, the caller, the tracer; or the passive",
    r"\bas many\b[^.;:]{0,60}?\bas\b|\bso many\b": "the same number of; this many",
    r"\b(is|are|was|were|be|been|being) told\b": "receives, is passed; an error is raised",
    r"\bhears? (from|of|about)\b": "receives",
    r"\bin (its|their|our|his|my) own words\b|\bin our words\b|\bwords of ours\b": "drop it",
    r"\b(its|their) own affairs?\b": "drop it",
    r"\b(lies?|lay|lying) (in memory|side by side|(behind|beside|next to|after) (the|each) other)\b": "is, is stored",
    rf"\b({CODE}) (says|say|asks|ask|(is|are|was|were) asked)\b": "returns, raises, calls, requests, states",
    r"\bthat (nobody|no one) (holds|watches|differentiates|asks)\b": "drop it, or name what does",
}  # fmt: skip
SENTENCES = {
    "The only door": "Dispatch",
    "takes the shortest way that nobody can tell": "calls the fastest path that gives the same result",
    "need to be asked for; what is no tensor": "require `grouped=True`",
    "what is often given in its place": "with a hint for common mistakes",
    "decoding above all": "inference attention under torch.compile",
    "cannot be told of a function of tiles": "scores given by a callable are materialised",
    "whose gradients exist before they are asked for": "computed in the forward pass",
    "while it computes": "overlapped with compute",
    "lay aside for the loss": "store",
    "what torch keeps no version of": "tensors without a version counter are not tracked",
    "The other margin": "attention received per key",
    "Columns, and two distributions": "Divergences and distillation",
    "Parts that merge": "Merging partial results",
    "Edges that are decided, not accidents": "Edge cases",
    "In other libraries' words": "Adapters",
    "keeps the model's own kernels and its bits": "outputs are bit-identical",
    "stay with the process for the next call": "are a reusable workspace",
}
RULES = HABITS | {re.escape(sentence.lower()): plain for sentence, plain in SENTENCES.items()}


def test_nothing_is_written_that_readers_stumble_over():
    forbidden = re.compile("|".join(f"({rule})" for rule in RULES))
    files = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix in KINDS]
    found = []
    for path in sorted([*files, *ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "conftest.py", ROOT / "pyproject.toml"]):
        name = path.relative_to(ROOT).as_posix()
        if not path.is_file() or name.startswith(QUOTED) or "__pycache__" in name:
            continue
        text = re.sub(r"\n\s*(?:#|//|\*)?\s*", " ", path.read_text(encoding="utf-8").lower())  # over lines
        for match in forbidden.finditer(text):
            plain = next(RULES[rule] for rule in RULES if re.fullmatch(rule, match[0]))
            found.append(f"{name}: ...{text[max(0, match.start() - 40) : match.end() + 30]}... -> {plain}")
    assert not found, "\n".join(found)


def test_a_file_has_at_most_600_lines():
    sources = [path for place in PLACES for path in (ROOT / place).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    long = {path.name: count for path in sources if (count := len(path.read_text(encoding="utf-8").splitlines())) > 600}
    assert not long


def test_no_six_lines_of_code_are_written_twice():
    """Blank lines, comments, imports, decorators and signatures aside; the same shape is found by eye."""
    seen: dict[tuple[str, ...], str] = {}
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "theory" / "partita_theory").rglob("*.py")]):
        lines = [(at, line.strip()) for at, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)]
        lines = [(at, line) for at, line in lines if line and not line.startswith(("#", "@", "import ", "from "))]
        for k in range(len(lines) - 5):
            six = tuple(line for _, line in lines[k : k + 6])
            if not any(line.startswith((") ->", "def ")) or line.endswith(") -> None:") for line in six):
                where = f"{path.relative_to(ROOT)}:{lines[k][0]}"
                assert seen.setdefault(six, where) == where, f"{where} repeats {seen[six]}"
