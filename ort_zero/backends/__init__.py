"""The backends that run models in ONNX Runtime: what the package asks of one, and what they have in place.

:mod:`.interface` declares what a backend offers; :mod:`.loading` finds one; :mod:`.registry` lists the models that run
and the patches that are applied. :mod:`.loading` alone imports a backend; a backend imports the other two.
"""
