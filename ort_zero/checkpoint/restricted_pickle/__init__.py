"""Read a pickle without importing or calling anything that the pickle names.

:mod:`.unpickler` checks the opcodes and lets Python's unpickler make records of names, calls and objects;
:mod:`.values` defines the records. :mod:`.rebuild` turns records of torch's tensors and of harmless classes into
values. The records of all other objects stay records.
"""
