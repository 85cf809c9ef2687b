"""ZeRO-3 inside ORT's graph: nodes that gather parameters and reduce gradients.

:mod:`.collective_plan` decides what is gathered and reduced where, :mod:`.insert_collectives` puts that into the graph,
:mod:`.verify` checks the result, and :mod:`.gather_reduce` does it when ORT runs the graph.
"""
