"""DeepSpeed's Muon optimizer, which plans never use, but which every engine with ZeRO imports."""

import importlib

from deepspeed.runtime import compiler


def import_uncompiled() -> None:
    """Import Muon with functions that are not compiled.

    DeepSpeed compiles them at the import, which takes each new rank about 4 s of CPU time.
    """
    compile_function = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_function
