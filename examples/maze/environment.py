"""The T-maze, as a gymnasium environment."""

import gymnasium
import numpy as np

FORWARD, LEFT, RIGHT = range(3)
# Of an observation: the sign for each side, the corridor, and the junction.
SIGNS, CORRIDOR, JUNCTION = (0, 1), 2, 3


class TMaze(gymnasium.Env):
    """A corridor with a sign at its beginning, and a choice at its end.

    The sign is seen once, in the first observation. At the junction, turning to the
    side that it named gives 1, turning to the other -1, and both end the episode.
    Anything that does not lead on costs 0.1. An episode is cut after twice the steps
    that it takes.

    Args:
        corridor: Steps from the start to the junction.
    """

    def __init__(self, corridor):
        self.corridor = corridor
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(3)

    @property
    def max_steps(self):
        return 2 * (self.corridor + 1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = self.steps = 0
        self.goal = int(self.np_random.integers(LEFT, RIGHT + 1))
        return self._observation(sign=True), {}

    def step(self, action):
        self.steps += 1
        reward, terminated = 0.0, False
        if action == FORWARD and self.cell < self.corridor:
            self.cell += 1
        elif action != FORWARD and self.cell == self.corridor:
            reward, terminated = (1.0 if action == self.goal else -1.0), True
        else:
            reward = -0.1
        truncated = not terminated and self.steps >= self.max_steps
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self, sign=False):
        observation = np.zeros(4, np.float32)
        place = JUNCTION if self.cell == self.corridor else CORRIDOR
        observation[self.goal - LEFT if sign else place] = 1.0
        return observation
