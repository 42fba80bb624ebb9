"""The layout of a backbone's weights over the devices of a mesh."""

import keras

# Within `self_attention`, `cross_attention` and their sublayers.
ATTENTION = ".*attention"


def make_layout_map(
    device_mesh, model_axis, data_axis, num_key_value_heads=None, sequence_axis=None
):
    """The `LayoutMap` of `EfficientTransformerBackbone.get_layout_map`.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        model_axis, data_axis: Names of its axes.
        num_key_value_heads, sequence_axis: As for `get_layout_map`.

    Raises:
        TypeError: If `device_mesh` is not a `DeviceMesh`.
        ValueError: If it lacks an axis.
    """
    _check_mesh(device_mesh, model_axis, data_axis, sequence_axis)
    size = device_mesh.shape[device_mesh.axis_names.index(model_axis)]
    splits = num_key_value_heads is None or num_key_value_heads % size == 0
    shared_axis = model_axis if splits else None
    layouts = {
        # Tokens, and the hidden width.
        ".*token_embedding/embeddings": (model_axis, data_axis),
        ".*token_embedding/reverse_embeddings": (data_axis, model_axis),
        # Heads, which are independent between the projections.
        f"{ATTENTION}/(query|gate)/kernel": (data_axis, model_axis, None),
        f"{ATTENTION}/(key|value)/kernel": (data_axis, shared_axis, None),
        f"{ATTENTION}/(decay|beta)/kernel": (None, shared_axis),
        f"{ATTENTION}/attention_output/kernel": (model_axis, None, data_axis),
        f"{ATTENTION}/output_gate/kernel": (data_axis, model_axis),
        f"{ATTENTION}/(query|key)_feature_kernel": (model_axis, None, None),
        f"{ATTENTION}/rotations": (None, model_axis, None, None),
        f"{ATTENTION}/position(_kernel)?": (None, model_axis, None),
        f"{ATTENTION}/codebook/(sum|last_codes|codes)": (model_axis, None, None),
        f"{ATTENTION}/codebook/(count|usage|idle_calls|error)": (model_axis, None),
        # The inner width of the feed-forward networks and of gated residuals.
        ".*(feed_forward|separable_convolution)/(hidden|gate)/kernel": (
            data_axis,
            model_axis,
        ),
        ".*(feed_forward|separable_convolution)/output/kernel": (model_axis, data_axis),
        ".*_residual/gate/(reset|gate|candidate)_(update|stream)": (
            data_axis,
            model_axis,
        ),
        # Inputs of sublayers. Without this, XLA may gather the rows of the batch where
        # weights are split over the data axis.
        ".*(_residual/|final_)norm/output": (data_axis, sequence_axis, None),
    }
    layout_map = keras.distribution.LayoutMap(device_mesh)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


def _check_mesh(device_mesh, model_axis, data_axis, sequence_axis):
    if not isinstance(device_mesh, keras.distribution.DeviceMesh):
        raise TypeError(
            "`device_mesh` must be a `keras.distribution.DeviceMesh`. Received: "
            f"device_mesh={device_mesh!r}"
        )
    names = {
        "model_parallel_dim_name": model_axis,
        "data_parallel_dim_name": data_axis,
    }
    if sequence_axis is not None:
        names["sequence_parallel_dim_name"] = sequence_axis
    for argument, name in names.items():
        if name not in device_mesh.axis_names:
            raise ValueError(
                f"`{argument}` must be an axis of `device_mesh`, one of "
                f"{list(device_mesh.axis_names)}. Received: {argument}={name!r}"
            )
