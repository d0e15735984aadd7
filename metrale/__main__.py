# SPDX-License-Identifier: MIT OR Apache-2.0
"""``python -m metrale`` is the ``metrale`` command."""

from __future__ import annotations

import sys

from metrale.cli import main

if __name__ == "__main__":
    sys.exit(main())
