"""Loads ort_zero as torch does from 2.5 on; on the path of what the tests start with an older torch."""

import os

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    from ort_zero.plugin import autoload

    autoload()
