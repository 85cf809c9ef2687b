"""What the tests share: paths, and one process that imports what all ranks import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "dist"))
os.environ.setdefault("ORT_ZERO_WARM_RANKS", "1")
