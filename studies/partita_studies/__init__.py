"""Experiments that put the theory to the test, the errata, and the demonstration: users of partita, not part of it.

experiments   one file per question; `partita study list | run | show`
errata        formulas in circulation that are wrong, next to the right ones, as numbers
demo          `partita demo`
"""
