"""Exact attention to some of the keys: windows, strides, hash buckets, clusters."""
