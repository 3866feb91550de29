"""The command line, its pages and figures; nothing below imports it."""
