"""What a golden file holds: the inputs of a model, and how its outputs are made."""

from pathlib import Path

import keras
import numpy as np

from keras_efficient_attn.models import TransformerXL

FILES = Path(__file__).parent / "files"
INPUT, OUTPUT, PROMPT, SEGMENT = "input/", "output/", "prompt/", "segment/"
GENERATED = "generated"


def outputs_of(model, arrays):
    """The outputs of a model, named, as NumPy arrays.

    Args:
        model: A Functional model, with names for its outputs or with a single one.
        arrays: Dict of the inputs, whose names start with `INPUT`. An
            `EfficientCausalLM` also generates from those that start with `PROMPT`,
            and reads those that start with `SEGMENT` one after the other, in a
            `TransformerXL`: Keras orders the variables of its memory differently on
            PyTorch, so that one file would not load on all backends.

    Returns:
        Dict. Outputs at padding are zeros: models may give anything there.
    """
    inputs = _with_prefix(arrays, INPUT)
    outputs = model(inputs, training=False)
    outputs = outputs if isinstance(outputs, dict) else {"output": outputs}
    outputs = {
        name: _without_padding(name, keras.ops.convert_to_numpy(output), inputs)
        for name, output in outputs.items()
    }
    segments = _with_prefix(arrays, SEGMENT)
    if segments:
        batch_size = len(next(iter(segments.values())))
        remembering = TransformerXL(model, batch_size, memory_length=10)
        for name in sorted(segments):
            logits = remembering(segments[name], training=False)
            outputs[SEGMENT + name] = keras.ops.convert_to_numpy(logits)
    prompt = _with_prefix(arrays, PROMPT)
    if prompt:
        model.compile(sampler="greedy", run_eagerly=True)
        generated = model.generate(prompt, stop_token_ids=None)
        outputs[GENERATED] = keras.ops.convert_to_numpy(generated["token_ids"])
    return outputs


def _with_prefix(arrays, prefix):
    return {
        name.removeprefix(prefix): np.array(array)
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _without_padding(name, output, inputs):
    sequence = name.removesuffix("sequence_output")
    mask = inputs.get(f"{sequence}padding_mask", inputs.get("padding_mask"))
    if mask is None or mask.shape != output.shape[:2]:
        return output
    mask = np.reshape(mask, (*mask.shape, *[1] * (output.ndim - 2)))
    return np.where(mask, output, 0).astype(output.dtype)
