"""Public packages to compare with, if installed. They run on PyTorch."""

import importlib.util

# Name on the package index, and name to import.
PEERS = {
    "performer-pytorch": "performer_pytorch",
    "local-attention": "local_attention",
    "reformer-pytorch": "reformer_pytorch",
    "flash-linear-attention": "fla",
}


def available_peers(mode, model):
    """The peers that can take part.

    Args:
        mode: `"forward"`, `"train"` or `"decode"`.
        model: Whether language models are compared.

    Returns:
        `(names, absent)`: a list, and a dict of the other names to reasons.
    """
    names, absent = [], {}
    for name, module in PEERS.items():
        if model or mode == "decode":
            absent[name] = "peers are compared as layers, forward and train"
        elif importlib.util.find_spec("torch") is None:
            absent[name] = "needs PyTorch, which is not installed"
        elif importlib.util.find_spec(module) is None:
            absent[name] = "not installed"
        else:
            names.append(name)
    return names, absent
