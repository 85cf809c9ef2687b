"""Reads a pickle without importing or calling anything that it names.

:mod:`.machine` runs the opcodes, and makes records of the classes, calls and objects, which :mod:`.values` defines;
:mod:`.rebuild` makes tensors and values of the records, :mod:`.classes` those of harmless classes. What neither knows
stays a record.
"""
