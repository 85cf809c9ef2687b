"""Run ``ort-zero stats merge`` under its name in onnxruntime's guide: ``--pt_dir A --ort_dir B --output_dir C``."""

from __future__ import annotations

from ort_zero.statistics.compare.merge import merge_activation_summary

__all__ = ["merge_activation_summary"]

if __name__ == "__main__":
    import runpy
    import sys

    sys.argv[1:1] = ["stats", "merge"]
    runpy.run_module("ort_zero", run_name="__main__")
