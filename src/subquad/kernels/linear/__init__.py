"""Linear attention: the kernel phi(q).phi(k) of features that act on each number alone."""
