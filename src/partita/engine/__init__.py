"""The engine: one streaming pass over a request, and the state it leaves.

request     what is wanted of a pass, in canonical form
terms       a support bound to sizes
state       the sums of a set of keys: a monoid
execute     the only door to the backends
autograd    the operators and their derivatives
backends    tiled (any torch device), native (the CPU, in C++)
"""

from __future__ import annotations

from partita.engine.backends import backend, explain
from partita.engine.state import State, Stats, merge

__all__ = ["State", "Stats", "backend", "explain", "merge"]
