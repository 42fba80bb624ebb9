"""Trains a small language model on several devices, with JAX.

    python examples/train_distributed.py --strategy sequence --devices 4

Without accelerators the devices are virtual CPU devices. `--strategy` splits

- `data`: the rows of a batch; the model is replicated.
- `model`: heads, inner widths and tokens, by the backbone's `get_layout_map`.
- `sequence`: the positions, by `SequenceParallel`.
- `none`: nothing. One device; the other strategies have equal losses up to rounding.

The text is random bytes; its second half repeats the first.
"""

import os
import sys

import numpy as np

from command_line import Parser, UsageError, check_heads, command, positive

STRATEGIES = ("data", "model", "sequence", "none")
NUM_BYTES = 256


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="data", help="what is split")
    add("--devices", type=positive, default=4, help="virtual ones, on a CPU")
    add("--length", type=positive, default=256, help="bytes of a sequence")
    parser.add_attention("gated-delta")
    parser.add_model_size(dim=64, heads=4, layers=2)
    parser.add_training(steps=20, batch=8, learning_rate=1e-3)
    parser.add_seed_and_verbose()
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    check_devices(arguments)
    # Read when JAX starts; accelerators do not count them.
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(arguments.devices))
    arguments.backend = arguments.backend or "jax"
    if arguments.backend != "jax":
        raise UsageError(
            "--backend must be jax for this script; received --backend "
            f"{arguments.backend}"
        )
    return arguments


def check_devices(arguments):
    """Raises `UsageError` if the devices do not divide what is split."""
    split = {
        "data": {f"--batch {arguments.batch}": arguments.batch},
        # --dim, and inner widths, are multiples of --heads.
        "model": {
            f"--heads {arguments.heads}": arguments.heads,
            f"the {NUM_BYTES} values of a byte": NUM_BYTES,
        },
        "sequence": {f"--length {arguments.length}": arguments.length},
        "none": {},
    }
    for name, size in split[arguments.strategy].items():
        if size % arguments.devices:
            raise UsageError(
                f"--devices {arguments.devices} must divide {name}, which --strategy "
                f"{arguments.strategy} splits"
            )


def make_distribution(arguments):
    """The `keras.distribution`, and the context in which to train."""
    import contextlib

    import keras

    from keras_efficient_attn.distribution import SequenceParallel
    from keras_efficient_attn.layers import get_attention
    from keras_efficient_attn.models import EfficientTransformerBackbone

    strategy, devices = arguments.strategy, arguments.devices
    found = keras.distribution.list_devices()
    if len(found) < devices:
        raise UsageError(f"--devices {devices}: JAX has only {len(found)}")
    found = found[:devices]
    if strategy == "data":
        return keras.distribution.DataParallel(devices=found), contextlib.nullcontext()
    axis = "sequence" if strategy == "sequence" else "model"
    mesh = keras.distribution.DeviceMesh((1, devices), ("batch", axis), found)
    if strategy == "model":
        layer = get_attention(
            arguments.attention,
            num_heads=arguments.heads,
            key_dim=arguments.dim // arguments.heads,
        )
        layout_map = EfficientTransformerBackbone.get_layout_map(
            mesh, num_key_value_heads=layer.num_key_value_heads
        )
        context = contextlib.nullcontext()
    else:
        # Weights are replicated.
        layout_map = keras.distribution.LayoutMap(mesh)
        context = SequenceParallel(mesh).scope()
    distribution = keras.distribution.ModelParallel(
        layout_map=layout_map, batch_dim_name="batch"
    )
    return distribution, context


def make_batches(arguments):
    """Inputs and targets of all steps."""
    rng = np.random.default_rng(arguments.seed)
    rows, half = arguments.steps * arguments.batch, (arguments.length + 2) // 2
    text = rng.integers(0, NUM_BYTES, (rows, half))
    text = np.concatenate([text, text], axis=1)[:, : arguments.length + 1]
    inputs = {"token_ids": text[:, :-1], "padding_mask": np.ones_like(text[:, :-1])}
    return inputs, text[:, 1:]


def train(arguments):
    """The loss of every step."""
    import keras

    from keras_efficient_attn.models import EfficientTransformerBackbone

    keras.utils.set_random_seed(arguments.seed)
    backbone = EfficientTransformerBackbone(
        NUM_BYTES,
        arguments.layers,
        arguments.heads,
        arguments.dim,
        4 * arguments.dim,
        attention=arguments.attention,
    )
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = keras.Model(backbone.input, logits)
    model.compile(
        keras.optimizers.Adam(arguments.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    inputs, targets = make_batches(arguments)
    losses = []
    for step in range(arguments.steps):
        rows = slice(step * arguments.batch, (step + 1) * arguments.batch)
        batch = {name: x[rows] for name, x in inputs.items()}
        losses.append(float(model.train_on_batch(batch, targets[rows])))
        if arguments.verbose:
            print(f"step {step + 1}: loss {losses[-1]:.5f}", flush=True)
    return losses


@command(parse_arguments)
def main(arguments):
    if arguments.strategy == "none":
        train(arguments)
        return
    distribution, context = make_distribution(arguments)
    with distribution.scope(), context:
        train(arguments)


if __name__ == "__main__":
    sys.exit(main())
