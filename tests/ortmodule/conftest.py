"""What the tests of the old engine share: the process that forks ranks has ORTModule imported."""

import os

os.environ["ORT_ZERO_BACKEND"] = "ortmodule"
os.environ["ORT_ZERO_WARM_IMPORTS"] += " ort_zero.ortmodule.testing.warm"
