"""What the tests share: paths, the tools beside the interpreter, a process that imports what all ranks import."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "dist"))
os.environ.setdefault("ORT_ZERO_WARM_RANKS", "1")
# DeepSpeed builds its operators with the ninja on the path, and builds them again when that is another one
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
# ... and those of an environment at another path, half a minute each time that two clones take turns
_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
_environment = hashlib.sha256(f"{sys.prefix} {sys.version}".encode()).hexdigest()[:12]
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(_cache, "torch_extensions", f"tests_{_environment}"))
