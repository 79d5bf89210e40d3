"""``python -m fabric_kv.bench``."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
