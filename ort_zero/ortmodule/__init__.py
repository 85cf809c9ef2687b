"""The engine of onnxruntime-training: each graph of Dynamo becomes a training graph of ORTModule.

:mod:`.upstream` makes ORTModule run on today's torch.
"""
