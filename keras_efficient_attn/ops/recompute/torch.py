"""`recompute_scan` for PyTorch: a loop over checkpointed steps."""

import torch
from torch.utils.checkpoint import checkpoint


def recompute_scan(step, carry, xs, consts):
    needs_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (*carry, *xs, *consts)
    )
    ys = []
    # unbind, not indexing: the gradient of x[i] is a zero tensor as large as x.
    for x in zip(*(torch.unbind(tensor) for tensor in xs), strict=True):
        if needs_gradient:
            carry, y = checkpoint(
                step,
                carry,
                x,
                consts,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            carry, y = step(carry, x, consts)
        ys.append(y)
    return carry, tuple(torch.stack(tensors) for tensors in zip(*ys, strict=True))
