"""What the package calls of PyTorch that is not public; it works with PyTorch 2.13.

A name that another PyTorch does not have is `None` here:

| name | without it |
|---|---|
| `fused_attention`, `fused_attention_backward` | softmax in blocks without the kernel |
| `hooks_of_saved_tensors` | `torch.compile` runs the question outside its graph |
| `number_of_backward_pass` | `in_backward_pass` raises an error |
| `dynamo_config` | PyTorch's own limit of programs of FlexAttention |
| `function_transform` | transforms of `torch.func` fail with PyTorch's errors |
"""

import contextlib

import torch

from keras_efficient_attn.ops.common.backend import (
    attribute_or_none,
    private_name_error,
)

WORKS_WITH = "2.13"

fused_attention = attribute_or_none(
    torch, "ops.aten._scaled_dot_product_flash_attention_for_cpu"
)
fused_attention_backward = attribute_or_none(
    torch, "ops.aten._scaled_dot_product_flash_attention_for_cpu_backward"
)
hooks_of_saved_tensors = attribute_or_none(
    torch, "_C._autograd._top_saved_tensors_default_hooks"
)
number_of_backward_pass = attribute_or_none(torch, "_C._current_graph_task_id")
dynamo_config = attribute_or_none(torch, "_dynamo.config")
function_transform = attribute_or_none(torch, "_C._functorch.peek_interpreter_stack")


def allow_programs(number):
    """Context in which PyTorch may compile this many programs of one function."""
    if not hasattr(dynamo_config, "recompile_limit"):
        return contextlib.nullcontext()
    return dynamo_config.patch(recompile_limit=number)


def in_backward_pass():
    """Whether PyTorch is running a backward pass.

    Raises:
        RuntimeError: If PyTorch does not say so.
    """
    if number_of_backward_pass is None:
        raise private_name_error(
            "PyTorch", torch.__version__, "torch._C._current_graph_task_id", WORKS_WITH
        )
    # `torch.compile` treats the answer as a constant, which is correct if nothing
    # reruns the program.
    if torch.compiler.is_compiling() and not _may_run_again():
        return False
    return number_of_backward_pass() != -1


@torch.compiler.assume_constant_result
def _may_run_again():
    """Whether gradient checkpointing calls the function being compiled."""
    if hooks_of_saved_tensors is None or hooks_of_saved_tensors(True) is not None:
        return True
    return number_of_backward_pass() != -1
