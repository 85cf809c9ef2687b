#!/usr/bin/env python
"""Makes one fp32 state dict of the ZeRO checkpoints in this folder: python zero_to_fp32.py . OUTPUT_DIR

The command line and the functions are those of DeepSpeed's script of this name. The checkpoints were written by
ort_zero, which has to be installed (torch too, but neither onnxruntime nor DeepSpeed).
"""

try:
    from ort_zero.checkpoint.zero_to_fp32 import (  # noqa: F401
        convert_zero_checkpoint_to_fp32_state_dict,
        convert_zero_checkpoint_to_state_dict,
        get_fp32_state_dict_from_zero_checkpoint,
        load_state_dict_from_zero_checkpoint,
        main,
    )
except ImportError as error:
    raise ImportError(f"this checkpoint was written by ort_zero: pip install ort-zero ({error})") from error

if __name__ == "__main__":
    main()
