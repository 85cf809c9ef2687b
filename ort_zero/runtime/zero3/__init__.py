"""ZeRO-3 inside the graph: nodes that gather parameters and reduce gradients."""
