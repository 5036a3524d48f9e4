"""``python -m dflash_jax``."""

import sys

from dflash_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
