"""Models around a task, which train it in their own way."""

import keras


class TaskWrapper(keras.Model):
    """Base of models around a task: the task is saved with them.

    A subclass has the task as an argument and an attribute of the name `task_argument`.
    """

    task_argument = None

    def get_config(self):
        task = keras.saving.serialize_keras_object(getattr(self, self.task_argument))
        # It would come back with an optimizer of its own for all weights.
        task.pop("compile_config", None)
        return {**super().get_config(), self.task_argument: task}

    @classmethod
    def from_config(cls, config):
        task = keras.saving.deserialize_keras_object(config[cls.task_argument])
        return cls(**{**config, cls.task_argument: task})
