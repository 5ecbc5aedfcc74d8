"""Layers that `torch.compile` compiles, each by itself: all layers of a kind have the same compiled code."""

import torch
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch.fx.experimental import _config as symbolic_shapes
from transformers import AttentionInterface

from trials.model.attention.packed import PACKED_ATTENTION, packed_attention
from trials.model.refusals.compiling import check_compiler
from trials.model.stage import StageModule

# A choice: these causes multiply to some dozens.
_MOST_GRAPHS = 64
"""Most graphs of one function. Recomputation, evaluation, types of layers and sequence degrees multiply."""


def compile_layers(stage: StageModule) -> None:
    """Compile the vision and language layers of a stage in place, when they run first. Parameters keep their names.

    Raise NoCompiler where a tool for it is missing.
    """
    check_compiler(next(stage.parameters()).device.type)
    # The lengths of samples are numbers of the host, which each graph would take for constants.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    # By default torch specialises graphs to sizes of 1, such as the one vision unit of a pack of text alone.
    symbolic_shapes.backed_size_oblivious = True
    # Beyond its limit of 8 graphs, torch runs a function uncompiled.
    dynamo.recompile_limit = _MOST_GRAPHS
    # Else a rank holds threads that compile, and for GPUs processes.
    inductor.compile_threads = 1
    for path in stage.cut.layers(stage.chain):
        stage.model.get_submodule(path).compile(dynamic=True)


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled."""
    return int(counters["stats"]["unique_graphs"])
