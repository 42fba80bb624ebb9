"""The options of a `config.json`: each is used, without effect, or refused."""

from keras_efficient_attn.ops.common.checks import (
    check_positive_int,
    check_positive_number,
)

# Options of any configuration that do not change the logits: kinds of files, tokens,
# training, and defaults of transformers' `generate`.
WITHOUT_EFFECT = """
    _attn_implementation_autoset _commit_hash _name_or_path architectures auto_map
    bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id
    exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label initializer_range label2id length_penalty max_length
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_scores
    pad_token_id prefix problem_type remove_invalid_values repetition_penalty
    return_dict return_dict_in_generate sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers_version typical_p unsloth_version use_bfloat16
    use_cache
""".split()
# Options of any configuration that a decoder has in one way only.
FIXED = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "squared_relu",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "gelu": "gelu",
}


class Settings:
    """Reads a configuration, and knows in the end what was not read.

    Args:
        config: Dict from `config.json`, or one in it.
        without_effect: Names of options that do not change the logits.
        entry: The name of the dict in `config.json`, if it is in it.
    """

    def __init__(self, config, without_effect=(), entry=None):
        self._config = config
        self._prefix = "" if entry is None else f"{entry}."
        self._read = {*WITHOUT_EFFECT, *without_effect}
        for name, value in FIXED.items():
            self.only(name, value, (value, None))

    def get(self, name, default):
        """The value of an option; `default` where the configuration has none."""
        self._read.add(name)
        return self._config.get(name, default)

    def size(self, name, default):
        """The value of an option that is a positive integer.

        Raises:
            ValueError: For another value.
        """
        value = self.get(name, default)
        check_positive_int(f"{self._prefix}{name}", value)
        return value

    def factor(self, name, default, optional=False):
        """The value of an option that is a positive number, or `None` if `optional`.

        Raises:
            ValueError: For another value.
        """
        value = self.get(name, default)
        check_positive_number(f"{self._prefix}{name}", value, optional)
        return value

    def only(self, name, default, allowed):
        """The value of an option of which some values are known.

        Raises:
            ValueError: For another value.
        """
        value = self.get(name, default)
        if value not in allowed:
            known = ", ".join(repr(value) for value in allowed)
            raise ValueError(
                f"`{name}` of config.json must be one of {known} here; models with "
                f"other values are not supported. Received: {name}={value!r}"
            )
        return value

    def activation(self, name, default, allowed=tuple(ACTIVATIONS)):
        """Keras' name of an activation, or `None`."""
        value = self.only(name, default, allowed)
        return None if value is None else ACTIVATIONS[value]

    def finish(self):
        """Raises `ValueError` for options that nobody has read."""
        left = {
            name: value
            for name, value in sorted(self._config.items())
            if name not in self._read
        }
        if left:
            name, value = next(iter(left.items()))
            raise ValueError(
                f"config.json has options that are not known for model_type="
                f"{self._config['model_type']!r}: {', '.join(left)}. They may change "
                f"the model; remove those that do not. Received: {name}={value!r}"
            )
