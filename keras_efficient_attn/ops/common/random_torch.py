"""Random numbers on PyTorch, as one operation for its compiler."""

from collections.abc import Sequence

import torch


@torch.library.custom_op("keras_efficient_attn::random_numbers", mutates_args=())
def numbers(
    shape: Sequence[int], seed: torch.Tensor, is_normal: bool, dtype: str
) -> torch.Tensor:
    """Keras' numbers for a seed, from N(0, 1) or uniform in [0, 1)."""
    generator = torch.Generator(device=seed.device)
    generator.manual_seed(int(seed.sum()) & 0xFFFFFFFF)
    options = {"dtype": getattr(torch, dtype), "device": seed.device}
    draw = torch.randn if is_normal else torch.rand
    return draw(tuple(shape), generator=generator, **options)


@numbers.register_fake
def _(shape, seed, is_normal, dtype):
    return seed.new_empty(tuple(shape), dtype=getattr(torch, dtype))
