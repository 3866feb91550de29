"""How fast, how large, how exact: partita beside torch's own functions. `python -m benchmarks --help`."""
