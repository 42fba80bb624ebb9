"""The language part with four blocks: what one softmax layer of them changes."""

from verdict import language

SIZES = {**language.SIZES, "layers": 4}
options = language.options
measure = language.measure
