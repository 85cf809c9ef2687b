"""Save memory, and the time to fill and copy it, in training on CPUs: ``"cpu_memory"`` in the section.

Nothing here needs ONNX Runtime, and results have equal bits. :mod:`.measures` switches the measures; each other module
holds one.
"""
