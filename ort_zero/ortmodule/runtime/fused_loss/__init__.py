"""Language-model head and cross entropy as one node that computes rows with a label alone, and never holds all logits.

:mod:`.rewrite` puts the node into an exported model, :mod:`.operators` runs it, :mod:`.lazy_logits` stands for the
logits that the model returns.
"""
