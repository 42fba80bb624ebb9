"""A `TransformerStack` by itself."""

import keras
import numpy as np
import pytest

from keras_efficient_attn import (
    AdaptiveSpan,
    LinearAttention,
    RelativePositionXL,
    SoftmaxAttention,
)
from keras_efficient_attn.models import (
    CausalConvolution,
    FeedForward,
    SeparableConvolution,
    SinusoidalPositions,
    TransformerBlock,
    TransformerStack,
    UniversalTransformer,
)
from keras_efficient_attn.models.blocks.input_embedding import InputEmbedding
from tests.autodiff import to_numpy
from tests.ops.pieces import read_in_pieces
from tests.symbolic import check_symbolic_call


def block(residual="pre_norm", **options):
    attention = LinearAttention(2, 4)
    return TransformerBlock(attention, FeedForward(8), residual=residual, **options)


def rows(length=5):
    return np.random.default_rng(0).normal(size=(2, length, 8)).astype("float32")


def reversible_block():
    return TransformerBlock(
        LinearAttention(2, 4),
        FeedForward(8),
        cross_attention=SoftmaxAttention(2, 4),
        residual="reversible",
    )


@pytest.mark.parametrize("residual", ["pre_norm", "post_norm", "reversible"])
def test_masks_of_an_embedding_reach_all_blocks(residual):
    tokens = np.array([[1, 2, 0, 3, 0], [0, 0, 4, 1, 2]])
    x = keras.layers.Embedding(5, 8, mask_zero=True)(tokens)
    stack = TransformerStack([block(residual), block(residual)])
    expected = stack(to_numpy(x), padding_mask=tokens > 0)
    found = stack(x)
    np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=1e-5)
    state = stack.get_initial_state(2)
    (streamed, _) = stack(x, state=state)
    kept = tokens > 0
    np.testing.assert_allclose(
        to_numpy(streamed)[kept], to_numpy(expected)[kept], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("residual", ["pre_norm", "post_norm"])
def test_inputs_of_another_precision(residual):
    wide = block(residual)
    expected = to_numpy(wide(rows()))
    np.testing.assert_allclose(to_numpy(wide(rows().astype("float64"))), expected)
    half = block(residual, dtype="mixed_bfloat16")
    dtype = keras.backend.standardize_dtype(half(rows()).dtype)
    assert dtype == half.compute_output_spec(keras.KerasTensor((2, 5, 8))).dtype


def test_layers_that_are_built_keep_their_weights():
    attention, x = LinearAttention(2, 4), rows()
    attention(x, x)
    first = TransformerBlock(attention, FeedForward(8))
    expected = to_numpy(first(x))
    stack = TransformerStack([first], final_norm=False)
    np.testing.assert_allclose(to_numpy(stack(x)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.any_backend
def test_layers_in_two_blocks_are_refused():
    shared, again = FeedForward(8), block()
    twice = [TransformerBlock(LinearAttention(2, 4), shared) for _ in range(2)]
    for blocks in (twice, [again, again]):
        with pytest.raises(ValueError, match="layers of its own.*Received: blocks="):
            TransformerStack(blocks)


@pytest.mark.any_backend
def test_a_memory_goes_with_cross_attention():
    reader = TransformerBlock(
        LinearAttention(2, 4), FeedForward(8), cross_attention=SoftmaxAttention(2, 4)
    )
    reader.build((2, 5, 8), (2, 3, 8))
    with pytest.raises(ValueError, match="`memory` must be given"):
        reader(rows())
    with pytest.raises(ValueError, match="cross_attention=None, memory given: True"):
        block()(rows(), memory=rows())
    with pytest.raises(ValueError, match="`memory` needs blocks"):
        TransformerStack([block()])(rows(), memory=rows())
    with pytest.raises(ValueError, match="`memory` must be given"):
        TransformerStack([reversible_block()])(rows())
    # Blocks without cross-attention do not read it.
    both = TransformerStack([block(), reader])
    assert both(rows(), memory=rows(3)).shape == (2, 5, 8)


@pytest.mark.parametrize("training", [False, True])
def test_three_sublayers_update_two_streams_in_turns(training):
    stack = TransformerStack([reversible_block(), reversible_block()])
    random = np.random.default_rng(0)
    x, memory = (random.normal(size=(2, n, 8)).astype("float32") for n in (5, 3))
    expected = to_numpy(stack(x, memory=memory))
    kept, layers = stack(x, memory=memory, return_layers=True, training=training)
    np.testing.assert_allclose(to_numpy(kept), expected, rtol=1e-5, atol=1e-6)
    assert len(layers) == 2
    outputs, _ = read_in_pieces(
        lambda x, state: stack(x, memory=memory, state=state),
        stack.get_initial_state(2),
        [x],
        sizes=(3, 1, 1),
    )
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_layers_that_say_so_share_weights_with_those_of_their_class():
    stack = TransformerStack(
        [
            TransformerBlock(layer_class(2, 4, **{option: choice}), FeedForward(8))
            for layer_class, option, common in (
                (AdaptiveSpan, "relative_positions", True),
                (RelativePositionXL, "biases", "own"),
            )
            for choice in ("shared", common, "shared")
        ]
    )
    for made in (stack, TransformerStack.from_config(stack.get_config())):
        x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
        made(x)
        layers = [block.attention for block in made.blocks]
        tables = [layer._position_keys for layer in layers[:3]]
        biases = [layer.biases for layer in layers[3:]]
        for first, other, last in (tables, biases):
            assert first is last and first is not other


def test_output_dropout_acts_on_the_last_output():
    rate = 0.25
    block = TransformerBlock(LinearAttention(2, 4), FeedForward(8))
    stack = TransformerStack([block], output_dropout=rate)
    x = np.random.default_rng(0).normal(size=(50, 5, 8)).astype("float32")
    plain, trained = to_numpy(stack(x)), to_numpy(stack(x, training=True))
    kept = trained != 0
    np.testing.assert_allclose(
        trained, np.where(kept, plain / (1 - rate), 0.0), rtol=1e-5, atol=1e-6
    )
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / kept.size)
    again = TransformerStack.from_config(stack.get_config())
    assert again.output_dropout.rate == rate


@pytest.mark.any_backend
@pytest.mark.parametrize(
    ("residuals", "streams", "message"),
    [
        (["pre_norm"], "concatenated", "streams='concatenated', residual='pre_norm'"),
        (["reversible"], "sum", "`streams` must be one of .*streams='sum'"),
        (["pre_norm"], "sum", "`streams` must be one of .*streams='sum'"),
        (["reversible", "pre_norm"], "mean", r"\['reversible', 'pre_norm'\]"),
        (["pre_norm", "reversible"], "mean", r"\['pre_norm', 'reversible'\]"),
        ([], "mean", "`blocks` must be at least one block.* 0 blocks"),
    ],
    ids=str,
)
def test_residuals_that_a_stack_cannot_have_are_refused(residuals, streams, message):
    with pytest.raises(ValueError, match=message):
        TransformerStack([block(residual) for residual in residuals], streams=streams)
    with pytest.raises(ValueError, match=message):
        UniversalTransformer([block(kind) for kind in residuals], 2, streams=streams)


def normalised(x, epsilon=1e-5):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


@pytest.mark.parametrize(
    ("kinds", "normed"),
    [
        (("post_norm", "pre_norm"), True),
        (("pre_norm", "post_norm"), False),
        (("post_norm", "update_norm", "reordered"), False),
    ],
    ids=str,
)
def test_the_last_block_decides_on_the_final_norm(kinds, normed):
    stack = TransformerStack([block(kind) for kind in kinds])
    output, layers = stack(rows(), return_layers=True)
    # A second norm after a norm would change little.
    assert (stack.final_norm is not None) == normed
    expected = to_numpy(layers[-1])
    expected = normalised(expected) if normed else expected
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


def test_the_final_norm_is_of_the_last_blocks_kind():
    blocks = [block(), block(norm="rms_norm", norm_epsilon=0.5)]
    output, layers = TransformerStack(blocks)(rows(), return_layers=True)
    x = to_numpy(layers[-1])
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.5)
    np.testing.assert_allclose(to_numpy(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.any_backend
@pytest.mark.parametrize("kind", ["pre_norm", "reversible"])
def test_layers_and_a_state_are_not_returned_together(kind):
    stack = TransformerStack([block(kind)])
    stack(rows())
    state = stack.get_initial_state(2)
    for x in (rows(), keras.Input((5, 8), batch_size=2)):
        with pytest.raises(ValueError, match="`return_layers`.*state given: True"):
            stack(x, state=state, return_layers=True)


def reversible_stack():
    return TransformerStack(
        [block("reversible"), block("reversible")], streams="concatenated"
    )


def universal_stack(**options):
    return UniversalTransformer(
        [block("post_norm")], 2, positions=SinusoidalPositions(), **options
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformerStack([block(), block()], num_recurrences=2),
        reversible_stack,
        universal_stack,
        lambda: block(convolution=CausalConvolution(), positions=SinusoidalPositions()),
        CausalConvolution,
        lambda: SeparableConvolution(8),
        SinusoidalPositions,
    ],
    ids=[
        "stack",
        "reversible",
        "universal",
        "block",
        "convolution",
        "separable",
        "positions",
    ],
)
def test_symbolic_calls_with_a_state_return_one(make):
    layer = make()
    layer(rows())
    check_symbolic_call(layer, rows(), layer.get_initial_state(2))


@pytest.mark.parametrize("each_layer", [False, True])
@pytest.mark.parametrize(
    ("kind", "scale", "factor"),
    [
        (None, None, 1.0),
        (None, True, 4.0),
        ("sinusoidal", None, 4.0),
        ("sinusoidal", False, 1.0),
    ],
)
def test_embeddings_with_sinusoids_are_scaled(kind, scale, factor, each_layer):
    positions = {"kind": kind, "each_layer": each_layer and kind is not None}
    layer = InputEmbedding(11, 16, {"scale": scale}, positions)
    tokens = np.arange(5, dtype="int32")[None]
    expected = factor * to_numpy(layer.token_embedding(tokens))
    if kind is not None and not each_layer:
        expected += to_numpy(layer.positions(0 * layer.token_embedding(tokens)))
    np.testing.assert_allclose(to_numpy(layer(tokens)), expected, atol=1e-6)


def test_symbolic_embeddings_with_a_state_return_one():
    layer = InputEmbedding(11, 8, positions="sinusoidal")
    tokens = np.arange(10, dtype="int32").reshape(2, 5)
    layer(tokens)
    check_symbolic_call(layer, tokens, layer.get_initial_state(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TransformerStack([block(), block()], num_recurrences=2),
        reversible_stack,
        universal_stack,
    ],
    ids=["stack", "reversible", "universal"],
)
def test_symbolic_calls_return_layers(make):
    check_symbolic_call(make(), rows(), return_layers=True)


def test_symbolic_calls_return_ponder():
    layer = universal_stack(adaptive_computation={})
    check_symbolic_call(layer, rows(), return_ponder=True)
    for options in ({"return_layers": True}, {"return_ponder": True, "state": {}}):
        with pytest.raises(ValueError, match="adaptive_computation"):
            layer(keras.Input((5, 8)), **options)
