"""Random options of every layer: the right output, or an error that names an option.

`FUZZ_EXAMPLES` and `FUZZ_SEED` are those of `test_layers.py`.
"""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import strategies as st

from keras_efficient_attn import (
    AdaptiveSpan,
    CodeOptions,
    DeltaAttention,
    EfficientAttention,
    FourierAttention,
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
from keras_efficient_attn.layers.attention.linear.gated.layer import (
    GatedStateAttention,
)
from tests.autodiff import to_numpy
from tests.contract.cases import CASES, DIM
from tests.fuzz.examples import run_examples

BATCH, LENGTH = 2, 9


def integers(*good, least=1):
    """Good and bad values of an integer option."""
    return good, (least - 1, -7, True, 2.5, "3", [2])


def numbers(*good, zero=False):
    """Good and bad values of a positive number."""
    return good, (*(() if zero else (0.0,)), -0.5, True, "1", float("nan"), [1.0])


def rates():
    return (0, 0.0, 0.3), (-0.1, 1.0, True, "x", None)


def flags():
    return (True, False), (0, 1, 2.5, "yes", None)


def choices(*good):
    return good, ("no-such", 3.5, True, [1])


def optional(kind):
    good, bad = kind
    return (None, *good), tuple(value for value in bad if value is not None)


ROTARY = optional(numbers(100, 50.0))
ACTIVATIONS = optional(choices("relu", "silu", "sigmoid"))
# By class: for each option, good and bad values. A class has its bases' as well.
OPTIONS = {
    EfficientAttention: {
        "num_heads": integers(1, 2, 4),
        "key_dim": integers(4, 6, 3),
        "value_dim": optional(integers(1, 5)),
        "dropout": rates(),
        # Keras reads its own flags as truth values.
        "use_bias": ((True, False), ()),
        "output_shape": ((None, 5, (3,), [2, 3]), (0, -7, True, 2.5, "3", [2.5], ())),
        "num_key_value_heads": optional(integers(1, 2)),
        "use_gate": ((True, False), ()),
        "gate_activation": choices("sigmoid", "relu"),
        "value_activation": ACTIVATIONS,
        "seed": ((None, 0, 3), (True, 2.5, "3", [2])),
        "sliding_window": optional(integers(3)),
    },
    LinearAttention: {
        "feature_map": choices(*feature_maps.names()),
        "window": optional(integers(1, 4, 20)),
        "normalize": flags(),
        "qk_norm": flags(),
        "temperature": numbers(1, 0.5),
        "rotary_wavelength": ROTARY,
        "chunk_size": optional(integers(1, 3, 16)),
    },
    PerformerAttention: {
        "num_features": optional(integers(2, 16, 7)),
        "order": optional(integers(2, 4)),
        "orthogonal": flags(),
        "row_norm": choices("chi", "sqrt_dim"),
        "redraw_interval": optional(integers(1, 3)),
        "calibrated": flags(),
        "rank": optional(integers(1, 4)),
    },
    GatedStateAttention: {
        "convolution": optional(integers(2, 4, least=2)),
        "activation": ACTIVATIONS,
        "output_norm": optional(
            choices("rms", "group", OutputNorm("group", epsilon=0.1, scale=False))
        ),
        "output_gate": optional(
            choices(
                "sigmoid", OutputGate("tanh", rank=2), OutputGate("silu", bias=True)
            )
        ),
    },
    DeltaAttention: {"max_beta": numbers(1, 2.0)},
    GatedLinearAttention: {
        "decay": choices("vector", "scalar"),
        "decay_rank": optional(integers(1, 3)),
        "decay_temperature": numbers(1, 16.0),
    },
    KimiDeltaAttention: {"decay_rank": optional(integers(1, 3))},
    RetentionAttention: {
        "decays": ((None, (0.5, 1.0), [0.9]), (0.5, (0.0, 0.5), (2.0, 0.5), "x", True))
    },
    SparseAttention: {
        "pattern": choices("strided", "fixed"),
        "stride": integers(1, 4, 20),
        "summary": optional(integers(1, 2)),
        "factors": (("merged", "split", 0, 1), (2, -1, True, "both", 0.5, None)),
    },
    LocalAttention: {
        "window": optional(integers(1, 4, 20)),
        "query_block": optional(integers(1, 4, 20)),
        "memory": optional(integers(0, 3, 20, least=0)),
        "grid_order": choices("raster", "block"),
        "grid": ((None, (3, 3)), ((0, 3), 9, "x", (3,), (3, 2.5), True)),
    },
    AdaptiveSpan: {
        "max_span": integers(1, 4, 20),
        "ramp": numbers(1, 2.5, 30),
        "include_self": flags(),
        "initial_span": numbers(0, 1, 3.5, zero=True),
        "penalty": numbers(0, 1e-3, zero=True),
        "dynamic": flags(),
        "relative_positions": ((True, False), ("no-such", 2.5, None, 1)),
        "window": optional(integers(1, 3)),
    },
    VQAttention: {
        "num_codes": integers(1, 4),
        "window": optional(integers(1, 4, 20)),
        "codes": (
            (
                *("hard", "soft"),
                CodeOptions(momentum=0.9, revive_after=None, init="random"),
                {"commitment_weight": 0, "revive_after": 1},
                CodeOptions("soft", sigma=0.5),
                {"assignment": "soft", "learn_sigma": True, "learn_weights": True},
            ),
            (
                *("no-such", 3.5, None, [1]),
                {"no-such": 1},
                {"momentum": 1.5},
                {"init": "x"},
                {"assignment": "soft", "sigma": 0.0},
            ),
        ),
        "order": ((0, 2), (1, 3, -1, True, 2.5, "x", None)),
        "rank": optional(integers(1, 3)),
        "quantize_window": flags(),
        "gradient_through_cache": flags(),
        "relative_positions": flags(),
        "position_dropout": rates(),
        "qk_norm": flags(),
        "rotary_wavelength": ROTARY,
        "block_length": optional(integers(1, 4, 16)),
    },
    ReformerLSHAttention: {
        "bucket_size": integers(1, 4, 20),
        "num_hashes": integers(1, 3),
        "num_buckets": ((2, 4, (2, 4), [2, 2]), (0, 3, -2, True, 2.5, "x", (2, 3), ())),
        "max_hashes": optional(integers(1, 8)),
        "aligned": optional(flags()),
        "across_buckets": flags(),
        "scale_logits": flags(),
        "num_local_heads": integers(0, 1, 2, least=0),
        "dense_length": optional(integers(1, 9)),
    },
    RelativePositionXL: {
        "memory_length": integers(0, 4, least=0),
        "clamp_length": optional(integers(1, 3)),
        "same_length": flags(),
        "biases": choices("own", "shared"),
        "position_dropout": rates(),
    },
    FourierAttention: {
        "power": ((2, 4, 6, 8), (0, 3, -2, True, 2.5, "x", None)),
        "radius_per": choices("layer", "head", "dimension"),
        "initial_radius": optional(numbers(0.3, 1)),
        "linear": flags(),
        "num_frequencies": optional(integers(1, 8)),
        "orthogonal": flags(),
        "chunk_size": optional(integers(1, 4, 16)),
        "implementation": optional(choices("tiled", "reference")),
    },
    SoftmaxAttention: {
        "rotary_wavelength": ROTARY,
        "kernel": choices("dot_product", "gaussian"),
    },
}
for pattern in (SparseAttention, LocalAttention, AdaptiveSpan):
    OPTIONS[pattern]["rotary_wavelength"] = ROTARY
# Options that the oracle of a class and its subclasses does not read.
UNREAD = {
    EfficientAttention: ("num_key_value_heads", "use_gate", "value_activation"),
    PerformerAttention: ("calibrated", "rank"),
    GatedStateAttention: (
        *("feature_map", "normalize", "qk_norm", "temperature"),
        *("activation", "output_gate", "output_norm"),
    ),
    SparseAttention: ("factors",),
    # A window shorter than the spans cuts them.
    AdaptiveSpan: ("window",),
    SoftmaxAttention: ("kernel",),
}
TOLERANCE = dict(rtol=1e-3, atol=1e-4)
# Without these, the layer refuses any value of the option.
NEEDED = {
    "gate_activation": {"use_gate": True},
}
USUAL = {"num_heads": 2, "key_dim": 4, "seed": 1}
# The first case of each layer, for its oracle.
CASE_OF = {case.layer: case for case in reversed(CASES)}
LAYERS = list(CASE_OF)


def options_of(layer):
    """The options of a class and its bases: `{name: (good, bad)}`."""
    kinds = {}
    for base in reversed(layer.__mro__):
        kinds |= OPTIONS.get(base, {})
    return kinds


def names_one_of(error, options):
    """Whether the text of an error has one of the names, as an argument.

    Args:
        error: What was raised.
        options: Dict of options. A dict among their values has names as well.
    """
    nested = [value for value in options.values() if isinstance(value, dict)]
    names = {name for names in (options, *nested) for name in names}
    # Keras prints the text in bold.
    text = re.sub(r"\x1b\[\d+m", " ", str(error))
    return any(re.search(rf"`{name}`|\b{name}=", text) for name in names)


@dataclasses.dataclass(frozen=True)
class Example:
    """Options besides `USUAL`, and a call; `bad` is the option with a bad value."""

    layer: type
    options: dict
    bad: str | None
    causal: bool
    masked: bool
    training: bool
    seed: int


@st.composite
def examples(draw):
    layer = draw(st.sampled_from(LAYERS))
    kinds = options_of(layer)
    own = [name for name in kinds if name not in OPTIONS[EfficientAttention]]
    names = draw(st.lists(st.sampled_from(own or list(kinds)), max_size=4))
    names += draw(st.lists(st.sampled_from(list(kinds)), max_size=2))
    options = {
        name: draw(st.sampled_from(kinds[name][0])) for name in sorted(set(names))
    }
    bad = None
    if draw(st.sampled_from((False, False, False, True))):
        bad = draw(st.sampled_from([name for name in kinds if kinds[name][1]]))
        options[bad] = draw(st.sampled_from(kinds[bad][1]))
    return Example(
        layer=layer,
        options=options,
        bad=bad,
        causal=draw(st.booleans()),
        masked=draw(st.booleans()),
        training=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
    )


def check(example):
    """Raises for a finding; returns the message of refused options."""
    try:
        layer = example.layer(**{**USUAL, **example.options})
        compute(example, layer)
    except (ValueError, TypeError) as error:
        if names_one_of(error, example.options):
            return str(error)
        raise
    assert example.bad is None, "no error"
    assert layer.from_config(layer.get_config()).get_config() == layer.get_config()
    return None


def compute(example, layer):
    """Calls the layer, and raises for a wrong output."""
    x, mask = make_inputs(example)
    layer.build(x.shape, x.shape)
    call = dict(use_causal_mask=example.causal, query_mask=mask, key_mask=mask)
    output = to_numpy(layer(x, x, **call))
    width = example.options.get("output_shape") or DIM
    widths = (width,) if isinstance(width, int) else width
    assert output.shape == (BATCH, LENGTH, *widths)
    assert np.isfinite(output).all()
    if has_oracle(example):
        masks = dict(query_mask=mask, key_mask=mask)
        case = CASE_OF[example.layer]
        expected, _ = case.oracle(layer, x, x, causal=example.causal, **masks)
        expected = expected.reshape(output.shape)
        np.testing.assert_allclose(output, expected, **TOLERANCE)
    if example.causal:
        # Causality is exact: the last position changes no other.
        other = np.array(x)
        other[:, -1] += 1
        changed = to_numpy(layer(other, other, **call))
        np.testing.assert_array_equal(changed[:, :-1], output[:, :-1])
    if example.training:
        assert np.isfinite(to_numpy(layer(x, x, training=True, **call))).all()
        for loss in layer.losses:
            assert np.isfinite(to_numpy(loss)).all()


def has_oracle(example):
    """Whether the dense definition of the layer reads all the options."""
    case, options = CASE_OF[example.layer], example.options
    if case.layer is LocalAttention and options.get("window") is None:
        return False
    unread = {name for c in case.layer.__mro__ for name in UNREAD.get(c, ())}
    return case.smooth and options.get("use_bias", True) and not unread & set(options)


def make_inputs(example):
    rng = np.random.default_rng(example.seed)
    x = rng.normal(size=(BATCH, LENGTH, DIM)).astype("float32")
    mask = rng.random((BATCH, LENGTH)) < 0.7 if example.masked else None
    if example.masked:
        x[~mask] = np.nan
    return x, mask


def test_random_options():
    refused = Counter()

    def count(example):
        refused[check(example) is not None] += 1

    run_examples(count, examples())
    assert refused[True] < 2 * refused[False]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_bad_values_are_refused_by_name(layer):
    """One bad value and nothing else."""
    findings = []
    for name, (_, bad) in options_of(layer).items():
        for value in bad:
            options = {**NEEDED.get(name, {}), name: value}
            try:
                layer(**{"num_heads": 2, "key_dim": 4, **options})
            except (ValueError, TypeError) as error:
                if not names_one_of(error, {name: value}):
                    findings.append(f"{name}={value!r}: {type(error).__name__} {error}")
            except Exception as error:
                findings.append(f"{name}={value!r}: {type(error).__name__} {error}")
            else:
                findings.append(f"{name}={value!r}: no error")
    assert not findings, "\n".join(findings)
