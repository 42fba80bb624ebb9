"""Dense attention by definition in NumPy float64: the tests' oracle.

Nothing here uses the package; weights are arrays read from the layer.
"""

import math

import numpy as np


def weigh(similarity, value, key_mask=None, causal=False, normalize=True):
    """`(heads, weights)` of a `(batch, heads, T, S)` similarity."""
    allowed = allowed_keys(*similarity.shape[-2:], key_mask, causal)
    weights = np.where(allowed, similarity, 0.0)
    if normalize:
        total = weights.sum(-1, keepdims=True)
        weights = np.where(total == 0, 0.0, weights / np.where(total == 0, 1, total))
    return np.einsum("bhts,bshv->bthv", weights, value), weights


def weigh_logs(logs, value, key_mask=None, causal=False):
    """`weigh` of `exp(logs)`, each row relative to its largest visible entry."""
    allowed = allowed_keys(*logs.shape[-2:], key_mask, causal)
    logs = np.where(allowed, logs, -np.inf)
    largest = logs.max(-1, keepdims=True)
    return weigh(np.exp(logs - np.where(np.isfinite(largest), largest, 0)), value)


def allowed_keys(rows, columns, key_mask, causal):
    """Boolean, broadcasts to `(batch, heads, rows, columns)`."""
    allowed = np.ones((1, 1, rows, columns), bool)
    if causal:
        allowed = np.tril(allowed)
    if key_mask is not None:
        allowed = allowed & np.asarray(key_mask)[:, None, None, :]
    return allowed


def layer_output(
    layer,
    heads_of,
    query,
    value,
    key=None,
    query_mask=None,
    key_mask=None,
    causal=False,
):
    """The layer's expected output; `heads_of` computes heads from q, k and v.

    Each row is the sequence of the positions that exist, by itself.
    """
    of_one_sequence = causal or query is value
    masks = _masks_of_one_sequence(query, query_mask, key_mask, of_one_sequence)
    key = value if key is None else key
    query, key, value = (np.asarray(x, "float64") for x in (query, key, value))
    if layer.keeps_places or not masks:
        masks = masks or (None, None, None)
        inputs = query, value, key
        return _output_in_place(layer, heads_of, *inputs, masks[0], masks[2], causal)
    bias = np.asarray(layer.output_dense.get_weights()[-1], "float64")
    (batch, length), keys = query.shape[:2], key.shape[1]
    outputs = np.zeros((batch, length, *bias.shape)) + bias
    weights = np.zeros((batch, layer.num_heads, length, keys))
    for row in range(batch):
        seen, exists, keys_exist = (
            np.ones(x.shape[1], bool) if mask is None else np.asarray(mask)[row]
            for mask, x in zip(masks, (query, query, key), strict=True)
        )
        exist, keys_exist = np.flatnonzero(exists), np.flatnonzero(keys_exist)
        if not len(exist) or not len(keys_exist):
            continue
        inputs = query[row, exist], value[row, keys_exist], key[row, keys_exist]
        inputs = (x[None] for x in inputs)
        masks_ = seen[None, exist], None
        output, weight = _output_in_place(layer, heads_of, *inputs, *masks_, causal)
        outputs[row, exist] = output[0]
        weights[row][:, exist[:, None], keys_exist] = weight[0]
    return outputs, weights


def _masks_of_one_sequence(query, query_mask, key_mask, of_one_sequence):
    """`(query mask, which queries exist, key mask)`; `None` without masks."""
    if query_mask is None and key_mask is None:
        return None
    exists = query_mask
    if of_one_sequence:
        exists = key_mask
        if key_mask is not None:
            # Queries after the last key exist.
            exists = np.ones(query.shape[:2], bool)
            both = min(query.shape[1], key_mask.shape[1])
            exists[:, :both] = np.asarray(key_mask)[:, :both]
        if query_mask is None:
            query_mask = exists
        elif exists is not None:
            query_mask = np.asarray(query_mask) & exists
    return query_mask, exists, key_mask


def _output_in_place(layer, heads_of, query, value, key, query_mask, key_mask, causal):
    """The output and the weights of sequences whose positions keep their places."""
    if query_mask is not None:
        query = np.where(np.asarray(query_mask)[..., None], query, 0.0)
    if key_mask is not None:
        key, value = (
            np.where(np.asarray(key_mask)[..., None], x, 0.0) for x in (key, value)
        )

    def project(dense, x):
        kernel, bias = (np.asarray(w, "float64") for w in dense.get_weights())
        return np.einsum("btd,dhk->bthk", x, kernel) + bias

    options = {}
    if getattr(layer, "dynamic", False):
        # Spans also depend on the projected inputs.
        options = {"inputs": query}
    elif hasattr(layer, "output_gate"):
        options = {"inputs": (query, key)}
    heads, weights = heads_of(
        layer,
        project(layer.query_dense, query),
        project(layer.key_dense, key),
        project(layer.value_dense, value),
        query_mask=query_mask,
        key_mask=key_mask,
        causal=causal,
        **options,
    )
    if query_mask is not None:
        kept = np.asarray(query_mask)
        heads = np.where(kept[:, :, None, None], heads, 0.0)
        weights = np.where(kept[:, None, :, None], weights, 0.0)
    kernel, bias = (np.asarray(w, "float64") for w in layer.output_dense.get_weights())
    # `output_shape` may have several axes.
    return np.tensordot(heads, kernel, axes=2) + bias, weights


# Feature maps that estimate exp(q·k).
ESTIMATES = "favor+ hyperbolic favor++ trigonometric taylor power learned".split()


def linear_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """LinearAttention's heads, by the formula of its kernel."""
    if layer.qk_norm:
        query, key = rms(query), rms(key)
    if layer.rotary_wavelength is not None:
        query, key = (rotate(x, layer.rotary_wavelength) for x in (query, key))
    name = layer.feature_map.name
    exponential = name in ESTIMATES
    scale = layer.temperature**-0.5
    scale *= layer.key_dim**-0.25 if exponential else 1.0
    query, key = query * scale, key * scale
    weights = {
        weight.name: np.asarray(array, "float64")
        for weight, array in zip(layer.weights, layer.get_weights(), strict=True)
    }
    projection = weights.get("projection")
    if name == "favor++":
        similarity = favor_plus_plus(query, key, projection, query_mask, key_mask)
    elif name == "hedgehog":
        kernels = weights["query_feature_kernel"], weights["key_feature_kernel"]
        similarity = hedgehog(query, key, *kernels)
    elif name == "learned":
        similarity = learned_features(query, key, weights)
    else:
        order = getattr(layer.feature_map, "order", None)
        similarity = KERNELS[name](query, key, projection, order)
    if layer.window is not None:
        distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None, :]
        exact = np.exp(dots(query, key))
        similarity = np.where(abs(distance) < layer.window, exact, similarity)
    return weigh(similarity, value, key_mask, causal, layer.normalize)


def gated_heads(
    layer,
    query,
    key,
    value,
    query_mask=None,
    key_mask=None,
    causal=False,
    inputs=None,
):
    """Heads of a state that decays and is corrected, position by position.

    Unit vectors as values give the contribution of each key to each output.
    """
    del causal  # The layers are always causal.
    weights = {
        weight.path.removeprefix(f"{layer.path}/"): np.asarray(array, "float64")
        for weight, array in zip(layer.weights, layer.get_weights(), strict=True)
    }
    masks = query_mask, key_mask, key_mask
    names = "query", "key", "value"
    query, key, value = (
        short_convolution(x, weights.get(f"{name}_convolution_kernel"), mask)
        for x, name, mask in zip((query, key, value), names, masks, strict=True)
    )
    config = layer.get_config()
    value = ACTIVATIONS[config["activation"]](value)
    name = config["qk_activation"] or config["activation"]
    query, key = (ACTIVATIONS[name](x) for x in (query, key))
    log_decay, beta = rates(layer, weights, inputs[1])
    query, key, value = (
        np.repeat(x, layer.num_heads // x.shape[2], axis=2) for x in (query, key, value)
    )
    if layer.rotary_wavelength is not None:
        query, key = (rotate(x, layer.rotary_wavelength) for x in (query, key))
    if layer.feature_map.name == "unit":
        epsilon = layer.feature_map.epsilon
        query, key = (rms(x, epsilon) / np.sqrt(x.shape[-1]) for x in (query, key))
    elif layer.feature_map.name == "projected":
        query, key = projected(layer.feature_map, weights, query, key)
    elif layer.feature_map.name == "sum":
        query, key = (x / abs(x).sum(-1, keepdims=True) for x in (query, key))
    batch, length, heads, features = query.shape
    keys, dim = key.shape[1], layer.key_dim
    state = np.zeros((batch, heads, features, keys))
    matrix = np.zeros((batch, heads, length, keys))
    for t in range(length):
        if t < keys:
            k, unit = key[:, t], np.eye(keys)[t]
            after = np.exp(log_decay[:, t])[..., None] * state
            held = np.einsum("bhd,bhds->bhs", k, after)
            new = unit if beta is None else beta[:, t, :, None] * (unit - held)
            after = after + k[..., None] * np.broadcast_to(new, held.shape)[:, :, None]
            kept = True if key_mask is None else np.asarray(key_mask)[:, t]
            state = np.where(np.reshape(kept, (-1, 1, 1, 1)), after, state)
        matrix[:, :, t] = np.einsum("bhd,bhds->bhs", query[:, t], state)
    matrix /= np.sqrt(dim)
    outputs = np.einsum("bhts,bshv->bthv", matrix, value)
    if layer.output_norm.kind == "group":
        outputs = outputs - outputs.mean(-1, keepdims=True)
    power = (outputs**2).mean(-1, keepdims=True)
    outputs = outputs / np.sqrt(power + layer.output_norm.epsilon)
    outputs = outputs * weights.get("norm_scale", 1.0)
    if layer.output_gate is not None:
        gate = through(weights, "output_gate", inputs[0])
        gate = ACTIVATIONS[config["output_gate"]["activation"]](gate)
        outputs = outputs * gate.reshape(outputs.shape)
    return outputs, matrix


def projected(feature_map, weights, query, key):
    """Features of queries and keys by maps that all heads share."""
    rows = []
    for side, x in (("query", query), ("key", key)):
        own = {
            name.removeprefix(f"{side}_projected_"): w
            for name, w in weights.items()
            if name.startswith(f"{side}_projected_")
        }
        if feature_map.kind == "product":
            y = x @ own["kernel"] + own["bias"]
            y = y * (x @ own["other_kernel"] + own["other_bias"])
        elif feature_map.kind == "hedgehog":
            y = np.exp(2 * (x @ own["kernel"] + own["bias"]))
            y = np.concatenate([y, 1 / y], axis=-1)
            y = y / y.sum(-1, keepdims=True)
        elif feature_map.kind == "relu":
            y = np.maximum(x @ own["kernel"], 0)
        else:
            z = np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)
            n = z.shape[-1]
            y = [z * z[..., (np.arange(n) - j) % n] for j in range(1, 5)]
            y = np.concatenate(y, axis=-1)
        if getattr(feature_map, f"normalize_{side}"):
            y = y / (y.sum(-1, keepdims=True) + 1e-4)
        rows.append(y)
    query, key = rows
    return query * (x.shape[-1] / key.shape[-1]) ** 0.5, key


def rates(layer, weights, x):
    """`(log_decay, beta)` of a gated layer, `(batch, length, heads, 1 or features)`."""
    heads = layer.num_heads
    groups = heads // (layer.num_key_value_heads or heads)
    shape = (*x.shape[:2], heads // groups, -1)
    log_decay, beta = np.zeros((*x.shape[:2], heads, 1)), None
    if "beta/kernel" in weights:
        beta = layer.max_beta * sigmoid(x @ weights["beta/kernel"])
        beta = np.repeat(beta, groups, axis=2)
    elif hasattr(layer, "max_beta"):
        beta = np.full((*x.shape[:2], heads), layer.max_beta)
    decays = [
        name for name in ("decay", "feature_decay") if f"{name}/kernel" in weights
    ]
    if decays:
        logits = through(weights, *decays, x).reshape(shape)
        logits = logits + weights["decay_bias"].reshape(shape[2:])
        least = layer.least_log_decay
        rate = np.exp(weights.get("log_rate", 0.0)).reshape(-1, 1)
        if "log_rate" in weights and least is not None:
            log_decay = least * sigmoid(rate * logits)
        elif "log_rate" in weights:
            log_decay = -rate * np.logaddexp(0, logits)
        else:
            log_decay = -np.logaddexp(0, -logits) / layer.decay_temperature
            log_decay = np.maximum(log_decay, -np.inf if least is None else least)
        log_decay = np.repeat(log_decay, groups, axis=2)
    elif beta is None:
        decays = layer.decays or 1 - 2.0 ** (-5 - np.arange(heads))
        log_decay = log_decay + np.log(decays)[:, None]
    return log_decay, beta


def through(weights, name, x):
    """`x` through a projection of full or low rank."""
    if f"{name}_low_rank/kernel" in weights:
        x = x @ weights[f"{name}_low_rank/kernel"]
    return np.tensordot(x, weights[f"{name}/kernel"], 1) + weights.get(
        f"{name}/bias", 0.0
    )


def short_convolution(x, kernel, mask):
    """Convolves each position with earlier ones; masked positions are zero."""
    if kernel is None:
        return x
    if mask is not None:
        x = np.where(np.asarray(mask)[:, :, None, None], x, 0.0)
    result = np.zeros_like(x)
    for back in range(min(len(kernel), x.shape[1])):
        result[:, back:] += kernel[-1 - back] * x[:, : x.shape[1] - back]
    return result


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    None: lambda x: x,
    "linear": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
}


def sparse_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """SparseAttention's heads, by the sets of the paper."""
    stride, summary = layer.stride, layer.pattern_arguments["summary"]
    allowed = np.zeros((query.shape[2], query.shape[1], key.shape[1]), bool)
    for head, i, j in np.ndindex(allowed.shape):
        if layer.pattern == "strided":
            near, far = abs(i - j) <= stride, (i - j) % stride == 0
        else:
            near = i // stride == j // stride
            # Summaries are counted from the end of the block.
            far = (stride - 1 - j % stride) // summary == head % (stride // summary)
        allowed[head, i, j] = near or far
    return softmax_heads(layer, allowed, query, key, value, key_mask, causal)


def local_heads(layer, query, key, value, query_mask=None, key_mask=None, causal=False):
    """LocalAttention's heads, by the definition of near keys."""
    allowed = np.zeros((1, query.shape[1], key.shape[1]), bool)
    for _, i, j in np.ndindex(allowed.shape):
        allowed[0, i, j] = is_near(layer, i, j)
    return softmax_heads(layer, allowed, query, key, value, key_mask, causal)


def full_softmax_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """SoftmaxAttention's heads: every key, or the keys in the sliding window."""
    if layer.projection_norm is not None:
        gains = {
            w.name: np.asarray(v)
            for w, v in zip(layer.weights, layer.get_weights(), strict=True)
        }
        epsilon = layer.projection_norm_epsilon
        query, key = (
            x
            / np.sqrt((x**2).mean((2, 3), keepdims=True) + epsilon)
            * gains[f"{name}_norm_scale"]
            for x, name in ((query, "query"), (key, "key"))
        )
        groups = query.shape[2] // key.shape[2]
        key, value = (np.repeat(x, groups, axis=2) for x in (key, value))
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    window = layer.get_config()["sliding_window"] or max(query.shape[1], key.shape[1])
    allowed = (np.abs(distance) < window)[None]
    return softmax_heads(layer, allowed, query, key, value, key_mask, causal)


def is_near(layer, i, j):
    """Whether a query sees a key, for positions in sequence order."""
    if layer.window is not None:
        return abs(i - j) < layer.window
    if layer.grid is None:
        first = i - i % layer.query_block
        last = first + layer.query_block - 1
        return first - layer.memory <= j <= last + layer.memory
    steps = grid_steps(layer.grid, layer.query_block, layer.grid_order)
    return all(
        (y // size) * size - halo <= key < (y // size) * size + size + halo
        for y, key, size, halo in zip(
            steps[i], steps[j], layer.query_block, layer.memory, strict=True
        )
    )


def grid_steps(grid, block, order):
    """Row and column of each pixel in the image's order."""
    pixels = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    if order == "block":
        pixels.sort(key=lambda p: (p[0] // block[0], p[1] // block[1], *p))
    return pixels


def softmax_heads(layer, allowed, query, key, value, key_mask, causal):
    """Softmax over the keys that a boolean `(heads, T, S)` allows."""
    if layer.rotary_wavelength is not None:
        query, key = (rotate(x, layer.rotary_wavelength) for x in (query, key))
    similarity = np.exp(dots(query, key) / np.sqrt(layer.key_dim))
    return weigh(np.where(allowed, similarity, 0.0), value, key_mask, causal)


def adaptive_span_heads(
    layer,
    query,
    key,
    value,
    query_mask=None,
    key_mask=None,
    causal=False,
    inputs=None,
):
    """AdaptiveSpan's heads: m · exp(s) / Σ m · exp(s), with the layer's weights."""
    weights = {
        weight.name: np.asarray(array, "float64")
        for weight, array in zip(layer.weights, layer.get_weights(), strict=True)
    }
    if layer.dynamic:
        logits = inputs @ weights["span_kernel"] + weights["span_bias"]
        spans = layer.max_span / (1 + np.exp(-np.moveaxis(logits, -1, 1)))
    else:
        spans = layer.max_span * weights["span"][None, :, None]
    if layer.rotary_wavelength is not None:
        query, key = (rotate(x, layer.rotary_wavelength) for x in (query, key))
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])
    mask = (layer.ramp + spans[..., None] - abs(distance)) / layer.ramp
    mask = np.clip(mask, 0, 1) * (abs(distance) < layer.max_span)
    if not layer.include_self:
        mask = mask * (distance != 0)
    logits = dots(query, key)
    if layer.relative_positions:
        rows = weights["table"][np.minimum(abs(distance), layer.max_span - 1)]
        logits = logits + np.einsum("bthd,tsd->bhts", query, rows)
    similarity = mask * np.exp(logits / np.sqrt(layer.key_dim))
    return weigh(similarity, value, key_mask, causal)


def vq_heads(layer, query, key, value, query_mask=None, key_mask=None, causal=False):
    """VQAttention's heads: softmax over keys, with codes beyond the window.

    Each key is handled separately: no cache, no block, no running sum.
    """
    weights = {
        weight.name: np.asarray(value, "float64")
        for weight, value in zip(layer.weights, layer.get_weights(), strict=True)
    }
    if layer.qk_norm:
        query, key = rms(query), rms(key)
    if layer.rotary_wavelength is not None:
        query, key = (rotate(x, layer.rotary_wavelength) for x in (query, key))
    scale = layer.key_dim**-0.25
    query, key = query * scale, key * scale
    u = v = 0.0
    config = layer.config
    if config.relative_positions:
        u, v = scale * weights["content_bias"], scale * weights["position_bias"]
    sigma, log_weights = None, 0.0
    if layer.codes.assignment == "soft":
        codes = weights["codes"]
        sigma = np.exp(weights.get("log_sigma", np.log(layer.codes.sigma)))
        sigma = np.broadcast_to(sigma, codes.shape[:2])
        log_weights = weights.get("log_weights", 0.0)
    else:
        codes = weights["sum"] / np.maximum(weights["count"], 1e-2)[..., None]
    query = query + u
    position_query = query - u + v
    if layer.codes.assignment == "hard":
        query = np.einsum("bthd,hde->bthe", query, weights["query_map"])
        key = np.einsum("bthd,hde->bthe", key, weights["key_map"])
        codes = codes @ weights["key_map"]
    positions = 0.0
    if config.relative_positions:
        kernel = weights["position_kernel"] * scale
        frequency = 1e5 ** (-np.arange(len(kernel) // 2) / (len(kernel) // 2))
        distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None]
        angle = distance[..., None] * frequency
        waves = np.concatenate([np.sin(angle), np.cos(angle)], -1)
        r = np.einsum("tsd,dhk->tshk", waves, kernel)
        positions = np.einsum("bthk,tshk->bhts", position_query, r)
    similarity = vq_similarity(
        query,
        key,
        codes,
        sigma,
        config.window,
        config.quantize_window,
        positions,
        log_weights,
    )
    if config.order == 2:
        similarity = similarity * vq_expansion(
            query, key, codes, config.rank, config.window, key_mask, causal
        )
    return weigh(similarity, value, key_mask, causal)


def vq_similarity(
    query,
    key,
    codes,
    sigma=None,
    window=None,
    quantize_window=False,
    positions=0.0,
    log_weights=0.0,
):
    """exp(q·k) inside the window, Σ p(c | k) exp(q·c) outside, `(batch, heads, T, S)`.

    Nearest codes for `sigma=None`; `positions` are added to the logits in the window.
    """
    squared = ((key[:, :, :, None] - codes[None, None]) ** 2).sum(-1)
    if sigma is None:
        p = np.eye(codes.shape[1])[squared.argmin(-1)]
    else:
        # Per head, or per code.
        sigma = np.reshape(sigma, (codes.shape[0], -1)).astype("float64")
        exponent = -squared / (2 * sigma**2) - key.shape[-1] * np.log(sigma)
        exponent = exponent + log_weights
        p = np.exp(exponent - exponent.max(-1, keepdims=True))
        p = p / p.sum(-1, keepdims=True)
    of_codes = np.exp(np.einsum("bthd,hcd->bthc", query, codes))
    similarity = np.einsum("bthc,bshc->bhts", of_codes, p)
    if window is None:
        return similarity
    distance = np.arange(query.shape[1])[:, None] - np.arange(key.shape[1])[None]
    if quantize_window:
        key = np.einsum("bshc,hcd->bshd", p, codes)
    exact = np.exp(dots(query, key) + positions)
    return np.where(abs(distance) < window, exact, similarity)


def vq_expansion(
    query, key, codes, rank=None, window=None, key_mask=None, causal=False
):
    """1 + x + x²/2 + y/2 outside the window, 1 inside, `(batch, heads, T, S)`.

    x is the product of query and residual in the first `rank` coordinates. y is the sum
    over the other coordinates of q² times the mean squared residual, over the visible
    keys of the same code on the same side of the query.
    """
    rank = key.shape[-1] if rank is None else rank
    nearest = ((key[:, :, :, None] - codes[None, None]) ** 2).sum(-1).argmin(-1)
    (batch, length, heads, _), key_length = query.shape, key.shape[1]
    factor = np.ones((batch, heads, length, key_length))
    place = np.arange(key_length)
    for b, h, t in np.ndindex(batch, heads, length):
        residual = key[b, :, h] - codes[h, nearest[b, :, h]]
        products = query[b, t, h] * residual
        x = products[:, :rank].sum(-1)
        seen = place <= t if causal else place >= 0
        if key_mask is not None:
            seen = seen & key_mask[b]
        sides = (place >= 0,)
        if window is not None:
            sides = (place <= t - window, place >= t + window)
        for side in sides:
            for code in range(codes.shape[1]):
                keys = seen & side & (nearest[b, :, h] == code)
                if keys.any():
                    y = (products[keys, rank:] ** 2).mean(0).sum()
                    factor[b, h, t, keys] = (1 + x + x**2 / 2 + y / 2)[keys]
    return factor


def xl_heads(layer, query, key, value, query_mask=None, key_mask=None, causal=False):
    """RelativePositionXL's heads, computed pair by pair."""
    offset = key.shape[1] - query.shape[1] if causal == "after a memory" else 0
    weights = {
        weight.name: np.asarray(value, "float64")
        for weight, value in zip(layer.weights, layer.get_weights(), strict=True)
    }
    u, v, position = (
        weights[name] for name in ("content_bias", "position_bias", "position")
    )
    half = len(position) // 2
    frequency = 1e4 ** (-np.arange(half) / half)
    batch, length, heads, dim = query.shape
    similarity = np.zeros((batch, heads, length, key.shape[1]))
    for i, j in np.ndindex(length, key.shape[1]):
        distance = offset + i - j
        if layer.same_length and abs(distance) >= layer.memory_length:
            continue
        if causal and distance < 0:
            continue
        limit = layer.clamp_length or np.inf
        angle = np.clip(distance, -limit, limit) * frequency
        r = np.einsum("d,dhk->hk", np.append(np.sin(angle), np.cos(angle)), position)
        content = ((query[:, i] + u) * key[:, j]).sum(-1)
        place = ((query[:, i] + v) * r).sum(-1)
        similarity[:, :, i, j] = np.exp((content + place) / np.sqrt(dim))
    return weigh(similarity, value, key_mask)


def fourier_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """FourierAttention's heads, by the formula of its kernel."""
    weights = {
        variable.name: np.asarray(array, "float64")
        for variable, array in zip(layer.weights, layer.get_weights(), strict=True)
    }
    radius = np.exp(weights["log_radius"])
    if layer.linear:
        omega = weights["frequencies"]
        angle = (radius * query) @ omega.T, (radius * key) @ omega.T
        similarity = np.cos(angle[0][:, :, None] - angle[1][:, None]).mean(-1) ** 2
        similarity = np.moveaxis(similarity, -1, 1)
    else:
        similarity = fourier_kernel(query, key, radius, layer.power)
    return weigh(similarity, value, key_mask, causal)


def fourier_kernel(query, key, radius, power):
    """`Π_d (sin z_d / z_d)^power`, `(batch, heads, T, S)`.

    NumPy's sinc includes a factor π.
    """
    z = radius * (query[:, :, None] - key[:, None])
    return np.moveaxis(np.prod(np.sinc(z / np.pi) ** power, axis=-1), -1, 1)


def dots(query, key):
    return np.einsum("bthd,bshd->bhts", query, key)


def rms(x, epsilon=1e-3):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)


def rotate(x, wavelength):
    """Rotary positions by complex multiplication."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    frequency = wavelength ** (-np.arange(half) / half)
    angle = np.arange(x.shape[1])[:, None, None] * frequency
    turned = pairs * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], -1)


def squared_norm(x):
    return (x**2).sum(-1, keepdims=True)


def favor_plus(query, key, projection, order):
    def features(x):
        return np.exp(x @ projection.T - squared_norm(x) / 2)

    return dots(features(query), features(key)) / len(projection)


def hyperbolic(query, key, projection, order):
    both = np.concatenate([projection, -projection])
    return favor_plus(query, key, both, order)


def favor_plus_plus(query, key, projection, query_mask, key_mask):
    """Per sequence and head, over the pairs of positions that are not masked."""
    batch, length, heads, dim = query.shape
    result = np.zeros((batch, heads, length, key.shape[1]))
    for b in range(batch):
        rows = slice(None) if query_mask is None else np.asarray(query_mask)[b]
        columns = slice(None) if key_mask is None else np.asarray(key_mask)[b]
        for h in range(heads):
            mean = mean_square_of_sums(query[b, rows, h], key[b, columns, h])
            rho = (np.sqrt((2 * mean + dim) ** 2 + 8 * dim * mean) - 2 * mean - dim) / (
                4 * mean
            )
            a = (1 - 1 / rho) / 8

            def features(x, a=a):
                exponent = a * (projection**2).sum(-1) - squared_norm(x) / 2
                exponent = exponent + np.sqrt(1 - 4 * a) * x @ projection.T
                return (1 - 4 * a) ** (dim / 4) * np.exp(exponent)

            estimate = features(query[b, :, h]) @ features(key[b, :, h]).T
            result[b, h] = estimate / len(projection)
    return result


def mean_square_of_sums(query, key):
    """Mean of `|q + k|^2` over all pairs: FAVOR++'s statistic, without a gradient."""
    return ((query[:, None] + key[None]) ** 2).sum(-1).mean()


def trigonometric(query, key, projection, order):
    def angle(x):
        return x @ projection.T

    def size(x):
        return np.exp(squared_norm(x)[..., 0] / 2)

    difference = angle(query)[:, :, None] - angle(key)[:, None]
    cosine = np.moveaxis(np.cos(difference).mean(-1), -1, 1)
    return (
        cosine
        * np.moveaxis(size(query), -1, 1)[..., None]
        * np.moveaxis(size(key), -1, 1)[..., None, :]
    )


def taylor(query, key, projection, order):
    x = dots(query, key)
    return sum(x**i / math.factorial(i) for i in range(order + 1))


def power(query, key, projection, order):
    return (1 + dots(query, key) / order) ** order


def relu(query, key, projection, order):
    def features(x):
        if projection is not None:
            x = x @ projection.T / math.sqrt(len(projection))
        return np.maximum(x, 0) + 1e-3

    return dots(features(query), features(key))


def elu(query, key, projection, order):
    def features(x):
        return np.where(x > 0, x, np.expm1(np.minimum(x, 0))) + 1

    return dots(features(query), features(key))


def exponential(query, key, projection, order):
    return dots(np.exp(query), np.exp(key))


def hedgehog(query, key, query_kernel, key_kernel):
    """softmax([Wx, −Wx]) per head; the kernels are the transposed W."""

    def features(x, kernel):
        x = np.stack([x[:, :, h] @ kernel[h] for h in range(x.shape[2])], axis=2)
        both = np.exp(np.concatenate([x, -x], axis=-1))
        return both / both.sum(-1, keepdims=True)

    return dots(features(query, query_kernel), features(key, key_kernel))


def learned_features(query, key, weights):
    """exp(Wx + b − n·x²) / √m per head, with a bias for keys only."""
    bias = weights["feature_bias"]

    def features(x, side):
        kernel = weights[f"{side}_feature_kernel"]
        norm = weights[f"{side}_feature_norm"]
        exponents = np.einsum("bthd,hdm->bthm", x, kernel)
        return exponents - np.sum(norm * x**2, axis=-1)[..., None]

    query, key = np.exp(features(query, "query")), np.exp(features(key, "key") + bias)
    return dots(query, key) / bias.shape[-1]


def softmax(query, key, projection, order):
    query = np.exp(query)
    return dots(query / query.sum(-1, keepdims=True), np.exp(key))


def squared_relu(query, key, projection, order):
    return dots(np.maximum(query, 0) ** 2, np.maximum(key, 0) ** 2)


def identity(query, key, projection, order):
    return dots(query, key)


def unit(query, key, projection, order):
    query, key = (rms(x) / np.sqrt(x.shape[-1]) for x in (query, key))
    return dots(query, key)


def by_sum(query, key, projection, order):
    query, key = (x / abs(x).sum(-1, keepdims=True) for x in (query, key))
    return dots(query, key)


KERNELS = {
    "identity": identity,
    "unit": unit,
    "sum": by_sum,
    "favor+": favor_plus,
    "hyperbolic": hyperbolic,
    "favor++": None,
    "trigonometric": trigonometric,
    "taylor": taylor,
    "power": power,
    "relu": relu,
    "elu": elu,
    "exp": exponential,
    "softmax": softmax,
    "squared_relu": squared_relu,
}


def reformer_heads(
    layer, query, key, value, query_mask=None, key_mask=None, causal=False
):
    """ReformerLSHAttention's heads: dense softmax over the keys found in any round."""
    del query, query_mask  # The keys are the queries at unmasked positions.
    batch, length, heads, dim = key.shape
    kept = np.ones((batch, length), bool) if key_mask is None else np.asarray(key_mask)
    (rotations,) = (
        np.asarray(weight.numpy() if hasattr(weight, "numpy") else weight, "float64")
        for weight in layer.non_trainable_weights
        if weight.name == "rotations"
    )
    factors = layer.num_buckets
    factors = (factors,) if isinstance(factors, int) else factors
    aligned = causal if layer.aligned is None else layer.aligned
    hashed = heads - layer.num_local_heads
    weights = np.zeros((batch, heads, length, length))
    for b in range(batch):
        for h in range(heads):
            if h < hashed:
                rounds = [
                    angular_buckets(key[b, :, h], rotations[r, h], factors)
                    for r in range(layer.num_hashes)
                ]
                cut_aligned = aligned
            else:
                rounds, cut_aligned = [np.zeros(length, int)], True
            across = layer.across_buckets and not cut_aligned
            cut = (layer.bucket_size, cut_aligned, across)
            seen = lsh_visible(rounds, kept[b], *cut)
            first = layer.dense_prefix or 0
            seen[:first] = kept[b]
            scale = dim**-0.5 if layer.scale_logits else 1.0
            pairs = key[b, :, h], seen, kept[b]
            weights[b, h] = shared_weights(*pairs, causal, scale, layer.key_epsilon)
    return np.einsum("bhts,bshv->bthv", weights, value), weights


def angular_buckets(x, rotations, factors):
    bucket, start, base = 0, 0, 1
    for size in factors:
        projected = x @ rotations[:, start : start + size // 2]
        both = np.concatenate([projected, -projected], axis=-1)
        bucket = bucket + base * both.argmax(-1)
        start, base = start + size // 2, base * size
    return bucket


def lsh_visible(rounds, kept, chunk_size, aligned, across):
    """The keys that each position finds, from lists of positions cut into chunks.

    `across`: keys of all buckets in its chunk and the previous one, cyclically.
    """
    length = len(kept)
    seen = np.zeros((length, length), bool)
    for buckets in rounds:
        buckets = np.asarray(buckets)
        found = np.zeros_like(seen)
        order = sorted((buckets[t], t) for t in range(length) if kept[t])
        if aligned:
            lists = [[t for b, t in order if b == c] for c in set(buckets)]
        else:
            lists = [[t for _, t in order]]
        for positions in lists:
            chunks = [
                positions[i : i + chunk_size]
                for i in range(0, len(positions), chunk_size)
            ]
            for i, chunk in enumerate(chunks):
                before = chunks[i - 1] if i or across else []
                found[np.ix_(chunk, chunk)] = True
                found[np.ix_(chunk, before)] = True
        if not across:
            found &= buckets[:, None] == buckets
        seen |= found
    return seen


def shared_weights(x, seen, kept, causal, scale, epsilon=1e-3):
    """Attention of queries to their unit vectors; to itself only without other keys."""
    length = len(x)
    position = np.arange(length)
    other = position[:, None] > position if causal else position[:, None] != position
    logits = scale * x @ (rms(x, epsilon) / np.sqrt(x.shape[-1])).T
    logits = np.where(seen & other, logits, -np.inf)
    largest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1.0, total)
    return weights + np.diag((total[:, 0] == 0) & kept)
