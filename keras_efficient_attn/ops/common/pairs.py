"""Numbers of query-key pairs, for counts of operations."""


def count_pairs(window, length, causal):
    """Pairs of positions whose distance is less than `window`.

    Args:
        window: Integer from 0 to `length`.
        length: Positions.
        causal: Whether to exclude later keys.
    """
    earlier_or_same = window * length - window * (window - 1) // 2
    if causal or window == 0:
        return earlier_or_same
    return 2 * earlier_or_same - length
