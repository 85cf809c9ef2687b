"""What the tests share: paths, the tools beside the interpreter, a process that imports what all ranks import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "dist"))
os.environ.setdefault("ORT_ZERO_WARM_RANKS", "1")
# DeepSpeed builds its operators with the ninja on the path, and builds them again when that is another one
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
