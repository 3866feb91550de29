"""The engine: one streaming pass over a request, and the state it leaves.

request     what is wanted of a pass, in canonical form
terms       a support bound to sizes
state       the sums of a set of keys: a monoid
dispatch    detects autograd and tracers, and chooses the path
autograd    a pass as one node, and its derivatives
small       what torch's dense operations do sooner than a pass
operators   a pass as torch operators, for tracers
backends    tiled (any torch device), native (the CPU, in C++)
"""

from __future__ import annotations

from partita.engine.backends import backend, explain
from partita.engine.state import State, Stats, merge

__all__ = ["State", "Stats", "backend", "explain", "merge"]
