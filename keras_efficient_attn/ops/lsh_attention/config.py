"""The options of LSH attention."""

import dataclasses

from keras_efficient_attn.ops.common.checks import check_positive_int
from keras_efficient_attn.ops.lsh_attention.layout import MAX_CODE


@dataclasses.dataclass(frozen=True)
class LSHConfig:
    """The chunking of buckets, and the chunks that a position sees.

    Attributes:
        num_buckets: Number of buckets.
        chunk_size: Positions per chunk.
        causal: Whether position `t` sees `0..t` only.
        aligned: Whether each bucket starts a new chunk.
        across_buckets: Whether positions see other buckets of a chunk.
        scale: Factor of the logits.

    Raises:
        ValueError: For sizes that are not positive integers, or for `across_buckets`
            with aligned chunks.
    """

    num_buckets: int
    chunk_size: int
    causal: bool = False
    aligned: bool = False
    across_buckets: bool = False
    scale: float = 1.0

    def __post_init__(self):
        check_positive_int("num_buckets", self.num_buckets)
        check_positive_int("chunk_size", self.chunk_size)
        if self.aligned and self.across_buckets:
            raise ValueError(
                "Aligned chunks hold one bucket: `across_buckets` and `aligned` "
                "exclude each other. Received: across_buckets=True, aligned=True"
            )

    def check_length(self, length):
        """Raises `ValueError` for more positions than the sort can hold."""
        # The sort key of the last hidden position; buckets are centred at zero.
        last_key = (self.num_buckets - self.num_buckets // 2) * (length + 1) + length
        last_code = length + (0 if self.across_buckets else 2 * self.num_buckets)
        if last_key >= 2**31 or last_code > MAX_CODE:
            raise ValueError(
                "LSH attention sorts by 32-bit keys, and counts in float32: "
                "⌈`num_buckets` / 2⌉ · (`length` + 1) + `length` must be below 2^31, "
                "and `length`, plus 2 · `num_buckets` unless `across_buckets`, at most "
                "2^24. "
                f"Received: length={length}, num_buckets={self.num_buckets}, "
                f"across_buckets={self.across_buckets}"
            )
