"""Write a checkpoint in another format or for another world size."""
