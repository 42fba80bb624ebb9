"""The common base of the tasks."""

import keras

from keras_efficient_attn.models.presets import PresetMixin


class TaskMixin(PresetMixin):
    """Adds shipped presets, any kind of data, and resumable training to tasks.

    A task that is saved as `.keras` and loaded is compiled as before, with the state of
    its optimizer; KerasHub's own tasks load with a new optimizer.

    KerasHub's tasks read arrays and datasets through `tf.data` or Grain, for the
    preprocessor. A task without a preprocessor needs neither: it then accepts all
    inputs of `keras.Model`, including generators and `keras.utils.PyDataset`.
    """

    def take_parts(self, backbone, preprocessor, *architectures):
        """Stores the parts of a task, if the backbone has a supported architecture.

        Raises:
            ValueError: If the backbone has another architecture.
        """
        if backbone.architecture not in architectures:
            raise ValueError(
                f"{type(self).__name__} needs a backbone with architecture="
                f"{' or '.join(map(repr, architectures))}. Received: "
                f"architecture={backbone.architecture!r}"
            )
        self.backbone = backbone
        self.preprocessor = preprocessor

    def fit(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """As `keras.Model.fit`; strings go through the preprocessor."""
        data = dict(x=x, y=y, batch_size=batch_size, sample_weight=sample_weight)
        if self.preprocessor is None:
            return keras.Model.fit(self, **data, **kwargs)
        return super().fit(**data, **kwargs)

    def evaluate(self, x=None, y=None, batch_size=None, sample_weight=None, **kwargs):
        """As `keras.Model.evaluate`; strings go through the preprocessor."""
        data = dict(x=x, y=y, batch_size=batch_size, sample_weight=sample_weight)
        if self.preprocessor is None:
            return keras.Model.evaluate(self, **data, **kwargs)
        return super().evaluate(**data, **kwargs)

    def predict(self, x, batch_size=None, **kwargs):
        """As `keras.Model.predict`; strings go through the preprocessor."""
        if self.preprocessor is None:
            return keras.Model.predict(self, x, batch_size=batch_size, **kwargs)
        return super().predict(x, batch_size=batch_size, **kwargs)

    def get_compile_config(self):
        """The arguments of `compile`, including the sampler."""
        config = super().get_compile_config()
        if config and hasattr(self, "sampler"):
            config["sampler"] = keras.saving.serialize_keras_object(self.sampler)
        return config

    def compile_from_config(self, config):
        """Compiles with the result of `get_compile_config`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)
