"""Cutting sequences into groups of chunks."""

import pytest

from keras_efficient_attn.ops.common.chunking import chunk_layout
from keras_efficient_attn.ops.common.plan import block_sizes


@pytest.mark.parametrize("length", [1, 63, 64, 65, 1000, 1024, 8192, 10007])
@pytest.mark.parametrize("floats", [10, 2560, 10**6])
def test_groups_cover_a_length_with_little_padding(length, floats):
    size, chunks, groups = chunk_layout(length, 64, 1, floats)
    covered = size * chunks * groups
    assert length <= covered < length + size * (groups + chunks)
    assert chunks == 1 or size * chunks * floats <= block_sizes().step_floats * 4 / 3


@pytest.mark.parametrize("length", [1024, 2048, 8192, 2**17])
def test_powers_of_two_need_no_padding(length):
    # 6.4 chunks of 64 would fill a group.
    floats = block_sizes().step_floats * 10 // 4096
    size, chunks, groups = chunk_layout(length, 64, 1, floats)
    assert size * chunks * groups == length
    assert chunks == 8
