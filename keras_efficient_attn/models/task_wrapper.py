"""Models that wrap a task to train it differently."""

import keras


class TaskWrapper(keras.Model):
    """Base of models around a task: the task is saved with them.

    In a subclass, `task_argument` names the argument and attribute that hold the task.
    """

    task_argument = None

    def get_config(self):
        task = keras.saving.serialize_keras_object(getattr(self, self.task_argument))
        # Otherwise the loaded task would have its own optimizer for all weights.
        task.pop("compile_config", None)
        return {**super().get_config(), self.task_argument: task}

    @classmethod
    def from_config(cls, config):
        task = keras.saving.deserialize_keras_object(config[cls.task_argument])
        return cls(**{**config, cls.task_argument: task})
