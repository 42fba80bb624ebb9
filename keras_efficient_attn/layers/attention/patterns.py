"""The base of layers whose queries attend to a fixed pattern of positions."""

from keras_efficient_attn.layers.attention.base import EfficientAttention
from keras_efficient_attn.ops.common.checks import check_rotary_wavelength
from keras_efficient_attn.ops.common.inputs import SoftmaxCall, SoftmaxOptions
from keras_efficient_attn.ops.common.numerics import accumulator_dtype
from keras_efficient_attn.ops.common.random import dropout_seed
from keras_efficient_attn.ops.common.rows import Rows


class PatternAttention(EfficientAttention):
    """Base class: softmax attention over the keys of a fixed pattern.

    A subclass computes the heads in `attend_to_pattern`; its state holds the number of
    positions read so far in `"position"`. This class adds dropout on the weights and
    rotary positions.

    Args:
        *args, **kwargs: Arguments of `EfficientAttention`. `dropout` acts on the
            normalised weights.
        rotary_wavelength: Longest wavelength of rotary positions, over 2π, such as
            10,000. Defaults to `None`: no positions.

    Raises:
        ValueError: For a `rotary_wavelength` that is not positive, or with an odd
            `key_dim`.
    """

    takes_documents = True

    def __init__(self, *args, rotary_wavelength=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.keep(dict(rotary_wavelength=rotary_wavelength))
        check_rotary_wavelength(rotary_wavelength, self._key_dim)

    @property
    def is_softmax(self):
        return self.rotary_wavelength is None

    def attend_to_pattern(self, softmax, call):
        """Computes attention over the layer's pattern. Subclasses implement this.

        Args:
            softmax: `SoftmaxCall`, with queries and keys rotated, not scaled.
            call: `AttentionCall`.

        Returns:
            The heads; with a state, the pair of the heads and the new state.
        """
        raise NotImplementedError

    def attend(self, query, key, value, call):
        state, rate, seed = call.state, 0.0, None
        if self.rotary_wavelength is not None:
            start = None if state is None else state["position"]
            start = call.documents.position if call.documents else start
            query, key = self._rotate(query, start), self._rotate(key, start)
        if call.training and self._dropout > 0.0:
            generator = self._dropout_layer.seed_generator
            rate, seed = (
                self._dropout,
                dropout_seed(generator, accumulator_dtype(query)),
            )
        options = SoftmaxOptions(call.causal, self._key_dim**-0.5, rate)
        inputs = query, key, value, call.key_mask
        rows = Rows(call.lengths, call.documents)
        softmax = SoftmaxCall(inputs, options, state, seed, rows=rows)
        output = self.attend_to_pattern(softmax, call)
        return (output, None) if state is None else output
