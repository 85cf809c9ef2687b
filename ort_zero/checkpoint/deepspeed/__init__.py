"""Reads the checkpoints that DeepSpeed itself writes for ZeRO-0, 1, 2 and 3, without DeepSpeed and without their data.

How the values lie in the files:

* ZeRO-1 and 2 (and BF16_Optimizer), :mod:`.zero12`: every parameter group is one flat vector, its parameters one after
  the other (with ``param_alignment_paddings`` after each, if any), filled up to a multiple of 2 * world size and cut
  into equal parts, one per rank. The saved masters end where the filling begins, the moments may go on.
* ZeRO-3, :mod:`.zero3`: every parameter is cut into ceil(elements / world size) elements per rank; what a rank holds of
  the parameters of a sub-group lies one after the other in one flat vector, the filling of each parameter included.
* The module file, :mod:`.module_state`, has what no optimizer trains: frozen parameters and buffers. ZeRO-3 has frozen
  parameters in pieces, in the module file of each rank.

:func:`.reader.open_deepspeed` puts this together; :mod:`.file_names` and :mod:`.state_files` find and open the files,
and refuse what does not belong together.
"""
