"""Writes the golden files: models with weights, their inputs and their outputs.

Usage: KERAS_BACKEND=torch python -m tests.golden.write [NAME ...]

Without names, all files are written anew. They pin the behaviour of the code that
writes them: later code must load them and give the same outputs. Write a file anew
only if its outputs are meant to change.
"""

import sys
import zipfile

import keras
import numpy as np

from keras_efficient_attn import (
    AdaptiveComputationTime,
    AdaptiveRNN,
    ChunkedFeedForward,
    ChunkedVocabularyLoss,
    GatedResidual,
    PerformerAttention,
    ReformerLSHAttention,
    ReversibleBlock,
    ReversibleStack,
    SoftmaxAttention,
)
from keras_efficient_attn.models import (
    EfficientCausalLM,
    EfficientMaskedLM,
    EfficientTextClassifier,
    EfficientTransformerBackbone,
    EmbeddingOptions,
    FeedForward,
    FeedForwardOptions,
    PositionOptions,
    RecurrenceOptions,
    ResidualOptions,
    SeparableConvolution,
    SinusoidalPositions,
    TransformerBlock,
    UniversalTransformer,
    convert_backbone,
)
from tests.contract.cases import BATCH, CASES, DIM, LENGTH
from tests.golden.running import FILES, INPUT, OUTPUT, PROMPT, SEGMENT, outputs_of
from tests.models.conversion import families

SHORT, VOCABULARY = 21, 30
LENGTHS = np.array([LENGTH, 21])
SIZES = dict(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    intermediate_dim=24,
)
ELU = "performer:feature_map=elu,chunk_size=4"
WINDOW = "performer:num_features=8,window=5,chunk_size=4"
VQ = "vq:num_codes=6,window=5,block_length=4"
XL = "xl:memory_length=8"
RECURRENT = dict(
    num_layers=1,
    positions=PositionOptions("sinusoidal", each_layer=True),
    recurrence=RecurrenceOptions(
        3, "learned", {"ponder_cost": 0.1, "halting_bias": -0.5}
    ),
)
LEARNED = PositionOptions("learned", max_length=40)

BACKBONES = {
    "performer-elu": dict(attention=ELU, positions="sinusoidal"),
    "performer-window": dict(
        attention=WINDOW,
        positions="rotary",
        residual=ResidualOptions(norm="rms_norm"),
        feed_forward=FeedForwardOptions("silu", gated=True),
        use_bias=False,
    ),
    "vq": dict(attention=VQ, positions=LEARNED),
    "local": dict(attention="local:window=5", positions="rotary"),
    "sparse": dict(
        attention=["sparse:stride=5", "sparse:pattern=fixed,stride=6,summary=2"],
        positions=PositionOptions("sinusoidal", each_layer=True),
        residual="post_norm",
    ),
    "fourier": dict(attention="fourier:chunk_size=4", positions="sinusoidal"),
    "reformer-reversible": dict(
        attention="reformer:bucket_size=4,num_buckets=4,num_hashes=2",
        residual="reversible",
        positions="sinusoidal",
        feed_forward=FeedForwardOptions(chunk_size=8),
    ),
    "xl": dict(attention=XL),
    "xl-shared": dict(attention=f"{XL},biases=shared", residual="gated"),
    "adaptive-span": dict(attention="adaptive-span:max_span=12,ramp=4"),
    "adaptive-span-shared": dict(
        attention="adaptive-span:max_span=12,ramp=4,relative_positions=shared"
    ),
    "softmax": dict(
        attention="softmax:sliding_window=5",
        positions=PositionOptions("learned", max_length=40, each_layer=True),
        embedding=EmbeddingOptions(scale=True),
        head_dim=6,
    ),
    "recurrent": dict(
        attention=[ELU, "softmax"],
        recurrence=2,
        positions="sinusoidal",
        feed_forward=FeedForwardOptions(chunk_size=8),
    ),
    "universal": dict(
        attention=ELU,
        feed_forward=FeedForwardOptions(separable_convolution=True),
        **RECURRENT,
    ),
    "encoder": dict(
        attention=[WINDOW, "softmax"],
        architecture="encoder",
        positions=LEARNED,
        dropout=0.1,
    ),
    "encoder-decoder": dict(
        attention=ELU,
        architecture="encoder_decoder",
        cross_attention="softmax",
        positions="sinusoidal",
    ),
}
LANGUAGE_MODELS = {
    "performer-window": dict(attention=WINDOW, positions="rotary", num_layers=1),
    "vq": dict(attention=VQ, positions=LEARNED, num_layers=1),
    "reformer": dict(
        attention="reformer:bucket_size=16,num_buckets=4,num_hashes=4",
        residual="reversible",
        positions="sinusoidal",
    ),
    "xl": dict(attention=XL),
    "softmax": dict(attention="softmax", positions="rotary"),
}
CONVERTED = {
    "gpt2-performer": ("gpt2", "performer:window=4,num_features=8"),
    "gpt2-vq": ("gpt2", "vq:window=4,num_codes=6,block_length=4"),
    "bert-performer": ("bert", "performer:window=4,num_features=8"),
    "bert-local": ("bert", "local:window=3"),
    "llama-performer": ("llama", "performer:window=4,num_features=8"),
}


# === Inputs and weights ===
def normal(length=LENGTH, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(BATCH, length, DIM)).astype("float32")


def padding(length=LENGTH):
    return np.arange(length) < np.minimum(LENGTHS, length)[:, None]


def holes(length=LENGTH):
    """A key mask with holes; a causal row sees no key at first."""
    mask = np.random.default_rng(1).random((BATCH, length)) > 0.4
    mask[0, :3] = False
    return mask


def tokens(length, seed=0):
    random = np.random.default_rng(seed)
    return random.integers(1, VOCABULARY, (BATCH, length)).astype("int32")


def sequence(prefix="", length=LENGTH):
    """Tokens whose second row ends in padding."""
    mask = np.ones((BATCH, length), "int32")
    mask[1, length * 2 // 3 :] = 0
    return {
        f"{prefix}token_ids": tokens(length) * mask,
        f"{prefix}padding_mask": mask,
    }


def stir(model, seed=3):
    """Changes weights that are all equal, and makes embeddings large.

    A new layer's biases, gains and gates are constants, and a lost one would not show.
    """
    random = np.random.default_rng(seed)
    for weight in model.trainable_weights:
        value = keras.ops.convert_to_numpy(weight)
        if "embeddings" in weight.name:
            value = random.normal(size=value.shape)
        elif np.ptp(value) == 0:
            value = value + 0.2 * random.normal(size=value.shape)
        if weight.constraint is not None:
            value = weight.constraint(value.astype("float32"))
        weight.assign(value)
    return model


def functional(call, arrays):
    """A model of a function of named symbolic inputs; its last axes are of known size.

    Args:
        call: Callable, from the inputs as keyword arguments to a dict of outputs.
        arrays: Dict of the inputs.
    """
    inputs = {
        name: keras.Input((None, *array.shape[2:]), dtype=array.dtype, name=name)
        for name, array in arrays.items()
    }
    return stir(keras.Model(inputs, call(**inputs))), arrays


# === Layers ===
def attention(layer, causal=(False, True), cross=True, query_masks=True):
    """All kinds of calls of one attention layer, whose name is `layer`."""
    usual = causal[-1]
    arrays = {"x": normal(), "query_mask": padding(), "key_mask": holes()}
    if cross:
        arrays["memory"] = normal(SHORT, seed=4)

    def call(x, query_mask, key_mask, memory=None):
        masks = {"value_mask": key_mask}
        if query_masks:
            masks["query_mask"] = query_mask
        # First: a Functional model takes the number of outputs from the first call.
        scored, scores = layer(
            x, x, use_causal_mask=usual, return_attention_scores=True
        )
        outputs = {"scored": scored, "scores": scores}
        for setting in causal:
            name = "causal" if setting else "full"
            outputs[name] = layer(x, x, use_causal_mask=setting)
        outputs["masked"] = layer(x, x, use_causal_mask=usual, **masks)
        if memory is not None:
            outputs["cross"] = layer(x, memory)
        return outputs

    if not query_masks:
        del arrays["query_mask"]
        return functional(lambda **inputs: call(query_mask=None, **inputs), arrays)
    return functional(call, arrays)


def network(dim=DIM):
    return keras.Sequential(
        [
            keras.layers.LayerNormalization(),
            keras.layers.Dense(20, "gelu"),
            keras.layers.Dense(dim),
        ]
    )


def attention_branch(layer):
    x = keras.Input((None, DIM))
    h = keras.layers.LayerNormalization()(x)
    return keras.Model(x, layer(h, h, use_causal_mask=True))


def reversible_block():
    block = ReversibleBlock(
        attention_branch(PerformerAttention(2, 8, feature_map="elu", chunk_size=4)),
        network(),
        name="layer",
    )

    def call(x1, x2):
        y1, y2 = block((x1, x2))
        return {"y1": y1, "y2": y2}

    return functional(call, {"x1": normal(), "x2": normal(seed=4)})


def reversible_stack():
    lsh = ReformerLSHAttention(2, 8, bucket_size=4, num_buckets=4, num_hashes=2, seed=1)
    elu = PerformerAttention(2, 8, feature_map="elu", chunk_size=4)
    shared = ReversibleBlock(attention_branch(elu), network())
    stack = ReversibleStack(
        [shared, ReversibleBlock(attention_branch(lsh), network()), shared],
        merge="concatenate",
        name="layer",
    )
    return functional(lambda x: {"output": stack(x)}, {"x": normal()})


def gated_residual():
    gates = ("gru", "input", "output", "highway", "sigmoid_tanh")
    layers = {gate: GatedResidual(gate, name=gate) for gate in gates}
    return functional(
        lambda x, y: {gate: layer(x, y) for gate, layer in layers.items()},
        {"x": normal(), "y": normal(seed=4)},
    )


def chunked_feed_forward():
    layer = ChunkedFeedForward(network(7), chunk_size=5, name="layer")
    return functional(lambda x: {"output": layer(x)}, {"x": normal()})


def chunked_vocabulary_loss():
    layer = ChunkedVocabularyLoss(VOCABULARY, chunk_size=5, name="layer")
    return functional(
        lambda hidden, labels: {"losses": layer(hidden, labels)},
        {"hidden": normal(), "labels": tokens(LENGTH)},
    )


def adaptive_computation_time():
    layer = AdaptiveComputationTime(
        keras.layers.Dense(DIM, "tanh"), max_steps=6, halting_bias=-1.0, name="layer"
    )

    def call(x, mask):
        output, ponder = layer(x, return_ponder=True)
        return {"output": output, "masked": layer(x, mask=mask), **ponder}

    return functional(call, {"x": normal(), "mask": holes()})


def adaptive_rnn():
    cell = AdaptiveComputationTime(
        keras.layers.LSTMCell(10), max_steps=4, halting_bias=-0.5
    )
    layer = AdaptiveRNN(cell, return_sequences=True, name="layer")

    def call(x, mask):
        output, ponder = layer(x, mask=mask, return_ponder=True)
        return {"output": output, **ponder}

    return functional(call, {"x": normal(9), "mask": holes(9)})


# === Models ===
def universal_transformer(decoder):
    """With adaptive computation: an encoder, or a decoder with another transition."""
    block = TransformerBlock(
        PerformerAttention(2, 8, feature_map="elu", chunk_size=4),
        SeparableConvolution(20) if decoder else FeedForward(20),
        causal=decoder,
        cross_attention=SoftmaxAttention(2, 8) if decoder else None,
        residual="post_norm" if decoder else "pre_norm",
    )
    layer = UniversalTransformer(
        [block],
        num_recurrences=4,
        positions=SinusoidalPositions(),
        timestep_embedding="sinusoidal" if decoder else "learned",
        adaptive_computation={"ponder_cost": 0.01, "halting_bias": -1.0},
        name="layer",
    )

    def call(x, padding_mask, **memory):
        output, ponder = layer(
            x, padding_mask=padding_mask, return_ponder=True, **memory
        )
        return {"output": output, **ponder}

    arrays = {"x": normal(), "padding_mask": padding()}
    if decoder:
        arrays["memory"] = normal(SHORT, seed=4)
        arrays["memory_padding_mask"] = holes(SHORT)
    return functional(call, arrays)


def backbone(**options):
    return stir(EfficientTransformerBackbone(**{**SIZES, **options}))


def backbone_case(options):
    model = backbone(**options)
    if model.architecture == "encoder_decoder":
        return model, sequence("encoder_") | sequence("decoder_", SHORT)
    return model, sequence()


def language_model(options):
    """Logits of texts, and what follows prompts of several lengths, for `outputs_of`.

    Tied embeddings would make the last token the likeliest, again and again.
    """
    model = EfficientCausalLM(backbone(embedding="untied", **options), compile=False)
    mask = (np.arange(12) < np.array([[3], [6]])).astype("int32")
    prompt = {f"{PROMPT}token_ids": tokens(12, 5) * mask, f"{PROMPT}padding_mask": mask}
    return model, sequence() | prompt


def masked_language_model():
    inner = backbone(attention=ELU, architecture="encoder", positions="sinusoidal")
    model = stir(EfficientMaskedLM(inner, compile=False))
    positions = np.array([[1, 4, 30, 0], [2, 3, 9, 0]], "int32")
    return model, {**sequence(), "mask_positions": positions}


def text_classifier():
    inner = backbone(attention=WINDOW, architecture="encoder", positions="sinusoidal")
    model = EfficientTextClassifier(inner, 3, dropout=0.1, compile=False)
    return stir(model), sequence()


def transformer_xl():
    """Three segments, of which each goes on from the one before."""
    model = EfficientCausalLM(backbone(attention=XL, embedding="untied"), compile=False)
    segments = {f"{SEGMENT}{i}": tokens(7, seed=i) for i in range(3)}
    return model, sequence(length=SHORT) | segments


def converted(family, attention):
    stock = families.make(family, vocabulary_size=VOCABULARY)
    arrays = sequence(length=14)
    if family == "bert":
        arrays["segment_ids"] = np.tile(np.arange(14) > 6, (BATCH, 1)).astype("int32")
    return convert_backbone(stock, attention), arrays


MAKERS = {
    **{
        f"layer-{case.name}": lambda case=case: attention(
            case.make(name="layer"), case.causal, case.cross
        )
        for case in CASES
    },
    # What comes out at masked queries means nothing.
    "layer-softmax": lambda: attention(
        SoftmaxAttention(2, 8, rotary_wavelength=50.0, name="layer"), query_masks=False
    ),
    "layer-reversible-block": reversible_block,
    "layer-reversible-stack": reversible_stack,
    "layer-gated-residual": gated_residual,
    "layer-chunked-feed-forward": chunked_feed_forward,
    "layer-chunked-vocabulary-loss": chunked_vocabulary_loss,
    "layer-adaptive-computation-time": adaptive_computation_time,
    "layer-adaptive-rnn": adaptive_rnn,
    "layer-universal-encoder": lambda: universal_transformer(decoder=False),
    "layer-universal-decoder": lambda: universal_transformer(decoder=True),
    **{
        f"backbone-{name}": lambda options=options: backbone_case(options)
        for name, options in BACKBONES.items()
    },
    **{
        f"lm-{name}": lambda options=options: language_model(options)
        for name, options in LANGUAGE_MODELS.items()
    },
    "masked-lm": masked_language_model,
    "text-classifier": text_classifier,
    "transformer-xl": transformer_xl,
    **{
        f"converted-{name}": lambda arguments=arguments: converted(*arguments)
        for name, arguments in CONVERTED.items()
    },
}


def write(name):
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model, inputs = MAKERS[name]()
    arrays = {
        key if key.startswith((PROMPT, SEGMENT)) else INPUT + key: array
        for key, array in inputs.items()
    }
    # Before it runs: to generate, it is compiled.
    model.save(FILES / f"{name}.keras")
    compress(FILES / f"{name}.keras")
    outputs = outputs_of(model, arrays)
    for key, output in outputs.items():
        assert np.isfinite(output).all(), f"{name}: {key} is not finite"
        arrays[OUTPUT + key] = output
    np.savez_compressed(FILES / f"{name}.npz", **arrays)


def compress(path):
    """Keras stores without compression, and HDF5 is mostly empty."""
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MAKERS:
        write(name)
        sizes = [
            (FILES / f"{name}{kind}").stat().st_size for kind in (".keras", ".npz")
        ]
        print(f"{name:<40}{sizes[0]:>10,}{sizes[1]:>10,}", flush=True)
