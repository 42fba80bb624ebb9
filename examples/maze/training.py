"""Advantage actor-critic over whole episodes."""

import keras
import numpy as np

from maze.agents import Agent, actor_critic_loss, make_core
from maze.environment import TMaze


def learn(name, seed, arguments):
    """Trains an agent; the share of episodes that found the goal, by update."""
    keras.utils.set_random_seed(seed)
    random = np.random.default_rng(seed)
    mazes = [TMaze(arguments.corridor) for _ in range(arguments.episodes)]
    for i, maze in enumerate(mazes):
        maze.reset(seed=seed * len(mazes) + i)
    steps = mazes[0].max_steps
    core = make_core(
        name, arguments.layers, arguments.heads, arguments.dim, memory_length=steps
    )
    agent = Agent(core, arguments.dim, int(mazes[0].action_space.n))
    agent.compile(
        keras.optimizers.Adam(arguments.learning_rate, global_clipnorm=1.0),
        actor_critic_loss(arguments.entropy),
    )
    channels = mazes[0].observation_space.shape[0]
    agent(np.zeros((len(mazes), steps, channels), "float32"))
    found = []
    progress = keras.utils.Progbar(arguments.updates, verbose=arguments.verbose)
    print(f"{name}, seed {seed}", flush=True)
    for update in range(arguments.updates):
        episodes = play(agent, mazes, steps, random)
        found.append(float(np.mean(episodes["rewards"].max(axis=1) > 0)))
        targets = learning_targets(episodes, arguments.discount)
        agent.train_on_batch(episodes["observations"], targets)
        progress.update(update + 1, [("found", np.mean(found[-20:]))])
    return found


def play(agent, mazes, steps, random):
    """Plays one episode in each maze; entries after its end are zero.

    Returns:
        Dict of `observations`, `(mazes, steps, channels)`, and of `actions`,
        `rewards`, `values` and `weights`, `(mazes, steps)`.
    """
    count = len(mazes)
    state = keras.tree.map_structure(
        keras.ops.convert_to_numpy, agent.core.get_initial_state(count, steps)
    )
    current = np.stack([maze.reset()[0] for maze in mazes])
    going_on = np.ones(count, bool)
    episodes = {
        "observations": np.zeros((count, steps, current.shape[1]), "float32"),
        **{
            name: np.zeros((count, steps), "float32")
            for name in ("actions", "rewards", "values", "weights")
        },
    }
    for step in range(steps):
        inputs = {"observations": current[:, None], "state": state}
        predicted = agent.predict_on_batch(inputs)
        state, outputs = predicted["state"], predicted["outputs"][:, 0]
        # The largest sum of log-probability and Gumbel noise is a draw.
        actions = (outputs[:, :-1] + random.gumbel(size=outputs[:, :-1].shape)).argmax(
            -1
        )
        episodes["observations"][:, step] = current
        episodes["actions"][:, step] = actions
        episodes["values"][:, step] = outputs[:, -1]
        episodes["weights"][:, step] = going_on
        for i in np.flatnonzero(going_on):
            current[i], reward, terminated, truncated, _ = mazes[i].step(actions[i])
            episodes["rewards"][i, step] = reward
            going_on[i] = not (terminated or truncated)
        if not going_on.any():
            break
    return episodes


def learning_targets(episodes, discount):
    """The targets of `actor_critic_loss`, `(mazes, steps, 4)`."""
    returns = np.zeros_like(episodes["rewards"])
    following = np.zeros(len(returns))
    for step in reversed(range(returns.shape[1])):
        following = episodes["rewards"][:, step] + discount * following
        returns[:, step] = following
    weights = episodes["weights"]
    advantages = (returns - episodes["values"]) * weights
    scale = np.sqrt((advantages**2).sum() / weights.sum())
    # Rescale, so that the mean over all positions is the mean over real ones.
    weights = weights * weights.size / weights.sum()
    return np.stack(
        [episodes["actions"], advantages / (scale + 1e-6), returns, weights], axis=-1
    ).astype("float32")
