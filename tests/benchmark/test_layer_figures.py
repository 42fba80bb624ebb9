import pytest

from keras_efficient_attn import EfficientAttention
from keras_efficient_attn.benchmark.layer_figures import (
    decode_operations,
    layer_operations,
)
from keras_efficient_attn.layers import get_attention
from keras_efficient_attn.ops import local_pattern, sparse_pattern

pytestmark = pytest.mark.any_backend

HEADS, HEAD_DIM, LENGTH, BATCH = 2, 8, 12, 3
WIDTH = HEADS * HEAD_DIM
PROJECTIONS = 4 * 2 * WIDTH * WIDTH


def build(identifier):
    layer = get_attention(identifier, num_heads=HEADS, key_dim=HEAD_DIM)
    layer.build((BATCH, LENGTH, WIDTH), (BATCH, LENGTH, WIDTH))
    return layer


def pairs(sees):
    return sum(sees(t, s) for t in range(LENGTH) for s in range(LENGTH))


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_counts_pairs(causal):
    seen = pairs(lambda t, s: s <= t or not causal)
    # Each pair: a product with the key and one with the value.
    expected = BATCH * (LENGTH * PROJECTIONS + seen * 2 * 2 * WIDTH)
    assert layer_operations(build("softmax"), BATCH, LENGTH, causal) == expected


def test_linear_attention_counts_features():
    # elu: HEAD_DIM features; each position adds to and reads the state.
    expected = BATCH * LENGTH * (PROJECTIONS + HEADS * 2 * 2 * HEAD_DIM * HEAD_DIM)
    layer = build("performer:feature_map=elu")
    assert layer_operations(layer, BATCH, LENGTH, False) == expected
    assert layer_operations(layer, BATCH, LENGTH, True) == expected


@pytest.mark.parametrize("name, rows", [("favor+", 32), ("hyperbolic", 16)])
def test_random_features_count_their_projection(name, rows):
    layer = build(f"performer:feature_map={name},num_features=32")
    features = 2 * 2 * HEAD_DIM * rows  # Query and key features.
    sums = 2 * 2 * 32 * HEAD_DIM
    expected = BATCH * LENGTH * (PROJECTIONS + HEADS * (features + sums))
    assert layer_operations(layer, BATCH, LENGTH, True) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_fourier_attention_counts_pairs_or_features(causal):
    seen = pairs(lambda t, s: s <= t or not causal)
    # A pair: four operations per key dimension, and a product with the value.
    expected = BATCH * (LENGTH * PROJECTIONS + seen * (4 + 2) * WIDTH)
    assert layer_operations(build("fourier"), BATCH, LENGTH, causal) == expected
    linear = build("fourier:linear=True,num_frequencies=6")
    features = 2 * 2 * HEAD_DIM * 6 + 2 * 2 * (6 * 13) * HEAD_DIM
    expected = BATCH * LENGTH * (PROJECTIONS + HEADS * features)
    assert layer_operations(linear, BATCH, LENGTH, causal) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_counts_its_pairs(causal):
    options = "performer:feature_map=favor+,num_features=32"
    without, with_window = build(options), build(f"{options},window=4")
    seen = pairs(lambda t, s: abs(t - s) < 4 and (s <= t or not causal))
    more = layer_operations(with_window, 1, LENGTH, causal) - layer_operations(
        without, 1, LENGTH, causal
    )
    assert more == seen * 2 * 2 * WIDTH


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "sparse:stride=5",
        "sparse:stride=5,factors=1",
        "sparse:stride=5,factors=split",
        "sparse:pattern=fixed,stride=5,summary=2",
        "sparse:pattern=fixed,stride=5,summary=2,factors=1",
        "sparse:pattern=fixed,stride=5,summary=2,factors=split",
        "local:window=4",
        "local:query_block=5,memory=3",
        "local:query_block=(2,3),memory=(1,2),grid=(3,4)",
        "local:query_block=(2,3),memory=(1,2),grid=(3,4),grid_order=block",
    ],
)
def test_patterns_count_their_pairs(name, causal):
    layer = build(name)
    if name.startswith("sparse"):
        pattern = {**layer.pattern_arguments, "num_heads": HEADS}
        seen = sparse_pattern(LENGTH, causal=causal, **pattern).sum()
    else:
        arguments = layer.pattern_arguments
        seen = HEADS * local_pattern(LENGTH, causal=causal, **arguments).sum()
    expected = LENGTH * PROJECTIONS + seen * 2 * 2 * HEAD_DIM
    assert layer_operations(layer, 1, LENGTH, causal) == expected


def test_a_part_of_an_image_has_no_count():
    layer = build("local:query_block=(2,3),grid=(4,4)")
    assert layer_operations(layer, 1, LENGTH, True) is None
    assert decode_operations(layer, 1, 15) is None


@pytest.mark.parametrize("causal", [False, True])
def test_codes_count_their_products(causal):
    seen = pairs(lambda t, s: abs(t - s) < 4 and (s <= t or not causal))
    # Products of a key with codes, a query with codes, and weights with values.
    codes = 3 * 2 * 16 * HEAD_DIM * HEADS
    values = 2 * 16 * HEAD_DIM * HEADS
    # A soft code is also written; two directions have 1 + 2 + 3 monomials.
    kinds = {"": 0, ",codes=soft": values, ",order=2,rank=2": 5 * values}
    for options, more in kinds.items():
        layer = build(f"vq:num_codes=16,window=4{options}")
        expected = LENGTH * (PROJECTIONS + codes + more) + seen * 2 * 2 * WIDTH
        assert layer_operations(layer, 1, LENGTH, causal) == expected
    layer = build("vq:num_codes=16,window=4,relative_positions=True")
    expected = LENGTH * (PROJECTIONS + codes) + seen * 3 * 2 * WIDTH
    assert layer_operations(layer, 1, LENGTH, causal) == expected


@pytest.mark.parametrize("causal", [False, True])
def test_hashed_attention_counts_its_chunks_in_each_round(causal):
    layer = build("reformer:bucket_size=2,num_hashes=3,num_buckets=(4,6)")
    # Two keys of its own chunk, one of them earlier or equal, and two before it.
    seen = LENGTH * (3 if causal else 4)
    hashing = HEADS * 2 * HEAD_DIM * 5
    attention = 2 * 2 * WIDTH * seen
    expected = LENGTH * (PROJECTIONS * 3 // 4 + 3 * hashing) + 3 * attention
    assert layer_operations(layer, BATCH, LENGTH, causal) == BATCH * expected
    short = build("reformer:dense_length=12")
    pairs_seen = pairs(lambda t, s: s <= t or not causal)
    expected = LENGTH * PROJECTIONS * 3 // 4 + 2 * 2 * WIDTH * pairs_seen
    assert layer_operations(short, BATCH, LENGTH, causal) == BATCH * expected


def test_decoding_counts_one_position():
    layer = build("softmax")
    softmax = decode_operations(layer, BATCH, LENGTH)
    assert softmax == BATCH * (PROJECTIONS + (LENGTH + 1) * 2 * 2 * WIDTH)
    linear = decode_operations(build("performer:feature_map=elu"), BATCH, LENGTH)
    assert linear == BATCH * (PROJECTIONS + 4 * WIDTH * HEAD_DIM)


def test_a_layer_without_a_count_has_none():
    layer = EfficientAttention(HEADS, HEAD_DIM)
    layer.build((BATCH, LENGTH, WIDTH), (BATCH, LENGTH, WIDTH))
    assert layer_operations(layer, BATCH, LENGTH, False) is None
    assert decode_operations(layer, BATCH, LENGTH) is None


def test_a_sliding_window_counts_its_pairs():
    seen = pairs(lambda t, s: t - 4 < s <= t)
    expected = BATCH * (LENGTH * PROJECTIONS + seen * 2 * 2 * WIDTH)
    layer = build("softmax:sliding_window=4")
    assert layer_operations(layer, BATCH, LENGTH, True) == expected


@pytest.mark.parametrize(
    "name", ["softmax", "performer", "vq", "local:window=4", "sparse", "xl"]
)
def test_gated_layers_have_one_more_projection(name):
    layer = build(name)
    gated = build(f"{name}{',' if ':' in name else ':'}use_gate=True")
    more = BATCH * PROJECTIONS // 4
    count = layer_operations(layer, BATCH, LENGTH, True)
    assert layer_operations(gated, BATCH, LENGTH, True) == count + LENGTH * more
    count = decode_operations(layer, BATCH, LENGTH)
    assert decode_operations(gated, BATCH, LENGTH) == count + more


# Sizes of the projections besides query, key, value and output, of each layer's decays,
# β and output gate.
FULL, PER_HEAD = WIDTH * WIDTH, WIDTH * HEADS


def low_rank(rank, outputs=WIDTH):
    return WIDTH * rank + rank * outputs


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("retention:output_gate=None", []),
        ("retention", [FULL]),
        ("retention:output_gate={'activation':'silu','rank':3}", [low_rank(3)]),
        ("kimi-delta:convolution=None,output_gate=None", [PER_HEAD, low_rank(8)]),
        ("retention:use_gate=True", [FULL, FULL]),
        ("gated-linear:output_gate=None,decay=scalar", [low_rank(16, HEADS)]),
        ("gated-linear:decay=scalar,decay_rank=None", [PER_HEAD, FULL]),
        ("gated-linear", [low_rank(16), FULL]),
        ("gated-linear:decay_rank=4", [low_rank(4), FULL]),
        ("delta:convolution=None", [PER_HEAD]),
        ("delta:convolution=None,use_beta=False", []),
        ("gated-delta:convolution=None", [PER_HEAD, PER_HEAD, FULL]),
        ("gated-delta:convolution=None,output_gate=None", [PER_HEAD, PER_HEAD]),
        # Decays and the output gate have the rank of a head.
        ("kimi-delta:convolution=None", [PER_HEAD, low_rank(8), low_rank(8)]),
    ],
)
def test_layers_with_decays_count_all_projections(name, sizes):
    layer = build(name)
    per_position = PROJECTIONS + 2 * sum(sizes)
    # The state is summed and read once per position and head; a delta rule also reads
    # what it corrects.
    products = 3 if "delta" in name else 2
    expected = BATCH * (per_position + HEADS * products * 2 * HEAD_DIM * HEAD_DIM)
    assert layer_operations(layer, BATCH, LENGTH, True) == LENGTH * expected
    assert decode_operations(layer, BATCH, LENGTH) == expected


@pytest.mark.parametrize("name", ["delta", "gated-delta", "kimi-delta"])
def test_short_convolutions_count_their_positions(name):
    without, convolved = build(f"{name}:convolution=None"), build(name)
    # Four positions of queries, keys and values.
    more = BATCH * 3 * 2 * 4 * WIDTH
    count = layer_operations(without, BATCH, LENGTH, True)
    assert layer_operations(convolved, BATCH, LENGTH, True) == count + LENGTH * more
    count = decode_operations(without, BATCH, LENGTH)
    assert decode_operations(convolved, BATCH, LENGTH) == count + more


def test_a_calibrated_layer_counts_its_coordinates():
    plain, calibrated = (
        build(f"performer:feature_map=taylor,calibrated={calibrated}")
        for calibrated in (False, True)
    )
    # One matrix for queries and one for keys per head.
    more = BATCH * 2 * 2 * HEADS * HEAD_DIM**2
    count = layer_operations(plain, BATCH, LENGTH, True)
    assert layer_operations(calibrated, BATCH, LENGTH, True) == count + LENGTH * more
