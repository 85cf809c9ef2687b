"""Read checkpoints in DeepSpeed's own formats, without DeepSpeed and without the data of their tensors.

:func:`.reader.open_deepspeed` joins the model ranks of a checkpoint (the numbers after ``mp_rank_``), which
:mod:`.model_rank` reads one at a time:

* ZeRO-1 and 2 (and BF16_Optimizer): every parameter group is one flat vector of its parameters, each followed by its
  padding in ``param_alignment_paddings``, if any. The vector is padded to a multiple of 2 * world size elements and cut
  into equal parts, one per rank. The saved masters end where this padding begins; moments may go on.
* ZeRO-3: every parameter is cut into ceil(elements / world size) elements per rank. A rank's cuts of the parameters of
  a sub-group, with their padding, lie one after the other in one flat vector. :mod:`.partitioning` finds both.
* The module file, :mod:`.module_state`: frozen parameters and buffers. With ZeRO-3 each rank's has a piece of each
  frozen parameter.
* The stages of a pipeline, :mod:`.pipeline`: each stage is a model rank; the module is in one file per layer.
* A mixture of experts, :mod:`.experts`: a parameter group of experts has one vector for each expert-parallel rank.
* Tensor-parallel ranks, :mod:`.tensor_parallel`: each has a part of every tensor, or all of it; :mod:`.splits`
  tells how the ranks share a tensor.
* A universal checkpoint, :mod:`.universal`: files for each parameter.

:mod:`.file_names` and :mod:`.state_files` find and open the files, and refuse files that do not belong together.
"""
