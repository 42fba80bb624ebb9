"""DistributedDataParallel in the processes of `torchrun`, against one process."""

import keras
import numpy as np
import torch
import torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

from tests.distribution.training import (
    LEARNING_RATE,
    check_same,
    make_batches,
    make_model,
    weights_of,
)


def train(model, part=slice(None)):
    """The losses of the steps on a part of each batch."""
    parameters = [v.value for v in model.trainable_variables]
    optimizer = torch.optim.SGD(parameters, LEARNING_RATE)
    losses, call = [], model
    if part != slice(None):
        call = DistributedDataParallel(model)
    for inputs, targets in make_batches():
        inputs = {k: torch.from_numpy(x[part]) for k, x in inputs.items()}
        output = call(inputs, training=True)
        loss = torch.mean((output - torch.from_numpy(targets[part])) ** 2)
        loss = loss + sum(model.losses)
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
    train(model, slice(rank, None, 2))
    weights = weights_of(model)
    (path,) = (path for path in weights if path.endswith("projection"))
    mine, other = gather(torch.from_numpy(weights[path].copy()))
    np.testing.assert_array_equal(mine, other)


def check_dropout_differs(rank):
    keras.utils.set_random_seed(rank)
    dropped = keras.layers.Dropout(0.5)(torch.ones(100), training=True)
    mine, other = gather(dropped)
    assert (mine != other).any()


def main():
    alone = make_model()
    expected = train(alone)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    model = make_model()
    losses = torch.from_numpy(train(model, slice(rank, None, 2)))
    mean = np.mean(gather(losses), axis=0)
    np.testing.assert_allclose(mean, expected, rtol=1e-4)
    check_same(weights_of(model), weights_of(alone))
    check_projections_with_seeds_of_their_own(rank)
    check_dropout_differs(rank)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
