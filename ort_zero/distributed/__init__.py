"""Exchange values and failures between the ranks of a job, also beside the connections of training."""
