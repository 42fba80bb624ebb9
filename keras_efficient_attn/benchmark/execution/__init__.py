from keras_efficient_attn.benchmark.execution.program import (
    backend_module,
    compile_function,
    is_float,
    make_program,
    wait,
)

__all__ = ["backend_module", "compile_function", "is_float", "make_program", "wait"]
