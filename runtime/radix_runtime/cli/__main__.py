"""`python -m radix_runtime.cli` is the command `radix`."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
