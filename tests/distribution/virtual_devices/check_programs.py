"""How transfers are counted in compiled programs that are known."""

import jax
import numpy as np
import pytest

from tests.distribution.virtual_devices.programs import count, sent_bytes


def compile_on_devices(function, *arguments):
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("i",))
    spec = jax.sharding.PartitionSpec("i")
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped).lower(*arguments).compile()


def shift(x):
    return jax.lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 3)])


def test_transfers_in_a_loop_count_as_often_as_it_repeats():
    def loop(x):
        def step(x, _):
            inner, _ = jax.lax.scan(lambda x, _: (shift(x), None), x, None, length=3)
            return jax.numpy.sin(jax.lax.psum(inner, "i")), None

        return jax.lax.scan(step, x, None, length=5)[0]

    compiled = compile_on_devices(loop, np.ones((4, 7), "float32"))
    assert count(compiled) == {"collective-permute": 15, "all-reduce": 5}
    assert sent_bytes(compiled) == 20 * 7 * 4


def test_a_loop_that_repeats_unknown_times_is_refused():
    def loop(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9.0, lambda x: shift(x) + 1, x)

    compiled = compile_on_devices(loop, np.ones((4, 7), "float32"))
    with pytest.raises(ValueError, match="unknown times"):
        count(compiled)


def test_a_transfer_of_many_tensors_has_all_their_bytes():
    def totals(x):
        # The program numbers the results beyond the fifth, in comments.
        parts = [jax.numpy.sin(i * x) for i in range(12)]
        return sum(jax.numpy.cos(part) for part in jax.lax.psum(parts, "i"))

    compiled = compile_on_devices(totals, np.ones((4, 7), "float32"))
    assert sent_bytes(compiled) == 12 * 7 * 4


def test_transfers_of_a_branch_count():
    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, shift, lambda x: x + 1.0, x)

    compiled = compile_on_devices(branch, np.ones((4, 7), "float32"))
    assert count(compiled) == {"collective-permute": 1}
