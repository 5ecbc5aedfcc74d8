"""The configuration of DeepSpeed for the engine of a plan."""

import importlib
from typing import Any

import torch
from deepspeed.runtime import compiler

from trials.engine.static_memory import BUCKET
from trials.job import TrainingSection
from trials.plan import Layout


def configuration(layout: Layout, training: TrainingSection, dtype: torch.dtype) -> dict[str, Any]:
    """Return the settings that DeepSpeed's engines have in common; `dtype` is the type of the weights."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": layout.zero,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET,
        },
        # Micro-batches are summed, and data ranks averaged, in float32: the error of a bfloat16 sum grows with the
        # number of its terms. The bfloat16 gradient is released as soon as it is added.
        "bf16": {"enabled": dtype == torch.bfloat16, "immediate_grad_update": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": training.clip_norm or 0.0,  # its default of 1 would scale gradients unasked
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 40,  # never: the progress file says more
        "timers": {"throughput": {"enabled": False}},  # it waits for the device before and after each pack
    }


def import_muon() -> None:
    """Import DeepSpeed's Muon optimizer with functions that are not compiled.

    Plans never use it, but every engine with ZeRO imports it, which compiles them: about 4 s of CPU time in each new
    rank.
    """
    compile_function = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_function
