"""Modules that are named for a backend."""

import importlib

import keras


def backend_module(package):
    """The module of a package that is named for the backend that Keras runs on."""
    return importlib.import_module(f"{package}.{keras.backend.backend()}")
