"""python -m partita"""

from __future__ import annotations

import sys

from partita.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
