"""Write the tensors of a checkpoint as one model, by several ranks, in constant memory."""
