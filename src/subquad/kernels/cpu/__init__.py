"""FAVOR and linear attention in C++ for CPUs: float32 inside, features of a tile never leave the cache."""
