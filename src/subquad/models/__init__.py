"""Hugging Face models for all mechanisms; importing this registers them with the Auto classes."""

from subquad.checks.extras import extra

with extra("subquad.models", "models"):
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

from subquad.models.cache import SubquadCache
from subquad.models.configuration import SubquadConfig
from subquad.models.heads import (
    SubquadForCausalLM,
    SubquadForMaskedLM,
    SubquadForSequenceClassification,
    SubquadForTokenClassification,
)
from subquad.models.modeling import SubquadModel, SubquadPreTrainedModel
from subquad.models.scoring import embeddings, log_likelihoods, pseudo_log_likelihoods

__all__ = [
    "SubquadCache",
    "SubquadConfig",
    "SubquadForCausalLM",
    "SubquadForMaskedLM",
    "SubquadForSequenceClassification",
    "SubquadForTokenClassification",
    "SubquadModel",
    "SubquadPreTrainedModel",
    "embeddings",
    "log_likelihoods",
    "pseudo_log_likelihoods",
]

AutoConfig.register(SubquadConfig.model_type, SubquadConfig)
AutoModel.register(SubquadConfig, SubquadModel)
AutoModelForCausalLM.register(SubquadConfig, SubquadForCausalLM)
AutoModelForMaskedLM.register(SubquadConfig, SubquadForMaskedLM)
AutoModelForSequenceClassification.register(SubquadConfig, SubquadForSequenceClassification)
AutoModelForTokenClassification.register(SubquadConfig, SubquadForTokenClassification)
