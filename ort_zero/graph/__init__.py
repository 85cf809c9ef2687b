"""Keep the import paths of earlier releases; the code is in :mod:`ort_zero.ortmodule.runtime`."""
