"""Times generation against KerasHub's key/value cache, after contexts of many lengths.

    python research/measure_generation.py --backend jax

Language models of the same size are timed in turns: this package's with each of
`--attention`, and KerasHub's GPT-2, whose softmax attention reads a cache. A timed call
generates 32 tokens, in a loop that is compiled where the backend compiles. Layers whose
state does not grow read the whole context first. Reading it by softmax takes time
quadratic in its length, and no time depends on a cache's contents, so caches are filled
at random.
"""

import sys

import folders  # noqa: F401
from command_line import Parser, command, positive

VOCABULARY = 256
STEPS = 32


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    parser.add_attention(["performer:feature_map=elu", "softmax"])
    add("--lengths", type=positive, nargs="+", default=[1024, 8192, 65536])
    add("--batches", type=positive, nargs="+", default=[1, 8])
    add("--layers", type=positive, default=2)
    add("--heads", type=positive, default=4)
    add("--head-dim", type=positive, default=32)
    add("--repeats", type=positive, default=5)
    return parser.parse_args(argv)


def ours(attention, batch, length, arguments):
    """`(model, step, state)` of an `EfficientCausalLM` after `length` tokens."""
    import keras
    import numpy as np

    from keras_efficient_attn.benchmark.execution import make_program
    from keras_efficient_attn.benchmark.workloads import read_segments
    from keras_efficient_attn.models import (
        EfficientCausalLM,
        EfficientTransformerBackbone,
    )

    width = arguments.heads * arguments.head_dim
    backbone = EfficientTransformerBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        attention=attention,
    )
    model = EfficientCausalLM(backbone)

    def step(tokens, state):
        hidden, state = model.backbone.stream(tokens, state)
        logits = model.backbone.token_embedding(hidden, reverse=True)
        return logits, state

    state = backbone.get_initial_state(batch, length + STEPS)
    if any(block.attention.state_grows for block in backbone.transformer_layers):
        state = keras.tree.map_structure(lambda x: fill(x, length), state)
    else:
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (batch, length))
        read = make_program(lambda x: read_segments(step, x, state), model)
        state = read(keras.ops.convert_to_tensor(tokens, "int32"))
    return model, step, state


def keras_hub(batch, length, arguments):
    """`(model, step, state)` of KerasHub's GPT-2; its state is `(cache, position)`."""
    import keras_hub
    from keras import ops

    width = arguments.heads * arguments.head_dim
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=VOCABULARY,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=width,
        intermediate_dim=4 * width,
        dropout=0.0,
        max_sequence_length=length + STEPS,
    )
    model = keras_hub.models.GPT2CausalLM(backbone)

    def step(tokens, state):
        cache, position = state
        logits, _, cache = model.call_with_cache(tokens, cache, position)
        return logits, (cache, position + 1)

    heads = (arguments.heads, arguments.head_dim)
    cache = ops.zeros((batch, arguments.layers, 2, length + STEPS, *heads))
    position = ops.convert_to_tensor(length, "int32")
    return model, step, (fill(cache, length), position)


def fill(leaf, length):
    """A part of a cache of keys, with `length` random keys."""
    import numpy as np
    from keras import ops

    if "int" in str(leaf.dtype):
        return ops.full_like(leaf, length)
    random = np.random.default_rng(0).standard_normal(leaf.shape, dtype="float32")
    return ops.cast(random, leaf.dtype)


def measure(batch, length, arguments):
    """`Timing` of `STEPS` tokens per contestant."""
    import numpy as np
    from keras import ops

    from keras_efficient_attn import benchmark
    from keras_efficient_attn.benchmark.execution import make_program
    from keras_efficient_attn.benchmark.workloads import generate_positions

    makers = {name: (ours, name) for name in arguments.attention}
    makers["KerasHub GPT-2"] = (keras_hub,)
    functions, states = {}, {}
    for name, (make, *options) in makers.items():
        model, step, states[name] = make(*options, batch, length, arguments)
        functions[name] = make_program(
            lambda tokens, state, step=step: generate_positions(step, tokens, state)[0],
            model,
        )

    def make_inputs(name, turn):
        rng = np.random.default_rng((length, turn))
        tokens = rng.integers(0, VOCABULARY, (batch, STEPS))
        return ops.convert_to_tensor(tokens, "int32"), states[name]

    return benchmark.time_functions(
        functions, make_inputs=make_inputs, repeats=arguments.repeats
    )


@command(parse_arguments)
def main(arguments):
    """Prints the times of each contestant, batch and context."""
    print("contestant | batch | context | ms a token | tokens/s | quartiles, ms")
    for batch in arguments.batches:
        for length in arguments.lengths:
            for name, timing in measure(batch, length, arguments).items():
                median, low, high = (
                    1e3 * seconds / STEPS for seconds in (timing.median, *timing.spread)
                )
                row = [name, f"{batch}", f"{length}", f"{median:.3f}"]
                row += [f"{1e3 * batch / median:.0f}", f"{low:.3f}-{high:.3f}"]
                print(" | ".join(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
