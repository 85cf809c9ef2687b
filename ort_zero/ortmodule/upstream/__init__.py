"""Make onnxruntime-training 1.19.2, the last release, run on today's torch; nothing under site-packages is edited.

:mod:`.hooks` says what to do after which import, :mod:`.loading` imports ORTModule for an engine, :mod:`.names` and
:mod:`.patches` have the patches, :mod:`.extensions` compiles and loads the two C++ extensions.
"""

PACKAGE = "onnxruntime.training.ortmodule"
