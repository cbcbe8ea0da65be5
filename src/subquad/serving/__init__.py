"""Serving causal models: caches on disk, and many requests in one batch that they join and leave."""

from subquad.checks.extras import extra

with extra("subquad.serving", "models"):
    from subquad.serving.batcher import Batcher
from subquad.serving.reader import join, read
from subquad.serving.request import Request, Token
from subquad.serving.saved import load_cache, save_cache

__all__ = ["Batcher", "Request", "Token", "join", "load_cache", "read", "save_cache"]
