"""Run models by ORTModule of onnxruntime-training 1.19.2; frozen, see README.md."""
