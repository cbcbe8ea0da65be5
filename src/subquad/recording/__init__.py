"""What the attention of a model is given and what it returns, and how far outputs are from those of exact attention."""
