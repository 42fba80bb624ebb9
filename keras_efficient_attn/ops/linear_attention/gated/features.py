"""Features of queries and keys, and values with a normalizer column."""

from keras import ops


def map_features(config, query, key, map_weights):
    """Features of queries and keys.

    Raises:
        ValueError: For maps whose features have a log scale.
    """
    query, query_log_scale = config.query_map(query, *map_weights)
    key, log_scale = config.key_map(key, *map_weights)
    if query_log_scale is not None or log_scale is not None:
        raise ValueError(
            "With `log_decay` or `beta`, `feature_map` must be a map without a log "
            f"scale, such as 'elu'. Received: {config.key_map}"
        )
    return query, key


def with_ones(value):
    """Values with an additional entry 1, which sums up the weights."""
    return ops.concatenate([value, ops.ones_like(value[..., :1])], axis=-1)
