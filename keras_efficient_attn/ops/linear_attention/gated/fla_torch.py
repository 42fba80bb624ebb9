"""Linear attention with a decay and a correction, by flash-linear-attention.

The package has a function for each kind of rates, whose formulae are those of
`chunked`. Missing keys, and their rates, are zero before.
"""

import importlib

import torch
from keras import ops

from keras_efficient_attn.ops.common.derivatives_torch import first_derivatives_only
from keras_efficient_attn.ops.linear_attention.gated.chunked import map_features

# The module of the package, by whether decays differ by feature (`None`: there are
# none) and whether there is a correction. Its function has the prefix `chunk_`.
MODULES = {
    (False, False): "simple_gla",
    (True, False): "gla",
    (None, True): "delta_rule",
    (False, True): "gated_delta_rule",
    (True, True): "kda",
}


def fla_gated_attention(tensors, rates, state, map_weights, config, position, dtype):
    """Computes `chunked_gated_attention` for calls that `choose_gated_kernel` accepts.

    Args:
        tensors, rates, map_weights, config, position: As there.
        state: As there, or `None`, also for the result.
        dtype: In which products are computed.
    """
    query, key, value = tensors
    log_decay, beta = rates
    by_feature = None if log_decay is None else log_decay.shape[-1] != 1
    with torch.autocast(value.device.type, enabled=False):
        # The maps need chunks: (batch, heads, 1, length, dim).
        query, key = (x.transpose(1, 2)[:, :, None] for x in (query, key))
        query, key = map_features(config, query, key, map_weights)
        query, key = (x[:, :, 0].transpose(1, 2) for x in (query, key))
        arguments = {
            name: ops.cast(x, dtype)
            for name, x in (("q", query), ("k", key), ("v", value))
        }
        if log_decay is not None:
            arguments["g"] = log_decay if by_feature else log_decay[..., 0]
        if beta is not None:
            arguments["beta"] = beta[..., 0]
        if position is not None:
            # All rows become one, with the places where documents begin, and the end.
            arguments = {name: x.flatten(0, 1)[None] for name, x in arguments.items()}
            begins = position == 0
            begins[:, 0] = True
            ends = begins.new_tensor([begins.numel()], dtype=torch.long)
            starts = begins.flatten().nonzero()[:, 0]
            arguments["cu_seqlens"] = torch.cat([starts, ends])
        name = MODULES[by_feature, beta is not None]
        module = importlib.import_module(f"fla.ops.{name}")
        output, state = getattr(module, f"chunk_{name}")(
            **arguments,
            scale=1.0,
            initial_state=state,
            output_final_state=state is not None,
        )
    first_derivatives_only(output, state)
    return output.reshape(value.shape).to(value.dtype), state
