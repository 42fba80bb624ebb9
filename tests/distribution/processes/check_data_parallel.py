"""DistributedDataParallel in the processes of `torchrun`, against one process."""

import keras
import numpy as np
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

from tests.distribution.training import (
    LEARNING_RATE,
    MODELS,
    REVIVED,
    check_revived,
    check_same,
    codes_of,
    make_batches,
    make_model,
    weights_of,
)


def train(model, batches, part=slice(None)):
    """The losses of the steps on a part of each batch."""
    parameters = [v.value for v in model.trainable_variables]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    losses, call = [], model
    if part != slice(None):
        call = DistributedDataParallel(model)
    for inputs, targets in batches:
        inputs = {k: torch.from_numpy(x[part]) for k, x in inputs.items()}
        output = call(inputs, training=True)
        # With the losses that layers add.
        loss = model.compute_loss(inputs, torch.from_numpy(targets[part]), output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def gather(x):
    """The arrays of both processes."""
    tensors = [torch.zeros_like(x) for _ in range(2)]
    distributed.all_gather(tensors, x)
    return [t.numpy() for t in tensors]


def check_projections_with_seeds_of_their_own(rank):
    model = make_model(["performer:num_features=16,redraw_interval=1"])
    # Seeded as users do, so that dropout differs.
    generator = model.layers[-2]._flatten_layers()
    for layer in generator:
        seed = getattr(layer, "_projection_seed", None)
        if seed is not None:
            seed.state.assign([rank, 0])
    train(model, make_batches(), slice(rank, None, 2))
    weights = weights_of(model)
    (path,) = (path for path in weights if path.endswith("projection"))
    mine, other = gather(torch.from_numpy(weights[path].copy()))
    np.testing.assert_array_equal(mine, other)


def check_revivals(rank):
    """Codes come from the keys of the first process, on both."""
    model = make_model(REVIVED)
    train(model, make_batches(), slice(rank, None, 2))
    codes = codes_of(weights_of(model))
    mine, other = gather(torch.from_numpy(codes))
    np.testing.assert_array_equal(mine, other)
    return codes


def check_dropout_differs(rank):
    keras.utils.set_random_seed(rank)
    dropped = keras.layers.Dropout(0.5)(torch.ones(100), training=True)
    mine, other = gather(dropped)
    assert (mine != other).any()


def main():
    # In float32, rounding errors grow beyond the tolerance within five steps.
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    expected = {}
    for name, (make, batches) in MODELS.items():
        model = make()
        expected[name] = train(model, batches()), weights_of(model)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for name, (make, batches) in MODELS.items():
        model = make()
        losses = torch.from_numpy(train(model, batches(), slice(rank, None, 2)))
        mean = np.mean(gather(losses), axis=0)
        check_same((mean, weights_of(model)), expected[name])
    check_projections_with_seeds_of_their_own(rank)
    codes = check_revivals(rank)
    check_dropout_differs(rank)
    distributed.destroy_process_group()
    check_revived(codes, make_batches())


if __name__ == "__main__":
    main()
