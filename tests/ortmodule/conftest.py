"""What the tests of ORTModule share: the engine of sections without a backend."""

import os

os.environ["ORT_ZERO_BACKEND"] = "ortmodule"
