"""Where transformers finds the classes of a subquad model: `AutoModel.from_pretrained(folder, trust_remote_code=True)`.

This file lies beside the weights of every saved model and only imports them: the package subquad must be installed.
After `import subquad.models` the Auto classes know them, and neither this file nor `trust_remote_code` is used.
"""

try:  # transformers looks for missing packages itself, except in a try block, and would not name the extra
    from subquad.models import (
        SubquadConfig,
        SubquadForCausalLM,
        SubquadForMaskedLM,
        SubquadForSequenceClassification,
        SubquadForTokenClassification,
        SubquadModel,
    )
except ModuleNotFoundError as error:
    if error.name != "subquad":
        raise
    raise ImportError("this model is one of the package subquad; pip install 'subquad[models]'") from error

__all__ = [
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForMaskedLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
]
