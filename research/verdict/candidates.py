"""The verdict compares these: every registered layer, feature maps and hybrids."""

import dataclasses

# The modules with the tasks.
PARTS = ("language", "depth", "recall", "both_ways", "listops", "classes")
# The models of these have two blocks. Those of recall have one block and no positions,
# and those of depth have four blocks.
COMMON = ("language", "both_ways", "listops", "classes")
MOST = (*COMMON, "recall")
# Positions of one layer where others of its model have none.
OWN_ROTARY = ",rotary_wavelength=10000"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One attention, in the plain model without and with a short convolution.

    Attributes:
        attention: As the backbone's, with a convolution before each layer.
        positions: Of the backbone, without a convolution.
        convolved_positions: Of the backbone, with a convolution, which gives linear
            attention the order of near tokens.
        without: The attention without a convolution, where `attention` has one of its
            own; the backbone then adds none.
        causal_only: Whether the layers compute causally only.
        small: The attention of the tasks of recall. Its state has as many bytes as one
            head of 32 x 32, 4,228, or up to 8 % less, where options of the layer allow
            it; the caches of softmax, Transformer-XL, strided keys, Reformer and
            Fourier attention have more.
        parts: Names of the tasks that it takes part in.
    """

    attention: str | list
    positions: str | None = None
    convolved_positions: str | None = None
    without: str | list | None = None
    causal_only: bool = False
    small: str | list | None = None
    parts: tuple = MOST

    @property
    def layers(self):
        """The attention, without positions: a list of a layer, or those in turn."""
        attention = self.attention
        layers = [attention] if isinstance(attention, str) else attention
        return [layer.removesuffix(OWN_ROTARY) for layer in layers]

    def options(self, convolution, both_ways=False):
        """Options of the backbone, with a convolution of 4 or without.

        Args:
            convolution: Whether there is one.
            both_ways: Whether the model is not causal. A convolution of earlier tokens
                then gives no order to later ones: the positions stay, except sinusoids,
                which do not improve masked models and fail beyond the training length.
        """
        if self.without is not None:
            attention = self.attention if convolution else self.without
            return {"attention": attention, "positions": self.positions}
        near = convolution and (not both_ways or self.positions == "sinusoidal")
        return {
            "attention": self.attention,
            "positions": self.convolved_positions if near else self.positions,
            "convolution": 4 if convolution else None,
        }

    def small_options(self, convolution):
        """Options of a model without positions for the tasks of recall."""
        return {
            "attention": self.without or self.small or self.attention,
            "convolution": 4 if convolution else None,
        }


ROTARY = {"positions": "rotary", "convolved_positions": "rotary"}
# Positions without a convolution; with one, none. Layers that do not rotate have
# sinusoids.
LINEAR = {"positions": "rotary"}
SINUSOIDAL = {"positions": "sinusoidal"}

CANDIDATES = {
    "softmax": Candidate("softmax", **ROTARY, parts=PARTS),
    "softmax, no positions": Candidate("softmax", parts=COMMON),
    "linear": Candidate("linear", **LINEAR),
    "linear, Hedgehog": Candidate(
        "linear:feature_map=hedgehog",
        **LINEAR,
        small="linear:feature_map=hedgehog,key_dim=16,value_dim=32",
    ),
    "linear, learned and window": Candidate(
        "linear:feature_map=learned,window=64",
        **LINEAR,
        small="linear:feature_map=learned,window=8,key_dim=10,value_dim=32",
    ),
    "performer": Candidate("performer", **LINEAR, small="performer:num_features=32"),
    "performer, hyperbolic": Candidate(
        "performer:feature_map=hyperbolic",
        **LINEAR,
        small="performer:feature_map=hyperbolic,num_features=32",
    ),
    "retention": Candidate("retention", causal_only=True),
    "gated-linear": Candidate("gated-linear", causal_only=True),
    "delta": Candidate("delta", without="delta:convolution=None", causal_only=True),
    "delta, beta up to 2": Candidate(
        "delta:max_beta=2.0",
        without="delta:convolution=None,max_beta=2.0",
        causal_only=True,
        parts=("recall",),
    ),
    "gated-delta": Candidate(
        "gated-delta",
        without="gated-delta:convolution=None",
        causal_only=True,
        parts=PARTS,
    ),
    "kimi-delta": Candidate(
        "kimi-delta", without="kimi-delta:convolution=None", causal_only=True
    ),
    "local": Candidate("local:window=64", **ROTARY, small="local:window=16"),
    "sparse": Candidate("sparse:stride=32", **ROTARY, small="sparse:stride=8"),
    "vq": Candidate(
        "vq:window=64,num_codes=64,relative_positions=True",
        small="vq:window=8,num_codes=16",
    ),
    "adaptive-span": Candidate(
        "adaptive-span:max_span=256,relative_positions=True",
        small="adaptive-span:max_span=16,ramp=4,relative_positions=True",
    ),
    "reformer": Candidate(
        "reformer:bucket_size=32", **SINUSOIDAL, small="reformer:bucket_size=8"
    ),
    "xl": Candidate("xl:memory_length=0"),
    "fourier": Candidate("fourier", **SINUSOIDAL),
    "three gated-delta, one softmax": Candidate(
        ["gated-delta"] * 3 + ["softmax"],
        without=["gated-delta:convolution=None"] * 3 + ["softmax"],
        causal_only=True,
        parts=("depth",),
    ),
    "linear, local in turn": Candidate(
        ["linear", f"local:window=64{OWN_ROTARY}"], **LINEAR, parts=COMMON
    ),
}
