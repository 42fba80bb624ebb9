"""Times evaluation with a memory against a token-by-token sliding window.

    python research/measure_xl_evaluation.py --backend jax

A Transformer-XL gives each token of a segment a context of at least its memory, in one
pass over the segment. Without a memory, the same context takes one pass over the whole
context per token. The model, its weights and the length of the context are the same.
"""

import sys

import folders  # noqa: F401
from command_line import Parser, check_heads, command, positive
from tables import show

VOCABULARY = 256


def parse_arguments(argv):
    parser = Parser(__doc__)
    add = parser.add_argument
    add(
        "--contexts",
        type=positive,
        nargs="+",
        default=[128, 256, 512, 1024],
        help="positions before each token",
    )
    add("--segment", type=positive, default=64, help="tokens read at once")
    parser.add_model_size(dim=128, heads=4, layers=2)
    add("--repeats", type=positive, default=5)
    parser.add_save()
    arguments = parser.parse_args(argv)
    check_heads(arguments.dim, arguments.heads)
    return arguments


def measure(arguments, context):
    """`Timing` of a segment with a memory, and of one token without."""
    import numpy as np
    from keras import ops

    from keras_efficient_attn import benchmark
    from keras_efficient_attn.benchmark.execution import make_program
    from keras_efficient_attn.models import (
        EfficientCausalLM,
        EfficientTransformerBackbone,
    )

    backbone = EfficientTransformerBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=arguments.layers,
        num_heads=arguments.heads,
        hidden_dim=arguments.dim,
        intermediate_dim=4 * arguments.dim,
        attention="xl",
    )
    model = EfficientCausalLM(backbone)

    def with_memory(tokens, state):
        hidden, state = model.backbone.stream(tokens, state)
        logits = model.backbone.token_embedding(hidden, reverse=True)
        return logits, state

    def sliding(tokens):
        hidden = backbone({"token_ids": tokens, "padding_mask": ops.ones_like(tokens)})
        return backbone.token_embedding(hidden[:, -1:], reverse=True)

    program = make_program(with_memory, model)
    lengths = {"memory": arguments.segment, "sliding": context + 1}
    # A full memory: the time does not depend on its contents.
    empty = backbone.get_initial_state(1, max_length=None, memory_length=context)

    def tokens_of(name, turn):
        random = np.random.default_rng((context, turn))
        tokens = random.integers(0, VOCABULARY, (1, lengths[name]))
        return ops.convert_to_tensor(tokens, "int32")

    state, read = empty, 0
    while read < context:
        _, state = program(tokens_of("memory", read), state)
        read += arguments.segment

    def make_inputs(name, turn):
        tokens = tokens_of(name, turn)
        return (tokens, state) if name == "memory" else (tokens,)

    return benchmark.time_functions(
        {"memory": program, "sliding": make_program(sliding, model)},
        make_inputs=make_inputs,
        repeats=arguments.repeats,
    )


@command(parse_arguments)
def main(arguments):
    """Prints the times per token at each context."""
    rows = []
    for context in arguments.contexts:
        timings = measure(arguments, context)
        memory = 1e3 * timings["memory"].median / arguments.segment
        sliding = 1e3 * timings["sliding"].median
        cells = f"{memory:.3g}", f"{sliding:.3g}", f"{sliding / memory:.0f}"
        rows.append([f"{context:,}", *cells])
        print(*rows[-1], flush=True)
    header = ["ms per token with memory", "ms per token, recomputed", "times as long"]
    show(["context", *header], rows, arguments)


if __name__ == "__main__":
    sys.exit(main())
