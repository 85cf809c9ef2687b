"""Connect the package to the backend, the engine that runs models in ONNX Runtime.

:mod:`.interface` declares the functions of a backend, and :mod:`.loading` returns the backend. :mod:`.registry` lists
the running models and the applied patches. Only :mod:`.loading` imports a backend; a backend imports the other two.
"""
