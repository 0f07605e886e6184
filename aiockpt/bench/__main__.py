"""``python -m aiockpt.bench``."""

from __future__ import annotations

import sys

from aiockpt.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
