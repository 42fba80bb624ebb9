"""Exported programs of several formats, run by their runtimes."""

import keras
from keras import tree

FORMATS = ("SavedModel", "ONNX", "LiteRT")
SOLVE = "triangular systems"
# Operators that layers need and formats lack, in programs for whole sequences.
NOT_EXPORTED = {
    "delta": {"ONNX": SOLVE, "LiteRT": SOLVE},
    "gated-delta": {"ONNX": SOLVE, "LiteRT": SOLVE},
    "kimi-delta": {"ONNX": SOLVE, "LiteRT": SOLVE},
}


class Step(keras.Model):
    """One token of a causal backbone: `[token, *state]` → `[logits, *state]`."""

    def __init__(self, backbone, max_length):
        super().__init__()
        self.backbone = backbone
        self.initial_state = backbone.get_initial_state(1, max_length)

    def call(self, inputs):
        token, *leaves = inputs
        state = tree.pack_sequence_as(self.initial_state, leaves)
        hidden, state = self.backbone.stream(token, state)
        logits = self.backbone.token_embedding(hidden, reverse=True)
        return [logits, *tree.flatten(state)]


def run_exported(model, inputs, format, folder):
    """The outputs of a model after its export, by the runtime of the format.

    Args:
        model: The model, called before.
        inputs: List of arrays: its inputs.
        format: `"SavedModel"`, `"ONNX"` or `"LiteRT"`.
        folder: Path of a folder for the file.

    Returns:
        List of arrays.
    """
    specs = [keras.InputSpec(shape=x.shape, dtype=x.dtype.name) for x in inputs]
    arguments = {"verbose": False, "input_signature": [specs]}
    if format == "SavedModel":
        import tensorflow

        model.export(folder, format="tf_saved_model", **arguments)
        program = tensorflow.saved_model.load(str(folder))
        return tree.flatten(program.serve(inputs))
    if format == "ONNX":
        import onnxruntime

        path = str(folder / "model.onnx")
        model.export(path, format="onnx", **arguments)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        return session.run(None, dict(zip(names, inputs, strict=True)))
    from ai_edge_litert.interpreter import Interpreter

    path = str(folder / "model.tflite")
    model.export(path, format="litert", **arguments)
    runner = Interpreter(path).get_signature_runner()
    names = sorted(runner.get_input_details(), key=_number)
    outputs = runner(**dict(zip(names, inputs, strict=True)))
    return [outputs[name] for name in sorted(outputs, key=_number)]


def _number(name):
    """Sorts LiteRT's names, which end in their numbers."""
    return len(name), name
