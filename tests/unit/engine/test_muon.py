"""DeepSpeed's Muon optimizer as ranks import it."""

from deepspeed.runtime import compiler

from trials.engine.configuration import import_muon


def test_its_functions_are_not_compiled_and_others_still_are() -> None:
    compile_function = compiler.compile
    import_muon()
    from deepspeed.runtime.zero.muon import original_muon  # noqa: PLC0415  # whoever imports it first compiles it

    assert original_muon.muon_update.__code__.co_filename == original_muon.__file__
    assert compiler.compile is compile_function
