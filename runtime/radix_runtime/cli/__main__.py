"""`python -m radix_runtime.cli` is the command `radix`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
