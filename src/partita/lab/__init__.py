"""Experiments, pages and the command line; nothing below imports it."""
