"""Hand-made bugs of `models`, file by file."""

from mutant import Mutant

MODELS = (
    # models/cache.py
    Mutant(
        "cached positions count padding",
        "models/cache.py",
        "self.length = before + real.sum(-1)",
        "self.length = before + new",
        "tests/models/test_models.py -k 'generation_with_cache or piece_by_piece'",
    ),
    Mutant(
        "beams are not reordered",
        "models/cache.py",
        "self.state = reorder_state(self.state, beam_idx.to(self.state[-1].device))",
        "pass",
        "tests/models/test_models.py -k 'generation_with_cache or repeats_and_selects'",
    ),
    Mutant(
        "the cache forgets past tokens when a mask is made",
        "models/cache.py",
        "return self.tokens + query_length, 0",
        "return query_length, 0",
        "tests/models/test_models.py -k 'how_long_a_mask'",
    ),
    Mutant(
        "the cache says that masks begin at the second token",
        "models/cache.py",
        "return self.tokens + query_length, 0",
        "return self.tokens + query_length, 1",
        "tests/models/test_models.py -k 'how_long_a_mask'",
    ),
    # models/configuration.py
    Mutant(
        "a config that keeps a former name",
        "models/configuration.py",
        "self.attention_options = current_options(self.attention_options)",
        "pass",
        "tests/features/test_names.py -k 'config or saved_before'",
    ),
    Mutant(
        "saved models name no code",
        "models/configuration.py",
        'self.auto_map = {auto: f"{SHIM.stem}.{name}" for auto, name in AUTO_MAP.items()}',
        "pass",
        "tests/models/test_modeling_subquad.py -k 'passed_on'",
    ),
    Mutant(
        "source is copied beside the weights of models that were loaded by their shim",
        "models/configuration.py",
        "        if cls is not SubquadConfig:\n            super().register",
        "        if True:\n            super().register",
        "tests/models/test_modeling_subquad.py -k 'trusted or derived'",
    ),
    # models/heads.py
    Mutant(
        "the mean counts padding",
        "models/heads.py",
        "hidden.masked_fill(~real[..., None], 0).sum(1) / real.sum(-1, keepdim=True).clamp(min=1)",
        "hidden.mean(1)",
        "tests/models/test_models.py -k 'classification_ignores'",
    ),
    Mutant(
        "one real token is not the last one",
        "models/heads.py",
        "device=real.device), 0).amax(-1)",
        "device=real.device), 1).amax(-1)",
        "tests/models/test_models.py -k 'pooling'",
    ),
    # models/modeling.py
    Mutant(
        "linformer: layers share only where word embeddings are tied",
        "models/modeling.py",
        "else dict(self._tied_weights_keys)",
        "else super().get_expanded_tied_weights_keys()",
        "tests/models/test_linformer.py -k 'number_of_projections'",
    ),
    Mutant(
        "positions count padding",
        "models/modeling.py",
        "return (key_mask.cumsum(-1) - 1).clamp(min=0)",
        "return torch.arange(x.shape[1], device=x.device)[None]",
        "tests/models/test_models.py -k 'padding_anywhere and (sinusoidal or learned)'",
    ),
    Mutant(
        "mixed: parts are not drawn again",
        "models/modeling.py",
        "for m in self.modules() if isinstance(m, RandomFeatures)",
        "for m in self.mechanisms() if isinstance(m, RandomFeatures)",
        "tests/models/test_mixed.py -k 'redraw'",
    ),
    Mutant(
        "mixed: parts share no projection",
        "models/modeling.py",
        "for where, mechanism in self.named_modules():",
        "for where, mechanism in outermost(self):",
        "tests/models/test_mixed.py -k 'shared_by_parts'",
    ),
    # models/modeling_subquad.py
    Mutant(
        "a missing subquad is told by transformers, without the extra",
        "models/modeling_subquad.py",
        'if error.name != "subquad":',
        "if True:",
        "tests/models/test_modeling_subquad.py -k 'missing'",
    ),
    # models/scoring.py
    Mutant(
        "scores shifted by one",
        "models/scoring.py",
        "targets = ids[:, begin + 1 : end + 1, None]",
        "targets = ids[:, begin:end, None]",
        "tests/models/test_models.py -k 'log_likelihoods'",
    ),
    Mutant(
        "folders: pieces of a long text forget those before them",
        "models/scoring.py",
        'past = {"past_key_values": checks.goes_on(',
        'past = {"output_hidden_states": None is checks.goes_on(',
        "tests/models/test_scoring.py -k 'pieces_give'",
    ),
    Mutant(
        "folders: logits of large vocabularies are held at once",
        "models/scoring.py",
        "min(BATCH_TOKENS, LOGITS // model.config.get_text_config().vocab_size)",
        "min(BATCH_TOKENS, LOGITS)",
        "tests/models/test_scoring.py -k 'large_vocabularies'",
    ),
    Mutant(
        "folders: padding counts as hidden tokens",
        "models/scoring.py",
        "torch.full((len(jobs), width), _padding(before, after))",
        "torch.full((len(jobs), width), mask)",
        "tests/cli/test_pretrained.py -k 'pseudo_scores'",
    ),
)
