"""The table of the contract: every layer with an entry is tested on all points."""

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

from keras_efficient_attn import (
    AdaptiveSpan,
    DeltaAttention,
    FourierAttention,
    GatedDeltaAttention,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    LocalAttention,
    OutputGate,
    OutputNorm,
    PerformerAttention,
    ReformerLSHAttention,
    RelativePositionXL,
    RetentionAttention,
    SoftmaxAttention,
    SparseAttention,
    VQAttention,
)
from keras_efficient_attn.layers import feature_maps
from tests import dense
from tests.outside import SquareAttention, square_heads

BATCH, LENGTH, DIM, HEADS, KEY_DIM = 2, 37, 12, 2, 8


@keras.saving.register_keras_serializable(package="tests")
def squared_relu(x):
    return ops.square(ops.relu(x))


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer under contract.

    Attributes:
        name: Shown in the test's name.
        layer: Class.
        options: Keyword arguments besides `num_heads` and `key_dim`. Chunks are small,
            so that a test's length has several.
        heads: The oracle, such as `dense.linear_heads`.
        causal: The values of `use_causal_mask` that the layer supports.
        cross: Whether queries and keys may differ in length.
        variant: Whether tests marked `once_a_layer` skip this case, because another
            case covers the layer and options do not matter.
        long: Options that replace `options` for a long sequence.
        long_length: Length of the long sequence; shorter if time is quadratic.
        shared_key: Whether keys share the queries' projection.
        smooth: Whether outputs change little under rounding errors.
        caches: Whether the state holds keys and values in the dtype of the computation.
        gradient_through_state: Whether gradients flow from later to earlier segments.
    """

    name: str
    layer: type
    options: dict
    heads: Callable
    causal: tuple = (False, True)
    cross: bool = True
    variant: bool = False
    long: dict = dataclasses.field(default_factory=lambda: {"chunk_size": 64})
    long_length: int = 4096
    shared_key: bool = False
    smooth: bool = True
    gradient_through_state: bool = True
    caches: bool = False

    @property
    def sums(self):
        """Whether outputs grow with the number of keys."""
        return not self.options.get("normalize", True)

    @property
    def usual(self):
        """`use_causal_mask` for tests with one setting."""
        return self.causal[-1]

    @property
    def plain(self):
        """The arguments of the plainest call: causal where the layer must be."""
        return {"use_causal_mask": False not in self.causal}

    def make(self, **options):
        arguments = {"num_heads": HEADS, "key_dim": KEY_DIM, "seed": 1}
        return self.layer(**{**arguments, **self.options, **options})

    def built(self, **options):
        """A built layer with nonzero biases and factors, so that missing ones show.

        Learned feature maps, initially the identity, get another matrix.
        """
        layer = self.make(**options)
        layer.build((BATCH, LENGTH, DIM), (BATCH, LENGTH, DIM))
        random = np.random.default_rng(2)
        for weight in layer.trainable_weights:
            if any(
                part in weight.name for part in ("bias", "feature", "norm", "factor")
            ):
                weight.assign(random.normal(size=weight.shape) * 0.2)
        return layer

    def get_initial_state(self, layer, batch=BATCH):
        if not layer.built:
            layer.build((batch, LENGTH, DIM), (batch, LENGTH, DIM))
        return layer.get_initial_state(batch, LENGTH if layer.state_grows else None)

    def oracle(self, layer, *args, **kwargs):
        return dense.layer_output(layer, self.heads, *args, **kwargs)


def performer(name, causal=(False, True), cross=True, variant=True, **options):
    options = {"chunk_size": 2, **options}
    heads = dense.linear_heads
    return Case(name, PerformerAttention, options, heads, causal, cross, variant)


def linear(name, variant=True, **options):
    options = {"chunk_size": 2, **options}
    return Case(name, LinearAttention, options, dense.linear_heads, variant=variant)


def make_gated_oracle(name, layer, variant=False, **options):
    # Chunks with several blocks of decays by feature; the last block is not full.
    options = {"chunk_size": 20, **options}
    heads, causal = dense.gated_heads, (True,)
    return Case(name, layer, options, heads, causal, variant=variant)


def sparse(name, variant=False, **options):
    return Case(
        name,
        SparseAttention,
        options,
        dense.sparse_heads,
        variant=variant,
        long={"stride": 64},
    )


def local(name, **options):
    long = {"grid": (64, 64)} if "grid" in options else {}
    return Case(name, LocalAttention, options, dense.local_heads, long=long)


def vq(name, variant=False, **options):
    options = {"num_codes": 8, "block_length": 4, **options}
    long = {"block_length": 64}
    return Case(name, VQAttention, options, dense.vq_heads, variant=variant, long=long)


def adaptive_span(name, **options):
    options = {"max_span": 12, "ramp": 4, **options}
    heads, long = dense.adaptive_span_heads, {"max_span": 64, "ramp": 32}
    variant = options.get("dynamic", False)
    return Case(name, AdaptiveSpan, options, heads, variant=variant, long=long)


def reformer(name, causal=(False, True), variant=False, **options):
    flags = dict(cross=False, shared_key=True, smooth=False)
    flags |= dict(causal=causal, variant=variant)
    long, heads = {"bucket_size": 64}, dense.reformer_heads
    return Case(name, ReformerLSHAttention, options, heads, long=long, **flags)


# Cases whose time grows with the square of the length.
SHORT = dict(long={}, long_length=512)


def softmax(name, variant=False, **options):
    flags = dict(variant=variant, caches=True, **SHORT)
    return Case(name, SoftmaxAttention, options, dense.full_softmax_heads, **flags)


def xl(name, variant=False, **options):
    flags = dict(variant=variant, gradient_through_state=False, **SHORT)
    return Case(name, RelativePositionXL, options, dense.xl_heads, **flags)


CASES = [
    performer("favor+", num_features=16, variant=False),
    performer("favor++", num_features=16, feature_map="favor++", causal=(False,)),
    performer(
        "hyperbolic-rotary-norm",
        num_features=16,
        feature_map="hyperbolic",
        rotary_wavelength=100.0,
        qk_norm=True,
        temperature=0.5,
    ),
    linear("elu", variant=False),
    linear("hedgehog", feature_map="hedgehog"),
    performer(
        "learned",
        feature_map="learned",
        window=5,
        cross=False,
    ),
    performer("callable-sum", feature_map=squared_relu, normalize=False),
    performer(
        "window",
        num_features=16,
        window=5,
        rotary_wavelength=50.0,
        cross=False,
        variant=False,
    ),
    make_gated_oracle("retention", RetentionAttention, rotary_wavelength=100.0),
    make_gated_oracle(
        "retention-hedgehog",
        RetentionAttention,
        variant=True,
        rotary_wavelength=None,
        feature_map=feature_maps.get("projected", kind="hedgehog", normalize_key=True),
    ),
    make_gated_oracle("gated-linear", GatedLinearAttention, decay_rank=3),
    make_gated_oracle(
        "gated-linear-scalar",
        GatedLinearAttention,
        variant=True,
        decay="scalar",
        decay_rank=None,
        least_log_decay=-0.03,
        num_key_value_heads=1,
        convolution=3,
        output_gate=None,
    ),
    make_gated_oracle("delta", DeltaAttention),
    make_gated_oracle("gated-delta", GatedDeltaAttention),
    make_gated_oracle(
        "gated-delta-shared",
        GatedDeltaAttention,
        variant=True,
        max_beta=2.0,
        num_key_value_heads=1,
        rotary_wavelength=50.0,
        output_norm="group",
    ),
    make_gated_oracle(
        "gated-delta-values",
        GatedDeltaAttention,
        variant=True,
        num_value_heads=2 * HEADS,
        feature_map=feature_maps.get("unit", epsilon=0.1),
        qk_activation="linear",
        output_norm=OutputNorm("rms", epsilon=0.1, scale=False),
        output_gate=OutputGate("sigmoid", bias=True),
    ),
    make_gated_oracle("kimi-delta", KimiDeltaAttention, decay_rank=3),
    make_gated_oracle(
        "kimi-delta-bound",
        KimiDeltaAttention,
        variant=True,
        num_value_heads=2 * HEADS,
        least_log_decay=-2.0,
        use_beta=False,
        feature_map="sum",
        convolution=None,
    ),
    sparse("strided", stride=5, rotary_wavelength=50.0),
    sparse("fixed", pattern="fixed", stride=6, summary=2, variant=True),
    local("grid", query_block=(3, 2), memory=(2, 1), grid=(6, 7), grid_order="block"),
    vq("vq", window=5, relative_positions=True),
    vq(
        "vq-soft",
        variant=True,
        window=None,
        codes={
            "assignment": "soft",
            "sigma": 0.7,
            "learn_sigma": True,
            "learn_weights": True,
        },
    ),
    Case(
        "fourier",
        FourierAttention,
        {"radius_per": "dimension", "chunk_size": 2},
        dense.fourier_heads,
        long_length=256,
    ),
    Case(
        "fourier-linear",
        FourierAttention,
        {"linear": True, "num_frequencies": 4, "power": 2, "chunk_size": 4},
        dense.fourier_heads,
        variant=True,
    ),
    adaptive_span("adaptive-span", initial_span=3),
    adaptive_span(
        "adaptive-span-dynamic",
        dynamic=True,
        relative_positions=True,
        include_self=False,
    ),
    xl("xl"),
    xl(
        "xl-same-length",
        variant=True,
        memory_length=5,
        same_length=True,
        clamp_length=3,
    ),
    softmax("softmax"),
    softmax("softmax-window", variant=True, sliding_window=4, rotary_wavelength=50.0),
    softmax(
        "softmax-norm",
        variant=True,
        projection_norm="rms",
        projection_norm_epsilon=0.1,
        num_key_value_heads=1,
    ),
    reformer("reformer", bucket_size=4, num_hashes=2, num_buckets=4),
    reformer(
        "reformer-prefix",
        bucket_size=4,
        num_hashes=2,
        num_buckets=4,
        dense_prefix=11,
        key_epsilon=0.1,
        causal=(True,),
        variant=True,
    ),
    # A key whose product is near zero may be the only one: it is divided by itself.
    Case("outside", SquareAttention, {}, square_heads, long={}, smooth=False),
]


def inputs(batch=BATCH, length=LENGTH, seed=0):
    return (
        np.random.default_rng(seed).normal(size=(batch, length, DIM)).astype("float32")
    )


def ids(case):
    return case.name


def case_of(item):
    """The case of a collected test, or `None`."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    if "setting" in parameters:
        return parameters["setting"][0]
    case = parameters.get("case") or parameters.get("causal_case")
    # Other tests have cases of their own.
    return case if isinstance(case, Case) else None
