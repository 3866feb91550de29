"""Where memory ends: an error that says so, in the forward and in the backward pass, and the next call is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from partita.engine.backends.native import library

pytestmark = pytest.mark.skipif(library.load() is None, reason=f"no native library: {library.why_not()}")

# Every limit leaves a megabyte: Python 3.11 that finds no room for a frame of its own says "SystemError: error return
# without exception set", whatever it was about to call, with this library or without.
PROGRAM = """
import json, resource, torch, partita
torch.set_num_threads(1)
q, k, v = (torch.randn(8, 1024, 64, requires_grad=True) for _ in range(3))
grow = torch.randn(8, 1024, 64)
page = resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]

def within(room, call):
    held = int(open("/proc/self/statm").read().split()[0]) * page
    resource.setrlimit(resource.RLIMIT_AS, (held + room, hard))
    try:
        return "fine", call()
    except (MemoryError, RuntimeError, SystemError) as error:
        return f"{type(error).__name__}: {error}", None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))

def forward():
    return partita.attention(q, k, v, return_stats=True)

def backward(out):
    return torch.autograd.grad((out[0] * grow).sum() + out[1].entropy.sum(), (q, k, v))

first = forward()
want = backward(first)
found = []
for room in (1 << 20, 3 << 20, 5 << 20, 8 << 20, 16 << 20, 1 << 30):
    said, out = within(room, forward)
    if out is not None:
        assert torch.equal(out[0], first[0])
    out = forward()
    again, made = within(room, lambda: backward(out))
    if made is not None:
        assert all(torch.equal(a, b) for a, b in zip(made, want))
    assert all(torch.equal(a, b) for a, b in zip(backward(forward()), want))
    found.append((said, again))
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address spaces are limited on Linux")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer ends a process without memory")
def test_no_memory_is_an_error_that_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for said in (word for pair in found for word in pair):
        kind, _, what = said.partition(":")
        assert said == "fine" or kind == "MemoryError" or (kind == "RuntimeError" and "memory" in what), said
    assert found[0][1] != "fine" and found[-1] == ["fine", "fine"]  # a limit that bites, and one that does not


def test_what_the_library_has_no_memory_for_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    known = library.load()
    assert known is not None
    found = known._replace(functions={"backward": lambda *structures: 2}), None
    monkeypatch.setattr(library, "_find", lambda: found)
    with pytest.raises(MemoryError, match="workspace"):
        library.run("backward", b"", b"")
