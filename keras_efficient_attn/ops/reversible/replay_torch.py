"""Whether PyTorch is running a backward pass."""

import torch


def in_backward_pass():
    # `torch.compile` treats the answer as a constant, which is correct if nothing
    # reruns the program.
    if torch.compiler.is_compiling() and not _may_run_again():
        return False
    return _number_of_backward_pass() != -1


@torch.compiler.assume_constant_result
def _may_run_again():
    """Whether gradient checkpointing calls the function being compiled."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or _number_of_backward_pass() != -1


def _number_of_backward_pass():
    """The number of the backward pass that this thread is in, or -1."""
    return torch._C._current_graph_task_id()
