"""Examine machines for ``ort-zero doctor``: this one (:mod:`.machine`), and the ranks of a job (:mod:`.ranks`)."""
