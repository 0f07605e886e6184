"""``python -m aiockpt``."""

from __future__ import annotations

import sys

from aiockpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
