"""Reads the checkpoints that DeepSpeed itself writes, without DeepSpeed and without the data of their tensors.

How the values of one model rank (the number behind ``mp_rank_``) lie in its files, :mod:`.model_rank`:

* ZeRO-1 and 2 (and BF16_Optimizer), :mod:`.zero12`: every parameter group is one flat vector, its parameters one after
  the other (with ``param_alignment_paddings`` after each, if any), filled up to a multiple of 2 * world size and cut
  into equal parts, one per rank. The saved masters end where the filling begins, the moments may go on.
* ZeRO-3, :mod:`.zero3`: every parameter is cut into ceil(elements / world size) elements per rank; what a rank holds of
  the parameters of a sub-group lies one after the other in one flat vector, the filling of each parameter included.
* The module file, :mod:`.module_state`, has what no optimizer trains: frozen parameters and buffers. ZeRO-3 has frozen
  parameters in pieces, in the module file of each rank.

How model ranks, and files of other kinds, make up a model:

* The stages of a pipeline, :mod:`.pipeline`: each stage is a model rank; the module is in a file for each layer.
* A mixture of experts, :mod:`.experts`: a parameter group of experts has one vector for each expert-parallel rank.
* Tensor-parallel ranks, :mod:`.tensor_parallel`: each is a model rank with a part of every tensor, or all of it;
  :mod:`.split_rules` says how the ranks share a tensor, :mod:`.split_geometry` which bytes follow from that.
* A universal checkpoint, :mod:`.universal`: files for each parameter.

:func:`.reader.open_deepspeed` puts this together; :mod:`.topology` says which model ranks there must be;
:mod:`.file_names` and :mod:`.state_files` find and open the files, and refuse what does not belong together.
"""
