"""Sequences that are split over several devices."""

from keras_efficient_attn.distribution.sequence_parallel import SequenceParallel

__all__ = ["SequenceParallel"]
