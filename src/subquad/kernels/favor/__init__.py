"""FAVOR attention: exact near blocks and sinks, a far field of features, under one normaliser."""
