"""Random calls of every layer under contract: no crash, no NaN, and the right output.

`FUZZ_EXAMPLES` is the number of calls, and `FUZZ_SEED` selects others; `make fuzz` runs
ten thousand per backend.
"""

import contextlib
import dataclasses
import re
from collections import Counter
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import strategies as st
from keras import ops

from keras_efficient_attn import LinearAttention, ReformerLSHAttention
from tests.autodiff import compile_step, float64, gradients, to_numpy
from tests.contract.cases import CASES, DIM
from tests.fuzz.examples import run_examples

# Few lengths, because JAX compiles each: zero, one, odd, several chunks.
LENGTHS = (0, 1, 5, 8)
# Batches without rows are for JAX and PyTorch: docs/limits.md.
EMPTY_BATCHES = keras.backend.backend() != "tensorflow"
BATCHES = (0, 1, 2, 2) if EMPTY_BATCHES else (1, 2)
DTYPES = ("float32", "mixed_bfloat16", "float64")
TOLERANCE = dict(rtol=1e-3, atol=1e-4)
# Compiling takes seconds. Keras' compilation on PyTorch, `torch.compile`, takes minutes
# and has tests of its own: `tests/contract/test_torch_compile.py`.
COMPILED = (True,) + (False,) * 15 if keras.backend.backend() != "torch" else (False,)
# Refusals that docs/limits.md lists; any other error is a finding.
SAME_LENGTH = r"`query` and `key` must have the same length for a `window`\. Received: "
SAME_VECTORS = (
    r"`query` and `value` must have the same length: queries and keys are the "
)
VALUE_HEADS = "`num_value_heads` must be .*together with `num_key_value_heads`"
SAME_HEADS = (
    "does not support `num_key_value_heads`, because its queries and keys are the same"
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer; `seed` draws its numbers.

    Inputs are `scale` times as large as usual, and every second position is zero with
    `zero_rows`. `input_dtype` is that of the inputs, and `state_dtype` that of the
    floating-point tensors of a state, where they are not the layer's. `projections` is
    `"int8"` or `"lora"` for layers whose projections are changed to it.
    """

    case: object
    batch: int
    length: int
    key_length: int
    causal: bool
    query_mask: bool = True
    key_mask: bool = True
    dtype: str = "float32"
    shared_heads: int | None = None
    value_dim: int | None = None
    gradient: bool = False
    seed: int = 0
    input_dtype: str | None = None
    state_dtype: str | None = None
    projections: str | None = None
    dropout: float = 0.0
    compiled: bool = False
    documents: bool = False
    scale: float = 1.0
    zero_rows: bool = False

    def __repr__(self):
        fields = {**vars(self), "case": self.case.name}
        return f"Call({fields})"

    @property
    def is_smooth(self):
        """Whether outputs may be compared: rounding errors change them little."""
        is_exact = self.dtype != "mixed_bfloat16" and self.scale == 1
        return self.case.smooth and is_exact


@st.composite
def calls(draw):
    case = draw(st.sampled_from(CASES))
    length, batch = draw(st.sampled_from(LENGTHS)), draw(st.sampled_from(BATCHES))
    # Quantised projections refuse batches without rows: docs/limits.md.
    projections = ("lora", "int8" if batch else None)
    floats = ("float32", "bfloat16", "float64")
    return Call(
        case=case,
        batch=batch,
        length=length,
        key_length=draw(st.sampled_from((length, length, *LENGTHS))),
        causal=draw(st.sampled_from(case.causal)),
        query_mask=draw(st.booleans()),
        key_mask=draw(st.booleans()),
        dtype=draw(st.sampled_from(DTYPES)),
        shared_heads=draw(st.sampled_from((None, None, 1))),
        value_dim=draw(st.sampled_from((None, 3))),
        gradient=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        input_dtype=draw(st.sampled_from((None, None, *floats, "int32"))),
        state_dtype=draw(st.sampled_from((None, *floats))),
        projections=draw(st.sampled_from((None,) * 6 + projections)),
        dropout=draw(st.sampled_from((0.0, 0.3))),
        compiled=draw(st.sampled_from(COMPILED)),
        documents=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 1.0, 1.0, 2.0**-10, 32.0, 1024.0))),
        zero_rows=draw(st.booleans()),
    )


def make_tensors(call):
    """Query, value, and masks with holes; masked positions are NaN, or a large integer.

    The numbers are integers and halves, which every dtype holds.
    """
    rng = np.random.default_rng(call.seed)
    dtype = call.input_dtype or call.dtype.removeprefix("mixed_")
    integers = dtype == "int32"
    tensors, masks = [], []
    lengths = (call.length, call.query_mask), (call.key_length, call.key_mask)
    for length, masked in lengths:
        x = np.round(rng.normal(size=(call.batch, length, DIM)) * 2) / 2
        x = np.round(x) if integers else x * call.scale
        if call.zero_rows:
            x[:, ::2] = 0
        mask = rng.random((call.batch, length)) < 0.7 if masked else None
        if masked:
            x[~mask] = 10**6 if integers else np.nan
        tensors.append(ops.convert_to_tensor(x, dtype))
        masks.append(mask)
    if call.case.layer is ReformerLSHAttention and call.length == call.key_length:
        # Queries and keys are the same vectors.
        return tensors[:1] * 2, masks[:1] * 2
    return tensors, masks


def refusal(call):
    """The text of the error for a call that the layer refuses, or `None`."""
    cross = call.length != call.key_length
    if call.case.layer is ReformerLSHAttention:
        if call.shared_heads is not None:
            return SAME_HEADS
        return SAME_VECTORS if cross else None
    if call.shared_heads is not None and "num_value_heads" in call.case.options:
        return VALUE_HEADS
    windowed = issubclass(call.case.layer, LinearAttention)
    if windowed and call.case.options.get("window") and cross:
        return SAME_LENGTH
    return None


def check(call):
    """Raises for a finding; returns the message of a rejected call."""
    with float64() if call.dtype == "float64" else contextlib.nullcontext():
        (query, value), (query_mask, key_mask) = make_tensors(call)
        masks = dict(query_mask=query_mask, key_mask=key_mask)
        try:
            layer = make_layer(call)
            output = layer(query, value, use_causal_mask=call.causal, **masks)
        except (ValueError, TypeError) as error:
            reason = refusal(call)
            if reason is not None and re.search(reason, str(error)):
                return str(error)
            raise
        assert refusal(call) is None
        output = check_shape(layer, query, output)
        # The oracles do not support projections that heads share.
        if call.is_smooth and not call.shared_heads and query.shape[0]:
            check_oracle(call, layer, (query, value, masks), output)
        change_projections(call, layer)
        check_changed(call, layer, (query, value, masks), output)
        if call.causal and key_mask is not None:
            check_stream(call, layer, (value, key_mask))
        if call.documents and layer.takes_documents:
            check_documents(call, layer, (value, key_mask))
        training = layer(
            query, value, use_causal_mask=call.causal, training=True, **masks
        )
        check_shape(layer, query, training)
        assert all(np.isfinite(to_numpy(loss)) for loss in layer.losses)
    return None


def make_layer(call):
    options = {"dtype": call.dtype, "dropout": call.dropout}
    if call.value_dim is not None:
        options["value_dim"] = call.value_dim
    if call.shared_heads is not None:
        options["num_key_value_heads"] = call.shared_heads
    layer = call.case.make(**options)
    layer.build((None, None, DIM), (None, None, DIM))
    return layer


def change_projections(call, layer):
    """Quantises the layer's projections, or gives them low-rank changes."""
    for projection in layer._flatten_layers(include_self=False):
        if not isinstance(projection, keras.layers.Dense | keras.layers.EinsumDense):
            continue
        if call.projections == "int8":
            projection.quantize("int8")
        elif call.projections == "lora":
            projection.enable_lora(2)


def check_shape(layer, query, output):
    """Returns the output as an array, after a look at shape, dtype and numbers."""
    assert tuple(output.shape) == tuple(query.shape)
    dtype = keras.backend.standardize_dtype(output.dtype)
    assert dtype == layer.compute_dtype
    output = to_numpy(ops.cast(output, layer.state_dtype))
    assert np.isfinite(output).all()
    return output


def check_oracle(call, layer, inputs, output):
    *tensors, masks = inputs
    query, value = (to_numpy(ops.cast(x, layer.state_dtype)) for x in tensors)
    if not query.size or not value.size:
        return
    if masks["key_mask"] is None:
        masks = {**masks, "key_mask": np.ones(value.shape[:2], bool)}
    expected, _ = call.case.oracle(layer, query, value, causal=call.causal, **masks)
    np.testing.assert_allclose(output, expected, **TOLERANCE)


def check_changed(call, layer, inputs, before):
    """The call after `change_projections`: compiled, and its gradients."""
    query, value, masks = inputs
    # One tensor stays one.
    tensors = (query,) if query is value else (query, value)

    def attend(masks, *tensors):
        query, value = tensors[0], tensors[-1]
        return layer(query, value, use_causal_mask=call.causal, **masks)

    if call.projections is not None:
        changed = check_shape(layer, query, attend(masks, *tensors))
        # Low-rank changes start at zero.
        if call.projections == "lora" and call.is_smooth:
            np.testing.assert_allclose(changed, before, **TOLERANCE)
        before = changed
    if call.compiled:
        step = compile_step(attend, xla=True)
        compiled = check_shape(layer, query, step(masks, *tensors))
        if call.is_smooth:
            np.testing.assert_allclose(compiled, before, **TOLERANCE)
    floating = keras.backend.is_float_dtype(query.dtype)
    if call.gradient and call.dtype == "float32" and floating and before.size:

        def loss(*tensors):
            return ops.sum(ops.square(attend(masks, *tensors)))

        for gradient in gradients(loss, *tensors):
            assert np.isfinite(gradient.astype("float32")).all()


def check_stream(call, layer, inputs):
    """Two segments, one possibly empty, give the outputs of one call."""
    x, mask = inputs
    if layer.state_spec(1, 8) is None:
        return
    options = dict(use_causal_mask=True)
    # Masked queries are NaN as well.
    whole = layer(x, x, query_mask=mask, key_mask=mask, **options)
    whole = check_shape(layer, x, whole)
    initial = state = call.case.get_initial_state(layer, call.batch)
    outputs, cut = [], call.seed * call.length // 3
    for part in (slice(None, cut), slice(cut, None)):
        masks = dict(query_mask=mask[:, part], key_mask=mask[:, part])
        state = cast_state(state, call.state_dtype)
        segment = x[:, part]
        output, state = layer(segment, segment, state=state, **masks, **options)
        outputs.append(check_shape(layer, segment, output))
    for name, tensor in state.items():
        assert tensor.dtype == initial[name].dtype, name
    # A narrow state rounds what it holds.
    if call.is_smooth and call.state_dtype != "bfloat16":
        parts = np.concatenate(outputs, axis=1)
        np.testing.assert_allclose(parts, whole, **TOLERANCE)


def check_documents(call, layer, inputs):
    """Documents in rows, and in segments of them, give what they give alone."""
    x, mask = inputs
    batch, length = x.shape[:2]
    rng, options = np.random.default_rng(call.seed), dict(use_causal_mask=call.causal)
    ids = np.cumsum(rng.random((batch, length)) < 0.3, axis=1).astype("int32")
    mask = np.ones((batch, length), bool) if mask is None else mask
    masks = dict(query_mask=mask, key_mask=mask)
    packed = layer(x, x, document_ids=ids, **masks, **options)
    outputs = [check_shape(layer, x, packed)]
    if call.causal and layer.state_spec(1, 8) is not None:
        state, parts, last = call.case.get_initial_state(layer, batch), [], ids[:, :1]
        for part in (slice(None, length // 2), slice(length // 2, None)):
            own = dict(query_mask=mask[:, part], key_mask=mask[:, part])
            own |= dict(state=state, document_ids=ids[:, part] - last)
            segment = x[:, part]
            output, state = layer(segment, segment, **own, **options)
            parts.append(check_shape(layer, segment, output))
            last = ids[:, part][:, -1:] if part.start is None and length > 1 else last
        outputs.append(np.concatenate(parts, axis=1))
    if not call.is_smooth:
        return
    for number in range(ids.max(initial=-1) + 1):
        own = mask & (ids == number)
        alone = layer(x, x, query_mask=own, key_mask=own, **options)
        alone = check_shape(layer, x, alone)
        for output in outputs:
            np.testing.assert_allclose(output[own], alone[own], **TOLERANCE)


def cast_state(state, dtype):
    """A state with other floats, and wider integers; unchanged for `None`."""
    if dtype is None:
        return state
    return {
        name: ops.cast(
            tensor, dtype if keras.backend.is_float_dtype(tensor.dtype) else "int64"
        )
        for name, tensor in state.items()
    }


def test_random_calls():
    refused = Counter()

    def count(call):
        refused[check(call) is not None] += 1

    run_examples(count, calls())
    # A strategy with only rejected calls would find nothing.
    assert refused[True] < refused[False]


@pytest.mark.skipif(not EMPTY_BATCHES, reason="docs/limits.md")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_batches_without_rows(case):
    assert check(Call(case, 0, 8, 8, case.usual)) is None


def test_another_error_than_the_documented_one_is_a_finding():
    (case,) = (case for case in CASES if case.name == "reformer")
    call = Call(case, 1, 5, 5, case.usual, shared_heads=1)
    assert "num_key_value_heads=1" in check(call)

    def make(**options):
        raise ValueError("`key` is not what it should be, nor is `num_key_value_heads`")

    broken = SimpleNamespace(**{**vars(case), "make": make})
    with pytest.raises(ValueError, match="not what it should be"):
        check(dataclasses.replace(call, case=broken))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences_of_length_0(case):
    assert check(Call(case, 2, 0, 0, case.usual)) is None
